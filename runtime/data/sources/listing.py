"""A manifest of samples, JSONL or CSV: one row, one sample.

    image_path                                 the picture to be produced
    caption                                    its text
    control_path, or control_path_0 ... _N     its controls, by N; none: a target-only sample
    mask_path                                  its mask

Paths are relative to the manifest's folder and never lead out of it. A row that can't be used is dropped as
`<manifest>:<line>` with the reason; columns of other names are ignored, and a warning lists them.
"""

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.data import captions
from runtime.data.sample import Found, Note, Scan
from runtime.data.sources import names
from runtime.errors import DataError

COLUMNS = "image_path, caption, control_path or control_path_0 to control_path_N, mask_path"
_CONTROL = re.compile(r"control_path(?:_(?P<number>[0-9]{1,100}))?")
_LAYERS = re.compile(r"image_path_[0-9]+")

Row = Mapping[str, Any]


class _RowError(ValueError):
    """Why a row can't be used."""


@dataclass(slots=True, kw_only=True)
class _Ledger:
    file: Path
    root: Path
    """Folder of the manifest, resolved."""
    found: list[Found] = field(default_factory=list)
    dropped: list[Note] = field(default_factory=list)
    ignored: dict[str, None] = field(default_factory=dict)
    folders: dict[Path, Path] = field(default_factory=dict)
    """Folders that pictures lie in, resolved: doing it for each picture takes the most time."""

    def drop(self, line: int, reason: str) -> None:
        self.dropped.append(Note(path=f"{self.file.name}:{line}", reason=reason))


def scan(file: Path) -> Scan:
    """The samples that `file` lists, ordered by id; paths of notes and files are relative to its folder.

    Raises DataError where the file can't be read, or a CSV has no header with `image_path` and `caption`.
    """
    text, warning = _text(file)
    ledger = _Ledger(file=file, root=file.parent.resolve())
    for line, row in _csv(file, text) if file.suffix.lower() == ".csv" else _jsonl(text):
        try:
            if isinstance(row, _RowError):
                raise row
            ledger.found.append(_sample(row, ledger))
        except _RowError as error:
            ledger.drop(line, str(error))
    warnings = [Note(path=file.name, reason=warning)] if warning else []
    if ledger.ignored:
        seen = ", ".join(list(ledger.ignored)[:8]) + (" ..." if len(ledger.ignored) > 8 else "")
        warnings.append(Note(path=file.name, reason=f"ignored: {seen}; read are {COLUMNS}"))
    samples = _identified(ledger.found, ledger.root)
    return Scan(
        samples=samples,
        dropped=tuple(ledger.dropped),
        warnings=tuple(warnings),
        files=(ledger.root / file.name,),
    )


def _text(file: Path) -> tuple[str, str]:
    try:
        return captions.decode(file.read_bytes())
    except (OSError, UnicodeError) as error:
        raise DataError(
            f"{file} can't be read as text: {error}", remedy="save it as UTF-8, then finetune dataset"
        ) from error


def _jsonl(text: str) -> Iterator[tuple[int, Row | _RowError]]:
    # Not splitlines: text in JSON may hold U+2028 and its like.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=_object)
        except _RowError as error:
            yield number, error
        except (ValueError, RecursionError) as error:
            yield number, _RowError(f"not JSON: {error}")
        else:
            kind = type(row).__name__
            yield number, row if isinstance(row, dict) else _RowError(f"saw a {kind}, expected an object")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise _RowError(f"{', '.join(twice)}: given twice in one row")
    return dict(pairs)


def _csv(file: Path, text: str) -> Iterator[tuple[int, Row | _RowError]]:
    # Strict: a quote that is never closed would otherwise swallow the rest of the file as one cell.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            lines = f" (lines {line} to {reader.line_num})" if reader.line_num > line else ""
            yield line, _RowError(f"not CSV: {error}{lines}")
            continue
        if not any(cell.strip() for cell in cells):
            continue
        if header is None:
            header = _header(file, cells)
        else:
            yield line, _cells(header, cells)
    if header is None:
        raise _headless(file, [])


def _header(file: Path, cells: list[str]) -> list[str]:
    header = [cell.strip() for cell in cells]
    twice = sorted(name for name, count in Counter(header).items() if name and count > 1)
    if twice:
        raise DataError(f"{file}: column {', '.join(twice)} twice", remedy="keep one, then finetune dataset")
    if not {"image_path", "caption"} <= set(header):
        raise _headless(file, header)
    return header


def _headless(file: Path, header: list[str]) -> DataError:
    return DataError(
        f"{file}: saw the first line {','.join(header)[:200] or '(empty)'}; "
        f"expected column names, separated by commas, of {COLUMNS}",
        remedy="write them as the first line, then finetune dataset",
    )


