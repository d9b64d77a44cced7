"""The rows of an archive -> files in the recipe's layout, under names that no row can choose freely."""

import io
import json
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TextIO

from PIL import Image

from runtime import files
from runtime.data.sample import Found, Note
from runtime.data.sources.identifiers import candidates, fold
from runtime.data.sources.rows import LARGEST, TOO_LARGE, Row

TARGETS, CONTROLS = "training_images", "control_images"
JOURNAL = "import.journal"
SUFFIXES = {
    "AVIF": ".avif",
    "BMP": ".bmp",
    "GIF": ".gif",
    "JPEG": ".jpg",
    "MPO": ".jpg",  # a JPEG with further pictures behind it, as phones write them
    "PNG": ".png",
    "TIFF": ".tif",
    "WEBP": ".webp",
}

Part = tuple[str, str, bytes]
"""Folder, what follows the id in the file's name, content."""


class UnusableError(Exception):
    """Why a row is dropped."""


def suffix_of(picture: bytes) -> str:
    """Of its format, whatever it was called. Damage behind the header shows later. Raises UnusableError."""
    if not picture:
        raise UnusableError("is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(picture)) as image:
                known = SUFFIXES.get(image.format or "")
    except Image.DecompressionBombError:
        raise UnusableError("claims more than 179 megapixels") from None
    except Exception:  # Pillow's readers raise whatever a damaged header leads them into
        known = None
    if known is None:
        raise UnusableError("has no known format")
    return known


def parts_of(row: Row) -> list[Part]:
    """What is written for `row`; its caption last. Raises UnusableError."""
    if row.problem:
        raise UnusableError(row.problem)
    if row.target is None:
        raise UnusableError("no target picture")
    pictures = [("the target picture", TARGETS, "", row.target)]
    for number, data in enumerate(row.controls):
        tail = f"_control_{number}" if number else ""
        pictures.append((f"control {number + 1}", CONTROLS, tail, data))
    if row.mask is not None:
        pictures.append(("the mask", CONTROLS, "_mask", row.mask))
    if sum(len(data) for *_, data in pictures) > LARGEST:
        raise UnusableError(TOO_LARGE)
    parts: list[Part] = []
    for what, folder, tail, data in pictures:
        try:
            parts.append((folder, tail + suffix_of(data), data))
        except UnusableError as error:
            raise UnusableError(f"{what} {error}") from None
    return [*parts, (TARGETS, ".txt", _caption(row.caption))]


def _caption(text: str | None) -> bytes:
    if text is None or not text.strip():
        raise UnusableError("no caption")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise UnusableError("its caption is no Unicode text: it holds half of a surrogate pair") from None


@dataclass(slots=True, kw_only=True)
class Unpacker:
    """Writes rows under `into`. Before a file is made its name is in the journal, so that a rerun knows it as ours."""

    into: Path
    ours: frozenset[str]
    """What earlier unpackings made, relative to `into`; no other file is written over or removed."""
    samples: list[Found] = field(default_factory=list)
    dropped: list[Note] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    """Every file of the samples, relative to `into`, with its bytes."""
    read: dict[Path, None] = field(default_factory=dict)
    """Picture files beside the archives, in the order met."""
    _taken: set[str] = field(default_factory=set)
    _journal: TextIO | None = None

    def __enter__(self) -> "Unpacker":
        journal = self.into / JOURNAL
        files.write_text(journal, "".join(json.dumps([name]) + "\n" for name in sorted(self.ours)))
        self._journal = journal.open("a", encoding="utf-8", newline="\n")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._journal is not None
        self._journal.close()

    def take(self, rows: Iterable[Row | Note]) -> None:
        for row in rows:
            if isinstance(row, Note):
                self.warnings.append(row)
                continue
            try:
                self._write(row, parts_of(row))
            except UnusableError as error:
                self.dropped.append(Note(path=row.place, reason=str(error)))

    def _write(self, row: Row, parts: list[Part]) -> None:
        identifier = self._pick(row, parts)
        self._taken.add(fold(identifier))
        made = [(f"{folder}/{identifier}{tail}", data) for folder, tail, data in parts]
        self._announce([name for name, _ in made])
        for name, data in made:
            path = self.into / name
            if not _holds(path, data):
                files.write_bytes(path, data)
            self.sizes[name] = len(data)
        self.read.update(dict.fromkeys(row.read))
        found = found_of(self.into, identifier, [name for name, _ in made], masked=row.mask is not None)
        self.samples.append(found)
        if row.warning:
            self.warnings.append(Note(path=row.place, reason=row.warning))

    def _pick(self, row: Row, parts: list[Part]) -> str:
        """The first id that is free: in this unpacking, and on the disk of files that aren't ours."""
        archive = Path(row.archive).stem
        return next(
            identifier
            for identifier in candidates(row.name, archive, row.number)
            if fold(identifier) not in self._taken
            and not any(self._foreign(f"{folder}/{identifier}{tail}", data) for folder, tail, data in parts)
        )

    def _foreign(self, name: str, data: bytes) -> bool:
        path = self.into / name
        # A kill together with the power may lose the journal's last lines; what is the same needs no writing.
        return name not in self.ours and (path.is_symlink() or path.exists()) and not _holds(path, data)

    def _announce(self, names: list[str]) -> None:
        assert self._journal is not None
        self._journal.write(json.dumps(names) + "\n")
        self._journal.flush()

    def remove_unwanted(self) -> None:
        """What an earlier unpacking made and this one did not."""
        wanted = {fold(name) for name in self.sizes}
        for name in self.ours:
            path = self.into / name
            if fold(name) not in wanted and (path.is_file() or path.is_symlink()):
                path.unlink()


def found_of(into: Path, identifier: str, names: Sequence[str], *, masked: bool) -> Found:
    """The sample of the files `names`: target, controls, mask if `masked`, caption."""
    target, *rest, caption = (into / name for name in names)
    mask = rest.pop() if masked else None
    return Found(id=identifier, target=target, controls=tuple(rest), mask=mask, caption=caption)


def journal_of(into: Path) -> Iterator[str]:
    """The files that an unfinished unpacking made or was about to make; a torn last line is passed over."""
    try:
        lines = (into / JOURNAL).read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return
    for line in lines:
        try:
            names = json.loads(line)
        except ValueError:
            continue
        yield from (name for name in names if isinstance(name, str) and is_ours(name))


def is_ours(name: str) -> bool:
    """True where `name` is one that we could have made: no list, however edited, leads out of the folder."""
    folder, slash, file = name.partition("/")
    named = bool(slash and file.strip(".")) and not set(file) & set("/\\:\0")
    return folder in (TARGETS, CONTROLS) and named


def _holds(path: Path, data: bytes) -> bool:
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data
