"""The recipe's folder layout: which files of a dataset make a sample.

    <root>/<targets>/<stem>.<ext>              the picture to be produced
    <root>/<controls>/<stem>.<ext>             its first control
    <either>/<stem>_control_<N>.<ext>          further controls, by N
    <either>/<stem>_mask.<ext>                 its mask
    <either>/<stem>.txt                        its caption; that of the target folder wins

Names match whole: `a1`, `a10` and `a1_2` never take each other's files. A file that is
used by no sample is in `dropped` with the reason.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from runtime.data import holdout
from runtime.data.sample import Scan
from runtime.data.sources import names
from runtime.data.sources.names import CAPTION_SUFFIX, CONTROL, MASK, Ledger, Parts
from runtime.errors import DataError

TARGET_FOLDERS = ("training_images", "images", "target_images", "target", "targets")
CONTROL_FOLDERS = ("control_images", "control", "condition_images", "controls")


def scan(root: Path) -> Scan:
    """The samples under `root`, ordered by id. Raises DataError where the layout isn't recognised."""
    if not root.is_dir():
        raise DataError(f"the dataset {root} is not a folder", remedy="finetune init --dataset FOLDER")
    root = root.resolve()
    ledger = Ledger(root=root, bounds=(root,))
    targets, controls = _folders(ledger)
    pictures, captions = ledger.files(names.listed(targets), CAPTION_SUFFIX)
    _read_targets(ledger, pictures)
    _read_captions(ledger, captions)
    if controls is not None:
        pictures, captions = ledger.files(names.listed(controls), CAPTION_SUFFIX)
        _read_controls(ledger, pictures)
        _read_captions(ledger, captions)
    return ledger.finish(
        no_control="no control: expected {0}.<ext> in control_images/ or {0}_control_1.<ext>",
        no_caption="no caption: expected {0}.txt",
    )


def recognised(root: Path) -> bool:
    """True where `root` has a folder of targets."""
    return any(entry.name.lower() in TARGET_FOLDERS and entry.is_dir() for entry in names.listed(root))


def _folders(ledger: Ledger) -> tuple[Path, Path | None]:
    entries = names.listed(ledger.root)
    targets = _pick(ledger, entries, TARGET_FOLDERS, "target")
    controls = _pick(ledger, entries, CONTROL_FOLDERS, "control")
    if targets is None:
        raise _unrecognised(ledger.root, entries)
    for entry in entries:
        known = entry.suffix.lower() in (*names.IMAGE_SUFFIXES, *names.PHONE_SUFFIXES, CAPTION_SUFFIX)
        if entry.is_file() and known and entry.name != holdout.FILE:
            ledger.drop(entry, "lies beside the target and control folders, expected in one of them")
    return targets, controls


def _pick(ledger: Ledger, entries: list[Path], accepted: tuple[str, ...], role: str) -> Path | None:
    chosen: Path | None = None
    ranked = [
        entry for name in accepted for entry in entries if entry.name.lower() == name and entry.is_dir()
    ]
    for entry in ranked:
        if not ledger.inside(entry):
            ledger.drop(entry, names.OUTSIDE)
        elif chosen is None:
            chosen = entry
        else:
            ledger.drop(entry, f"a second folder of {role}s, {chosen.name} is used")
    return chosen


def _unrecognised(root: Path, entries: list[Path]) -> DataError:
    seen = ", ".join(entry.name for entry in entries if entry.is_dir()) or "none"
    message = (
        f"{root}: no folder of targets; saw the folders: {seen}; expected one of {', '.join(TARGET_FOLDERS)}"
    )
    remedy = "put targets in training_images/, controls in control_images/, then finetune dataset"
    if any(names.is_picture(entry) and entry.is_file() for entry in entries):
        quoted = json.dumps(root.name, ensure_ascii=False)
        remedy += (
            "; or, for pictures with captions beside them, write dataset.toml beside this folder, then "
            f"finetune init --dataset dataset.toml\n[[datasets]]\nimage_directory = {quoted}"
        )
    return DataError(message, remedy=remedy)


def _read_targets(ledger: Ledger, pictures: Iterable[Path]) -> None:
    # Shortest first: a target is known before what is derived from its name.
    for path in sorted(pictures, key=lambda item: (len(names.stem(item)), names.stem(item), item.name)):
        stem = names.stem(path)
        if stem in ledger.parts:
            ledger.drop(path, names.TWINS.format(ledger.parts[stem].target.name))
        elif not _attach(ledger, path):
            ledger.parts[stem] = Parts(target=path)


def _read_controls(ledger: Ledger, pictures: Iterable[Path]) -> None:
    for path in pictures:
        stem = names.stem(path)
        if stem in ledger.parts:
            ledger.take_exact(stem, path)
        elif not _attach(ledger, path):
            ledger.drop(path, "no target has this name")


def _attach(ledger: Ledger, path: Path) -> bool:
    """Give a `_control_N` or `_mask` file to its target; False if it is none of a known target."""
    stem = names.stem(path)
    control, mask = CONTROL.fullmatch(stem), MASK.fullmatch(stem)
    if control and control["stem"] in ledger.parts:
        ledger.take_numbered(control["stem"], int(control["number"]), path)
        return True
    if mask and mask["stem"] in ledger.parts:
        ledger.take_mask(mask["stem"], path)
        return True
    return False


def _read_captions(ledger: Ledger, captions: Iterable[Path]) -> None:
    for path in captions:
        ledger.take_caption(names.stem(path), path)