def _cells(header: list[str], cells: list[str]) -> Row | _RowError:
    if len(cells) > len(header):
        return _RowError(f"{len(cells)} cells for {len(header)} columns: a text with commas needs quotes")
    filled = zip(header, cells, strict=False)  # programs leave out empty cells at the end
    return {name: cell for name, cell in filled if cell.strip()}


def _sample(row: Row, ledger: _Ledger) -> Found:
    """The files of one row, its id not final yet. Raises _RowError."""
    controls = _controls(row)
    for name, value in row.items():
        if _LAYERS.fullmatch(name):
            raise _RowError(f"{name}: several targets in one sample (layers) are not trained here")
        if (
            name not in ("image_path", "caption", "mask_path")
            and not _CONTROL.fullmatch(name)
            and value is not None
        ):
            ledger.ignored[name] = None
    target, text = _value(row, "image_path"), _value(row, "caption")
    mask = row.get("mask_path")
    return Found(
        id="",
        target=_path("image_path", target, ledger),
        controls=tuple(_path(name, row[name], ledger) for name in controls),
        mask=_path("mask_path", mask, ledger) if mask is not None else None,
        caption=None,
        text=text,
    )


def _controls(row: Row) -> list[str]:
    """The keys of the controls, by number; control_path is number 0."""
    numbered: dict[int, str] = {}
    for name, value in row.items():
        match = _CONTROL.fullmatch(name)
        if match is None or value is None:
            continue
        number = int(match["number"] or 0)
        if number in numbered:
            raise _RowError(f"{numbered[number]} and {name} are both control {number}")
        numbered[number] = name
    return [numbered[number] for number in sorted(numbered)]


def _value(row: Row, name: str) -> str:
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise _RowError(f"{name} is missing or empty")
    return _string(name, value)


def _string(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _RowError(f"{name}: saw {json.dumps(value, ensure_ascii=False)[:60]}, expected text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise _RowError(f"{name} holds half a surrogate pair, which is no character") from None
    return value


def _path(name: str, value: Any, ledger: _Ledger) -> Path:
    """A picture in the manifest's folder. Raises _RowError."""
    written = _string(name, value)
    # What Windows wrote, read elsewhere; a name with a backslash of its own is found as it is.
    spellings = dict.fromkeys((written, written.replace("\\", "/")))
    try:
        paths = [_under(ledger, spelling) for spelling in spellings]
        path = next((item for item in paths if item is not None and item.is_file()), None)
    except (OSError, ValueError, RuntimeError) as error:
        # Not the error's own text, which holds this machine's part of the path: the manifest travels.
        why = error.strerror if isinstance(error, OSError) else "links in a circle, or a forbidden sign"
        raise _RowError(f"{name}: {written[:200]!r} is no usable path: {why}") from None
    if path is None and None in paths:
        raise _RowError(f"{name}: {written} lies outside the manifest's folder")
    if path is None:
        raise _RowError(f"{name}: {written} is missing")
    if not names.is_picture(path):
        raise _RowError(f"{name}: {written}: {names.unreadable(path)}")
    return path


def _under(ledger: _Ledger, written: str) -> Path | None:
    """The path as written from the root, `..` taken out; None where it, or a link in it, leads outside."""
    root = ledger.root
    path = Path(os.path.normpath(root / written))
    if not path.is_relative_to(root) and Path(written).is_absolute():
        path = path.resolve()  # another spelling of the same folder
    if not path.is_relative_to(root):
        return None
    if path.parent not in ledger.folders:
        ledger.folders[path.parent] = path.parent.resolve()
    real = path.resolve() if path.is_symlink() else ledger.folders[path.parent]
    return path if real.is_relative_to(root) else None


def _identified(found: list[Found], root: Path) -> tuple[Found, ...]:
    """Each sample with its id: path without suffix; with it where two would share one; `#2` for a second row."""
    full = [names.normal(item.target.relative_to(root).as_posix()) for item in found]
    short = [name.removesuffix(Path(name).suffix) for name in full]
    # `a.png.jpg` beside `a.png` keeps its suffix too, or both would be `a.png`.
    holders = Counter(dict(zip(full, short, strict=True)).values())
    taken = set(full)
    chosen = [
        name if holders[stem] > 1 or stem in taken else stem for name, stem in zip(full, short, strict=True)
    ]
    taken.update(chosen)
    rows: Counter[str] = Counter()
    samples = []
    for item, name in zip(found, chosen, strict=True):
        rows[name] += 1
        identity = name
        if rows[name] > 1:
            while (identity := f"{name}#{rows[name]}") in taken:
                rows[name] += 1
            taken.add(identity)
        samples.append(replace(item, id=identity))
    return tuple(sorted(samples, key=lambda sample: sample.id))
