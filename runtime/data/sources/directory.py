"""Pictures in one folder with captions beside them, their controls in another: the folders of a dataset file.

    <images>/<stem>.<ext>                      the picture to be produced
    <images>/<stem><caption extension>         its caption; a picture without one is not used
    <controls>/<stem>.<ext>                    its first control
    <controls>/<stem>_<N>.<ext>                further controls, by N; also <stem>_control_<N>.<ext>
    <either>/<stem>_mask.<ext>                 its mask; in <images> only where it has no caption of its own

Names match whole, and a picture's own name goes first: with the pictures `a1` and `a1_2`, a control `a1_2` is
that of `a1_2`, even where `a1_2` has no caption and isn't used. Folders are not searched for more folders.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from runtime.data import holdout
from runtime.data.sample import Scan
from runtime.data.sources import names
from runtime.data.sources.names import CAPTION_SUFFIX, CONTROL, MASK, NUMBERED, Ledger, Parts
from runtime.errors import DataError


def scan(images: Path, controls: Path | None, caption_extension: str | None) -> Scan:
    """The samples, ordered by id; notes are relative to `common_root`.

    `controls` None: samples are target-only. `caption_extension` None: `.txt` (musubi-tuner has no default and
    fails at the first caption). Raises DataError where a folder isn't one.
    """
    root = common_root(images, controls)
    images, controls = images.resolve(), controls.resolve() if controls is not None else None
    extension = caption_extension or CAPTION_SUFFIX
    ledger = Ledger(root=root, bounds=(images,) if controls is None else (images, controls))
    pictures, captions = ledger.files(_entries(images, controls), extension)
    bare = _read_images(ledger, pictures, captions, extension)
    no_control = ""
    if controls is not None:
        pictures, captions = ledger.files(_entries(controls, images), extension)
        _read_controls(ledger, pictures, bare)
        for path in captions:
            ledger.drop(path, f"captions are read beside the pictures only, in {names.shown(images, root)}")
        no_control = f"no control: expected {{0}}.<ext> or {{0}}_0.<ext> in {_literal(controls, root)}"
    return ledger.finish(no_control=no_control, no_caption="")


def common_root(images: Path, controls: Path | None) -> Path:
    """The deepest folder that holds both, resolved: all paths of a source are relative to one."""
    for key, folder in (("image_directory", images), ("control_directory", controls)):
        if folder is not None and not folder.is_dir():
            raise DataError(
                f"{key} {folder} is not a folder",
                remedy=f"mend {key} in the dataset file, then finetune dataset",
            )
    if controls is None:
        return images.resolve()
    if images.resolve() == controls.resolve():
        raise DataError(
            f"image_directory and control_directory are both {images}: each picture would be its own control",
            remedy="give the controls a folder of their own, or leave control_directory out",
        )
    try:
        return Path(os.path.commonpath((images.resolve(), controls.resolve())))
    except ValueError:
        raise DataError(
            f"image_directory {images} and control_directory {controls} are on two drives",
            remedy="put both on one drive",
        ) from None


def _entries(folder: Path, other: Path | None) -> list[Path]:
    """What lies in `folder`, without the way to the other one."""
    return [entry for entry in names.listed(folder) if other is None or not other.is_relative_to(entry)]


def _literal(folder: Path, root: Path) -> str:
    """For a format string: a folder's name may hold braces."""
    return names.shown(folder, root).replace("{", "{{").replace("}", "}}")


def _read_images(
    ledger: Ledger, pictures: Iterable[Path], captions: Iterable[Path], extension: str
) -> dict[str, Path]:
    """Pictures with a caption become targets. Returns those without, by stem, that are nobody's mask."""
    texts: dict[str, list[Path]] = {}
    for path in captions:
        texts.setdefault(names.normal(path.name[: -len(extension)]), []).append(path)
    bare: dict[str, Path] = {}
    for path in pictures:
        stem = names.stem(path)
        if stem in ledger.parts:
            ledger.drop(path, names.TWINS.format(ledger.parts[stem].target.name))
        elif stem in texts:
            ledger.parts[stem] = Parts(target=path)
        elif stem in bare:
            ledger.drop(path, names.TWINS.format(bare[stem].name))
        else:
            bare[stem] = path
    for stem, paths in texts.items():
        for path in paths:
            if path.name == holdout.FILE and stem not in ledger.parts:
                ledger.drop(path, "no caption: names to hold out are read from beside the dataset file")
            else:
                ledger.take_caption(stem, path)
    return {stem: path for stem, path in bare.items() if not _mask_or_drop(ledger, path, extension)}


def _mask_or_drop(ledger: Ledger, path: Path, extension: str) -> bool:
    stem = names.stem(path)
    mask = MASK.fullmatch(stem)
    if mask and mask["stem"] in ledger.parts:
        ledger.take_mask(mask["stem"], path)
        return True
    hint = "; a control belongs in control_directory" if CONTROL.fullmatch(stem) else ""
    ledger.drop(path, f"no caption: expected {stem}{extension} beside it{hint}")
    return False


def _read_controls(ledger: Ledger, pictures: Iterable[Path], bare: dict[str, Path]) -> None:
    """`bare`: pictures without a caption; they keep their controls from being given to another."""
    for path in pictures:
        stem = names.stem(path)
        # The longest name of a picture first: of `a` and `a_control`, `a_control_1` is the second's.
        numbered = [match for form in (NUMBERED, CONTROL) if (match := form.fullmatch(stem))]
        mask = MASK.fullmatch(stem)
        owners = [stem, *(match["stem"] for match in numbered), *([mask["stem"]] if mask else [])]
        owner = next((name for name in owners if name in ledger.parts or name in bare), None)
        if owner is None:
            ledger.drop(path, "no target has this name")
        elif owner in bare:
            ledger.drop(path, f"its target {names.shown(bare[owner], ledger.root)} has no caption")
        elif owner == stem:
            ledger.take_exact(owner, path)
        elif mask and owner == mask["stem"]:
            ledger.take_mask(owner, path)
        else:
            number = next(match["number"] for match in numbered if match["stem"] == owner)
            ledger.take_numbered(owner, int(number), path)
