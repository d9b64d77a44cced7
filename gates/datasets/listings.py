"""A JSONL or CSV of pictures counted afresh, row by row."""

import csv
import io
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gates.datasets.counts import Count, Pair
from gates.datasets.wording import decode
from gates.evidence import EvidenceError, inside, parse_json, read_bytes

IMAGE, CAPTION, MASK = "image_path", "caption", "mask_path"
_CONTROL = re.compile(r"control_path(?:_(?P<number>[0-9]+))?")


def count(listing: Path, kind: str) -> Count:
    """Each row is a sample, with or without control; its files lie in the listing's folder or below."""
    if not listing.is_file():
        return Count(unrecognised=f"{listing.name} is not a file")
    pairs, faults = [], []
    for where, row in _rows(listing, kind):
        try:
            pairs.append(_pair(listing.parent, row, where))
        except EvidenceError as error:
            faults.append(str(error))
    return Count(pairs=tuple(pairs), faults=tuple(faults), found=f"{len(pairs)} rows in {listing.name}")


def _rows(listing: Path, kind: str) -> Iterator[tuple[str, Any]]:
    """`list.jsonl:3` and its row, which is an object, or the error that reading it gave."""
    text = decode(read_bytes(listing, listing.name), listing.name)
    if kind == "csv":
        yield from _csv_rows(text, listing.name)
        return
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{listing.name}:{number}"
        if line.strip():
            try:
                yield where, parse_json(line.encode("utf-8"), where, allow_nan=True)
            except (EvidenceError, UnicodeEncodeError) as error:
                yield where, EvidenceError(where, f"is no row ({error})")


def _csv_rows(text: str, shown: str) -> Iterator[tuple[str, Any]]:
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    header: list[str] = []
    start = 1
    try:
        for cells in reader:
            where, start = f"{shown}:{start}", reader.line_num + 1
            if not any(cell.strip() for cell in cells):
                continue
            if not header:
                header = [cell.strip() for cell in cells]
            elif len(cells) > len(header):
                yield where, EvidenceError(where, f"has {len(cells)} cells for {len(header)} columns")
            else:
                yield where, {name: cell for name, cell in zip(header, cells, strict=False) if cell.strip()}
    except csv.Error as error:
        yield f"{shown}:{start}", EvidenceError(f"{shown}:{start}", f"is no CSV ({error})")


def _pair(root: Path, row: Any, where: str) -> Pair:
    if isinstance(row, EvidenceError):
        raise row
    if not isinstance(row, dict):
        raise EvidenceError(where, "is no object")
    target = _file(root, row, IMAGE, where)
    if target is None:
        raise EvidenceError(where, f"has no {IMAGE}")
    text = row.get(CAPTION)
    if not isinstance(text, str) or not text.strip():
        raise EvidenceError(where, f"has no {CAPTION}")
    controls = (_file(root, row, name, where) for name in _control_names(row, where))
    return Pair(
        target=target,
        controls=tuple(path for path in controls if path is not None),
        mask=_file(root, row, MASK, where),
        text=text,
        where=where,
    )


def _control_names(row: dict[str, Any], where: str) -> list[str]:
    """The names of its control cells by number; the one without is 0."""
    numbered: dict[int, str] = {}
    for name, value in row.items():
        match = _CONTROL.fullmatch(name)
        if match and value is not None and value != "":
            number = int(match["number"] or 0)
            if numbered.setdefault(number, name) != name:
                raise EvidenceError(where, f"has control {number} twice")
    return [numbered[number] for number in sorted(numbered)]


def _file(root: Path, row: dict[str, Any], name: str, where: str) -> str | None:
    """The file that a cell names, relative to `root`; None of an empty cell."""
    value = row.get(name)
    if value is None or value == "":
        return None
    if not isinstance(value, str):
        raise EvidenceError(where, f"has a {name} that is no text")
    written = value.replace("\\", "/")  # what Windows wrote, read elsewhere
    path = inside(root, _relative(root, written), f"{where}: {name} {value}")
    if not path.is_file():
        raise EvidenceError(where, f"names {value}, which is missing")
    return path.relative_to(root).as_posix()


def _relative(root: Path, value: str) -> str:
    """`value` from `root` on, `..` taken out where it comes back; as it is where it leads elsewhere."""
    joined = Path(os.path.normpath(root / value))
    try:
        for base, path in ((root, joined), (root.resolve(), joined.resolve())):
            if path.is_relative_to(base):
                return path.relative_to(base).as_posix()
    except (OSError, ValueError):
        pass  # `inside` says what is wrong with such a path
    return value
