"""What a file's name says: a picture, a caption, whose control or mask; and the ledger of what became of each.

Shared by the sources that lie in folders. Names match whole, in NFC.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from runtime.data.sample import Found, Note, Scan
from runtime.errors import DataError

IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".avif"))
PHONE_SUFFIXES = frozenset((".heic", ".heif"))  # Pillow has no reader for them
CAPTION_SUFFIX = ".txt"

NUMBERED = re.compile(r"(?P<stem>.+)_(?P<number>[0-9]+)", re.DOTALL)
CONTROL = re.compile(r"(?P<stem>.+)_control_(?P<number>[0-9]+)", re.DOTALL)
MASK = re.compile(r"(?P<stem>.+)_mask", re.DOTALL)

OUTSIDE = "a link that leads out of the dataset"
TWINS = "same name as {} but for the extension: rename one"


def normal(name: str) -> str:
    """One spelling of a name: macOS writes é as two code points, Windows as one."""
    return unicodedata.normalize("NFC", name)


def stem(path: Path) -> str:
    return normal(path.stem)


def is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES


def unreadable(path: Path, caption: str = "") -> str:
    """Why a file of this name is no picture; `caption` is the suffix that would have been right, too."""
    if path.suffix.lower() in PHONE_SUFFIXES:
        return "HEIC is not read: convert it to JPEG or PNG"
    reason = f"neither a picture that is read ({' '.join(sorted(IMAGE_SUFFIXES))})"
    return f"{reason} nor a caption ({caption})" if caption else reason.replace("neither", "not")


def shown(path: Path, root: Path) -> str:
    """`path` as a Note says it. A name that isn't Unicode can't be written to JSON as it is."""
    return path.relative_to(root).as_posix().encode("utf-8", "backslashreplace").decode()


def listed(folder: Path) -> list[Path]:
    """What lies in `folder`, by name."""
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise DataError(
            f"{folder} can't be listed: {error.strerror}", remedy="make it readable, then finetune dataset"
        ) from error


@dataclass(slots=True, kw_only=True)
class Parts:
    """What has been found for one target so far."""

    target: Path
    exact: Path | None = None
    """The control that has the target's own name: always the first."""
    numbered: dict[int, Path] = field(default_factory=dict)
    mask: Path | None = None
    caption: Path | None = None

    def controls(self) -> tuple[Path, ...]:
        exact = (self.exact,) if self.exact is not None else ()
        return exact + tuple(self.numbered[number] for number in sorted(self.numbered))


@dataclass(slots=True, kw_only=True)
class Ledger:
    """The parts of each target by its stem, and every file that is used by none."""

    root: Path
    """Resolved; paths in notes are relative to it."""
    bounds: tuple[Path, ...]
    """Resolved folders; a link that leads out of them is not followed."""
    parts: dict[str, Parts] = field(default_factory=dict)
    dropped: list[Note] = field(default_factory=list)

    def drop(self, path: Path, reason: str) -> None:
        self.dropped.append(Note(path=shown(path, self.root), reason=reason))

    def inside(self, path: Path) -> bool:
        try:
            real = path.resolve()
        except (OSError, RuntimeError):  # links in a circle
            return False
        return any(real.is_relative_to(bound) for bound in self.bounds)

    def files(self, entries: Iterable[Path], caption: str) -> tuple[list[Path], list[Path]]:
        """Pictures and captions (names that end in `caption`); anything else is dropped with its reason."""
        pictures: list[Path] = []
        captions: list[Path] = []
        for entry in entries:
            reason = self._unusable(entry, caption)
            if reason:
                self.drop(entry, reason)
            else:
                (captions if _is_caption(entry, caption) else pictures).append(entry)
        return pictures, captions

    def _unusable(self, entry: Path, caption: str) -> str:
        # The folder is resolved: only a link can lead out of it, and resolving each file takes the most time.
        if entry.is_symlink() and not self.inside(entry):
            return OUTSIDE
        if entry.is_dir():
            return "a folder, only files are read here"
        if not entry.is_file():
            return "a broken link" if entry.is_symlink() else "not a regular file"
        if not is_picture(entry) and not _is_caption(entry, caption):
            return unreadable(entry, caption)
        try:
            entry.name.encode("utf-8")
        except UnicodeEncodeError:
            return "its name is not Unicode: rename it"
        return ""

    def take_exact(self, owner: str, path: Path) -> None:
        parts = self.parts[owner]
        if parts.exact is not None:
            self.drop(path, TWINS.format(parts.exact.name))
        else:
            parts.exact = path

    def take_numbered(self, owner: str, number: int, path: Path) -> None:
        first = self.parts[owner].numbered.setdefault(number, path)
        if first is not path:
            self.drop(path, f"control {number} of {owner} is {first.name} already")

    def take_mask(self, owner: str, path: Path) -> None:
        parts = self.parts[owner]
        if parts.mask is not None:
            self.drop(path, f"the mask of {owner} is {parts.mask.name} already")
        else:
            parts.mask = path

    def take_caption(self, owner: str, path: Path) -> None:
        parts = self.parts.get(owner)
        if parts is None:
            self.drop(path, "no target has this name")
        elif parts.caption is not None:
            self.drop(path, f"the caption is {shown(parts.caption, self.root)} already")
        else:
            parts.caption = path

    def finish(self, *, no_control: str, no_caption: str) -> Scan:
        """All complete samples; others are dropped for the reason given, `{0}` in it being the stem. An empty
        `no_control` means that a sample is complete without one."""
        samples = []
        for owner, parts in sorted(self.parts.items()):
            controls = parts.controls()
            if not controls and no_control:
                self.drop(parts.target, no_control.format(owner))
            elif parts.caption is None:
                self.drop(parts.target, no_caption.format(owner))
            else:
                samples.append(
                    Found(
                        id=owner,
                        target=parts.target,
                        controls=controls,
                        mask=parts.mask,
                        caption=parts.caption,
                    )
                )
        dropped = sorted(self.dropped, key=lambda note: note.path)
        return Scan(samples=tuple(samples), dropped=tuple(dropped))


def _is_caption(path: Path, suffix: str) -> bool:
    return path.name.lower().endswith(suffix.lower())
