"""The recipe's folder layout: which files of a dataset make a sample.

    <root>/<targets>/<stem>.<ext>              the picture to be produced
    <root>/<controls>/<stem>.<ext>             its first control
    <either>/<stem>_control_<N>.<ext>          further controls, by N
    <either>/<stem>_mask.<ext>                 its mask
    <either>/<stem>.txt                        its caption; that of the target folder wins

Names match whole: `a1`, `a10` and `a1_2` never take each other's files. A file that is
used by no sample is in `dropped` with the reason.
"""

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from runtime.errors import DataError

TARGET_FOLDERS = ("training_images", "images", "target_images", "target", "targets")
CONTROL_FOLDERS = ("control_images", "control", "condition_images", "controls")
IMAGE_SUFFIXES = frozenset((".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"))
CAPTION_SUFFIX = ".txt"
HOLDOUT_FILE = "holdout.txt"

_CONTROL = re.compile(r"(?P<stem>.+)_control_(?P<number>[0-9]+)", re.DOTALL)
_MASK = re.compile(r"(?P<stem>.+)_mask", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something about one file; `path` is relative to the dataset's root, POSIX."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files of one complete sample. `id` is the target's stem, in NFC."""

    id: str
    target: Path
    controls: tuple[Path, ...]
    mask: Path | None
    caption: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    samples: tuple[Found, ...]
    dropped: tuple[Note, ...]


def normal(name: str) -> str:
    """One spelling of a name: macOS writes é as two code points, Windows as one."""
    return unicodedata.normalize("NFC", name)


def scan(root: Path) -> Scan:
    """The samples under `root`, ordered by id. Raises DataError where the layout isn't recognised."""
    if not root.is_dir():
        raise DataError(f"the dataset {root} is not a folder", remedy="finetune init --dataset FOLDER")
    sorter = _Sorter(root=root.resolve())
    targets, controls = sorter.folders()
    sorter.read_targets(sorter.files(targets))
    if controls is not None:
        sorter.read_controls(sorter.files(controls))
    samples = [found for stem in sorted(sorter.parts) if (found := sorter.finish(stem)) is not None]
    return Scan(samples=tuple(samples), dropped=tuple(sorted(sorter.dropped, key=lambda note: note.path)))


@dataclass(slots=True, kw_only=True)
class _Parts:
    """What has been found for one target so far."""

    target: Path
    controls: dict[int, Path] = field(
        default_factory=dict
    )  # 0 is <stem>.<ext> when there is one: see `exact`
    exact: Path | None = None
    mask: Path | None = None
    caption: Path | None = None


@dataclass(slots=True, kw_only=True)
class _Sorter:
    root: Path
    parts: dict[str, _Parts] = field(default_factory=dict)
    dropped: list[Note] = field(default_factory=list)

    def drop(self, path: Path, reason: str) -> None:
        shown = path.relative_to(self.root).as_posix()
        # A name that isn't Unicode can't be written to JSON as it is.
        self.dropped.append(Note(path=shown.encode("utf-8", "backslashreplace").decode(), reason=reason))

    def folders(self) -> tuple[Path, Path | None]:
        entries = sorted(self.root.iterdir())
        targets = self._pick(entries, TARGET_FOLDERS, "target")
        controls = self._pick(entries, CONTROL_FOLDERS, "control")
        for entry in entries:
            known = entry.suffix.lower() in (*IMAGE_SUFFIXES, CAPTION_SUFFIX)
            if entry.is_file() and known and entry.name != HOLDOUT_FILE:
                self.drop(entry, "lies beside the target and control folders, expected in one of them")
        if targets is None:
            seen = ", ".join(sorted(entry.name for entry in entries if entry.is_dir())) or "none"
            raise DataError(
                f"{self.root}: no folder of targets; saw the folders: {seen}; "
                f"expected one of {', '.join(TARGET_FOLDERS)}",
                remedy="put targets in training_images/, controls in control_images/, then finetune dataset",
            )
        return targets, controls

    def _pick(self, entries: list[Path], names: tuple[str, ...], role: str) -> Path | None:
        chosen: Path | None = None
        ranked = [
            entry for name in names for entry in entries if entry.name.lower() == name and entry.is_dir()
        ]
        for entry in ranked:
            if not self._inside(entry):
                self.drop(entry, "a link that leads out of the dataset")
            elif chosen is None:
                chosen = entry
            else:
                self.drop(entry, f"a second folder of {role}s, {chosen.name} is used")
        return chosen

    def _inside(self, path: Path) -> bool:
        return path.resolve().is_relative_to(self.root)

    def files(self, folder: Path) -> list[Path]:
        """Pictures and captions of `folder`; anything else is dropped with its reason."""
        kept = []
        for entry in sorted(folder.iterdir()):
            reason = self._unusable(entry)
            if reason:
                self.drop(entry, reason)
            else:
                kept.append(entry)
        return kept

    def _unusable(self, entry: Path) -> str:
        if not self._inside(entry):
            return "a link that leads out of the dataset"
        if entry.is_dir():
            return "a folder, only files are read here"
        if not entry.is_file():
            return "a broken link" if entry.is_symlink() else "not a regular file"
        if entry.suffix.lower() not in IMAGE_SUFFIXES and entry.suffix.lower() != CAPTION_SUFFIX:
            return (
                "neither a picture that is read ("
                + " ".join(sorted(IMAGE_SUFFIXES))
                + ") nor a caption (.txt)"
            )
        try:
            entry.name.encode("utf-8")
        except UnicodeEncodeError:
            return "its name is not Unicode: rename it"
        return ""

    def read_targets(self, files: Iterable[Path]) -> None:
        pictures, captions = _split(files)
        # Shortest first: a target is known before what is derived from its name.
        for path in sorted(pictures, key=lambda item: (len(normal(item.stem)), normal(item.stem), item.name)):
            stem = normal(path.stem)
            if stem in self.parts:
                self.drop(
                    path, f"same name as {self.parts[stem].target.name} but for the extension: rename one"
                )
            elif not self._attach(path):
                self.parts[stem] = _Parts(target=path)
        for path in captions:
            self._caption(path)

    def read_controls(self, files: Iterable[Path]) -> None:
        pictures, captions = _split(files)
        for path in pictures:
            parts = self.parts.get(normal(path.stem))
            if parts is None:
                if not self._attach(path):
                    self.drop(path, "no target has this name")
            elif parts.exact is not None:
                self.drop(path, f"same name as {parts.exact.name} but for the extension: rename one")
            else:
                parts.exact = path
        for path in captions:
            self._caption(path)

    def _attach(self, path: Path) -> bool:
        """Give a `_control_N` or `_mask` file to its target; False if it is none of a known target."""
        stem = normal(path.stem)
        control, mask = _CONTROL.fullmatch(stem), _MASK.fullmatch(stem)
        if control and control["stem"] in self.parts:
            owned = self.parts[control["stem"]].controls
            first = owned.setdefault(int(control["number"]), path)
            if first is not path:
                self.drop(
                    path, f"control {int(control['number'])} of {control['stem']} is {first.name} already"
                )
            return True
        if mask and mask["stem"] in self.parts:
            parts = self.parts[mask["stem"]]
            if parts.mask is not None:
                self.drop(path, f"the mask of {mask['stem']} is {parts.mask.name} already")
            else:
                parts.mask = path
            return True
        return False

    def _caption(self, path: Path) -> None:
        parts = self.parts.get(normal(path.stem))
        if parts is None:
            self.drop(path, "no target has this name")
        elif parts.caption is not None:
            where = parts.caption.relative_to(self.root).as_posix()
            self.drop(path, f"the caption is {where} already")
        else:
            parts.caption = path

    def finish(self, stem: str) -> Found | None:
        parts = self.parts[stem]
        exact = (parts.exact,) if parts.exact is not None else ()
        controls = exact + tuple(parts.controls[number] for number in sorted(parts.controls))
        if not controls:
            self.drop(
                parts.target,
                f"no control: expected {stem}.<ext> in control_images/ or {stem}_control_1.<ext>",
            )
            return None
        if parts.caption is None:
            self.drop(parts.target, f"no caption: expected {stem}.txt")
            return None
        return Found(id=stem, target=parts.target, controls=controls, mask=parts.mask, caption=parts.caption)


def _split(files: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """Pictures, captions."""
    pictures: list[Path] = []
    captions: list[Path] = []
    for path in files:
        (captions if path.suffix.lower() == CAPTION_SUFFIX else pictures).append(path)
    return pictures, captions
