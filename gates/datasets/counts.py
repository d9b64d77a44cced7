"""What a fresh look at one source of a dataset finds, in the judge's own words."""

import unicodedata
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What belongs to one target. Paths are relative to the source's root, POSIX."""

    target: str
    controls: tuple[str, ...] = ()
    needs_control: bool = False
    mask: str | None = None
    caption: str | None = None
    """the caption's file"""
    text: str | None = None
    """the caption itself, where a listing holds it"""
    where: str = ""
    """the row of a listing that tells of it: `list.jsonl:3`"""

    def images(self) -> Iterator[str]:
        yield self.target
        yield from self.controls
        if self.mask is not None:
            yield self.mask

    def missing(self) -> Iterator[str]:
        if self.needs_control and not self.controls:
            yield "control"
        if self.caption is None and self.text is None:
            yield "caption"


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    pairs: tuple[Pair, ...] = ()
    faults: tuple[str, ...] = ()
    """files that belong to no target and rows that are none, a line each"""
    found: str = ""
    """what the layout is, in words"""
    unrecognised: str = ""
    """why this is no source of its kind; empty where it is one"""


def normal(name: str) -> str:
    """One spelling of a name: macOS writes an accent as a code point of its own."""
    return unicodedata.normalize("NFC", name)


def stem_of(path: str) -> str:
    return normal(Path(path).stem)


def pictures(folder: Path | None, root: Path) -> list[str]:
    """The images right in `folder`, relative to `root`, in order of their names."""
    if folder is None:
        return []
    files = [path for path in folder.iterdir() if path.suffix.lower() in IMAGE_SUFFIXES]
    return sorted(path.relative_to(root).as_posix() for path in files if path.is_file())


def of_no_target(paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(f"{path} belongs to no target" for path in paths)
