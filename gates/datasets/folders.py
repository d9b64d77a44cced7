"""The recipe's layout counted afresh: a folder of targets and one of controls, partners by name."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from gates.datasets.counts import Count, Pair, normal, of_no_target, pictures, stem_of

TARGETS = ("training_images", "images", "target_images", "target", "targets")
CONTROLS = ("control_images", "control", "condition_images", "controls")
_PARTNER = re.compile(r"(?P<stem>.+)_(?:control_(?P<number>[0-9]+)|mask)", re.DOTALL)
_EXACT = -1  # the control of just the target's name comes before all numbered ones


def count(root: Path, *, controls_needed: bool) -> Count:
    """STEM in the target folder is a sample; partners are STEM, STEM_control_N, STEM_mask and STEM.txt."""
    targets, controls = _first(root, TARGETS), _first(root, CONTROLS)
    if targets is None:
        return Count(unrecognised="it has no folder of targets: expected training_images/")
    inner, outer = pictures(targets, root), pictures(controls, root)
    stems = {stem_of(path) for path in inner}
    named: dict[str, str] = {}
    strays = []
    for path in inner:
        if not _owner(path, stems) and named.setdefault(stem_of(path), path) != path:
            strays.append(path)
    owned, more = _partners(inner, outer, named, stems)
    captions = _captions(root, (targets, controls))
    return Count(
        pairs=tuple(
            Pair(
                target=path,
                controls=_in_order(owned.get(stem, {})),
                needs_control=controls_needed,
                mask=owned.get(stem, {}).get(None),
                caption=captions.get(stem),
            )
            for stem, path in sorted(named.items())
        ),
        faults=of_no_target(strays + more),
        found=f"targets in {targets.name}, controls in {(controls or targets).name}",
    )


def _first(root: Path, names: Sequence[str]) -> Path | None:
    folders = {entry.name.lower(): entry for entry in root.iterdir() if entry.is_dir()}
    return next((folders[name] for name in names if name in folders), None)


def _owner(path: str, stems: set[str]) -> str:
    """The target whose further control or mask `path` is. Whole names only: a10 is nothing of a1."""
    match = _PARTNER.fullmatch(stem_of(path))
    return match["stem"] if match and match["stem"] in stems else ""


def _partners(
    inner: Iterable[str], outer: Iterable[str], named: dict[str, str], stems: set[str]
) -> tuple[dict[str, dict[int | None, str]], list[str]]:
    """Per target its controls by number and its mask under None; and what no target takes."""
    owned: dict[str, dict[int | None, str]] = {}
    strays = []
    derived = [path for path in inner if _owner(path, stems)]
    for path in (*derived, *outer):
        stem, slot = _owner(path, stems), _slot(path)
        if path not in derived and stem_of(path) in named:
            stem, slot = stem_of(path), _EXACT
        if not stem or owned.setdefault(stem, {}).setdefault(slot, path) != path:
            strays.append(path)
    return owned, strays


def _slot(path: str) -> int | None:
    match = _PARTNER.fullmatch(stem_of(path))
    return int(match["number"]) if match and match["number"] else None


def _captions(root: Path, folders: Iterable[Path | None]) -> dict[str, str]:
    """The caption of each stem; one in the target folder wins over one beside the control."""
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.iterdir()) if folder else ():
            if path.suffix.lower() == ".txt" and path.is_file():
                found.setdefault(normal(path.stem), path.relative_to(root).as_posix())
    return found


def _in_order(owned: Mapping[int | None, str]) -> tuple[str, ...]:
    return tuple(owned[number] for number in sorted(number for number in owned if number is not None))
