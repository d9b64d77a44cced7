"""A folder of pictures with their captions beside them, counted afresh; controls lie in another folder."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from gates.datasets.counts import Count, Pair, normal, of_no_target, pictures, stem_of
from gates.evidence import EvidenceError

_NUMBERED = re.compile(r"(?P<stem>.+)_(?P<number>[0-9]+)", re.DOTALL)
_CONTROL = re.compile(r"(?P<stem>.+)_control_(?P<number>[0-9]+)", re.DOTALL)
_MASK = re.compile(r"(?P<stem>.+)_mask(?P<number>)", re.DOTALL)
_EXACT = -1  # un-suffixed comes first

Partners = dict[str, dict[int | None, str]]
"""Per target its controls by number, and its mask under None."""


def common_root(images: Path, controls: Path | None) -> Path:
    """The deepest folder that holds both."""
    try:
        return Path(os.path.commonpath([images, controls])) if controls else images
    except ValueError:
        raise EvidenceError(images.name, "and its controls are on two drives: put both on one") from None


def count(images: Path, controls: Path | None, extension: str) -> Count:
    """Each picture of `images` is a sample; its controls are of its name, or NAME_N, in `controls`."""
    for folder in (images, controls):
        if folder is not None and not folder.is_dir():
            return Count(unrecognised=f"{folder.name} is not a folder")
    root = common_root(images, controls)
    captions = _captions(images, root, extension)
    named, owned, strays = _targets(pictures(images, root), captions)
    strays += _take(pictures(controls, root), named, owned)
    return Count(
        pairs=tuple(
            Pair(
                target=path,
                controls=_in_order(owned.get(stem, {})),
                needs_control=controls is not None,
                mask=owned.get(stem, {}).get(None),
                caption=captions.get(stem),
            )
            for stem, path in sorted(named.items())
        ),
        faults=of_no_target(strays),
        found=f"targets in {images.name}, {f'controls in {controls.name}' if controls else 'no controls'}",
    )


def _captions(images: Path, root: Path, extension: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in sorted(images.iterdir()):
        if path.name.lower().endswith(extension.lower()) and path.is_file():
            stem = normal(path.name[: -len(extension)])
            found.setdefault(stem, path.relative_to(root).as_posix())
    return found


def _targets(paths: list[str], captions: Mapping[str, str]) -> tuple[dict[str, str], Partners, list[str]]:
    """Targets by stem; the masks among them, which are NAME_mask without a caption; names that are taken."""
    named: dict[str, str] = {}
    owned: Partners = {}
    strays = []
    captioned = {stem for path in paths if (stem := stem_of(path)) in captions}
    for path in paths:
        stem = stem_of(path)
        mask = _MASK.fullmatch(stem)
        if mask and stem not in captions and mask["stem"] in captioned:
            taken = owned.setdefault(mask["stem"], {}).setdefault(None, path)
        else:
            taken = named.setdefault(stem, path)
        if taken != path:
            strays.append(path)
    return named, owned, strays


def _take(paths: list[str], named: Mapping[str, str], owned: Partners) -> list[str]:
    """Give each picture of the control folder to the target of the longest name that fits; returns the rest."""
    strays = []
    for path in paths:
        owner, slot = next(((stem, slot) for stem, slot in _fits(stem_of(path)) if stem in named), ("", None))
        if not owner or owned.setdefault(owner, {}).setdefault(slot, path) != path:
            strays.append(path)
    return strays


def _fits(stem: str) -> Iterator[tuple[str, int | None]]:
    """Whole names only: a10 is nothing of a1, and a1_2 its second control only where no target is a1_2."""
    yield stem, _EXACT
    for form in (_NUMBERED, _CONTROL, _MASK):
        if match := form.fullmatch(stem):
            yield match["stem"], int(match["number"]) if match["number"] else None


def _in_order(owned: Mapping[int | None, str]) -> tuple[str, ...]:
    return tuple(owned[number] for number in sorted(number for number in owned if number is not None))
