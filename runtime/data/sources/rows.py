"""Rows of an archive on their way to files, and what their parts are called where nobody says.

A reader of one kind of archive (`tables`, `webdataset`) gives an `Archive`; `unpacking` writes its rows down.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from runtime.data.sample import Note
from runtime.errors import DataError

TARGETS = ("target", "image", "output_image", "edited_image", "target_image", "output")
CONTROLS = (
    "control",
    "control_image",
    "control_images",
    "input_image",
    "source_image",
    "original_image",
    "condition_image",
    "conditioning_image",
    "source",
    "input",
)
"""One of these, and any number of `NUMBERED_CONTROL`, which come after it."""
NUMBERED_CONTROL = re.compile(r"control(?:_image)?_([0-9]{1,4})")
MASKS = ("mask", "mask_image")
CAPTIONS = ("caption", "text", "prompt", "instruction", "edit_prompt")
NAMES = ("id", "__key__", "file_name")
"""Columns that name a row; of a `file_name` the stem."""

LARGEST = 2**30
"""Bytes of the pictures of one row: it is held in memory."""
TOO_LARGE = "more than 1 GiB of pictures in one row"


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """What the dataset file says of columns. None or empty: found by the names above."""

    image: str | None = None
    controls: tuple[str, ...] = ()
    mask: str | None = None
    caption: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    archive: str
    """Name of the archive file, as notes show it."""
    number: int
    """Counted from 0 in its archive."""
    key: str = ""
    """As notes show the row; empty: its number."""
    name: str = ""
    """What it would like its id to be; nothing is known of it."""
    target: bytes | None = None
    controls: tuple[bytes, ...] = ()
    mask: bytes | None = None
    caption: str | None = None
    problem: str = ""
    """Why it can't be used, if the reader knows."""
    warning: str = ""
    read: tuple[Path, ...] = ()
    """Picture files beside the archive that the row refers to."""

    @property
    def place(self) -> str:
        return f"{self.archive}/{self.key or self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """An opened archive: its files are listed, none of its rows is read."""

    root: Path
    """Folder that the names of `files` are relative to."""
    files: tuple[Path, ...]
    rows: Callable[[], Iterator[Row | Note]]
    """Each call reads anew. A Note is a warning about the archive."""
    warnings: tuple[Note, ...] = ()


def printable(name: str) -> str:
    """`name` as JSON can hold it: a tar's names need not be Unicode."""
    return name.encode("utf-8", "backslashreplace").decode()


def one_of(seen: Iterable[str], known: tuple[str, ...], what: str, key: str) -> str | None:
    """The one of `seen` with a known name. Raises DataError where there are several."""
    found = [name for name in seen if name.lower() in known]
    if len(found) > 1:
        raise DataError(
            f"{' and '.join(sorted(found))} could each be the {what}",
            remedy=f"set {key} in the dataset file to one of them, then finetune dataset",
        )
    return found[0] if found else None


def controls_among(seen: Iterable[str]) -> tuple[str, ...]:
    """`control` before `control_1` before `control_10`. Raises DataError where it is open which are meant."""
    seen = tuple(seen)
    first = one_of(seen, CONTROLS, "control", "control_keys")
    numbered: dict[int, str] = {}
    for name in seen:
        if match := NUMBERED_CONTROL.fullmatch(name.lower()):
            number = int(match[1])
            if number in numbered:
                raise DataError(
                    f"{numbered[number]} and {name} could each be control {number}",
                    remedy="set control_keys in the dataset file to those meant, then finetune dataset",
                )
            numbered[number] = name
    return (*((first,) if first else ()), *(numbered[number] for number in sorted(numbered)))


def choose(asked: Columns, pictures: Iterable[str], texts: Iterable[str], where: str) -> Columns:
    """`asked` completed from the columns of a table. Raises DataError that lists what was seen."""
    pictures, texts = tuple(pictures), tuple(texts)
    named = {asked.image, *asked.controls, asked.mask}
    free = [name for name in pictures if name not in named]
    try:
        _all_there(asked, pictures, texts)
        image = asked.image or _needed(free, TARGETS, "target picture", "image_key")
        free = [name for name in free if name != image]
        return Columns(
            image=image,
            controls=asked.controls or controls_among(free),
            mask=asked.mask or one_of(free, MASKS, "mask", "mask_key"),
            caption=asked.caption or _needed(texts, CAPTIONS, "caption", "caption_key"),
        )
    except DataError as error:
        raise DataError(
            f"{where}: {error.message}; saw the picture columns: {_listed(pictures)}; "
            f"the text columns: {_listed(texts)}",
            remedy=error.remedy,
        ) from None


def _all_there(asked: Columns, pictures: tuple[str, ...], texts: tuple[str, ...]) -> None:
    wanted = [("image_key", asked.image, pictures), ("mask_key", asked.mask, pictures)]
    wanted += [("control_keys", name, pictures) for name in asked.controls]
    for key, name, seen in (*wanted, ("caption_key", asked.caption, texts)):
        if name is not None and name not in seen:
            kind = "text" if seen is texts else "pictures"
            raise DataError(
                f"{key} {name!r} is no column of {kind}",
                remedy=f"mend {key} in the dataset file, then finetune dataset",
            )


def _needed(seen: Iterable[str], known: tuple[str, ...], what: str, key: str) -> str:
    found = one_of(seen, known, what, key)
    if found is None:
        raise DataError(
            f"no column is known to be the {what} (known: {', '.join(known)})",
            remedy=f"set {key} in the dataset file to its column, then finetune dataset",
        )
    return found


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "none"
