"""A dataset folder counted afresh, by rules of the judge's own, to hold the manifest against."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.evidence import EvidenceError, MissingEvidenceError, differences, inside
from gates.pictures import picture_size

HOLDOUT_FILE = "holdout.txt"
TARGET_FOLDERS = ("training_images", "images", "target_images", "target", "targets")
CONTROL_FOLDERS = ("control_images", "control", "condition_images", "controls")
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff"})
DECODED_AT_MOST = 64  # images; a photograph takes 0.1 s, and a gate should answer in seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """What the folders hold for one target. Paths are relative to the dataset."""

    target: str
    controls: tuple[str, ...]
    captions: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What a fresh look at the folders finds; a folder that isn't there is None."""

    targets: str | None
    controls: str | None
    pairs: tuple[Pair, ...]
    strays: tuple[str, ...]
    """control images that no target claims, and targets whose name is taken"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The files behind a manifest, as they are now."""

    count: Count
    changed: tuple[str, ...]
    """a line for each listed file that is absent or has other bytes"""
    pictures: dict[str, Picture]
    undecodable: dict[str, str]
    """path to why"""
    captions: dict[str, str]
    """text by path"""
    unreadable: dict[str, str]
    """caption path to why"""
    wished_holdout: frozenset[str] | None
    """the lines of holdout.txt; None where there is no such file"""


def count(root: Path) -> Count:
    """STEM in the target folder is a sample; its partners are STEM or STEM_control_N, and STEM.txt."""
    if not root.is_dir():
        raise MissingEvidenceError(
            f"dataset {root.name}", "the folder is missing", remedy="finetune init --dataset FOLDER"
        )
    targets, controls = _first(root, TARGET_FOLDERS), _first(root, CONTROL_FOLDERS)
    pictures, others = _images(root, targets), _images(root, controls)
    stems = {_stem(path) for path in pictures}
    samples = [path for path in pictures if not _owner(path, stems)]
    named: dict[str, str] = {}
    for path in samples:
        named.setdefault(_stem(path), path)
    exact = {path: _stem(path) for path in others if _stem(path) in named}
    derived = {path: owner for path in pictures + others if (owner := _owner(path, stems))}
    partners = {**exact, **{path: o for path, o in derived.items() if not _stem(path).endswith("_mask")}}
    return Count(
        targets=targets,
        controls=controls,
        pairs=tuple(
            Pair(
                target=path,
                controls=tuple(sorted(control for control, owner in partners.items() if owner == stem)),
                captions=_captions(root, stem, (targets, controls)),
            )
            for stem, path in sorted(named.items())
        ),
        strays=tuple(
            [path for path in samples if path not in named.values()]
            + [path for path in others if path not in exact and path not in derived]
        ),
    )


def _first(root: Path, names: Sequence[str]) -> str | None:
    folders = {entry.name.lower(): entry.name for entry in root.iterdir() if entry.is_dir()}
    return next((folders[name] for name in names if name in folders), None)


def _images(root: Path, folder: str | None) -> list[str]:
    if folder is None:
        return []
    files = [path for path in (root / folder).iterdir() if path.suffix.lower() in IMAGE_SUFFIXES]
    return sorted(path.relative_to(root).as_posix() for path in files if path.is_file())


def _stem(path: str) -> str:
    return unicodedata.normalize("NFC", Path(path).stem)


def _owner(path: str, stems: set[str]) -> str:
    """The target whose further control or mask `path` is. Whole names only: a10 is nothing of a1."""
    base = re.sub(r"(_control_[0-9]+|_mask)$", "", _stem(path))
    return base if base != _stem(path) and base in stems else ""


def _captions(root: Path, stem: str, folders: Iterable[str | None]) -> tuple[str, ...]:
    """The caption of a stem; one in the target folder wins over one beside the control."""
    found = (
        path.relative_to(root).as_posix()
        for folder in folders
        if folder
        for path in (root / folder).glob("*.txt")
        if _stem(path.name) == stem
    )
    return tuple(found)[:1]


def look(root: Path, data: dict[str, Any]) -> Seen:
    """Read what the checks of gate 02 need, of the manifest `data` and of what it leaves out."""
    counted = count(root)
    listed = {path: record for sample in data["samples"] for path, record in listed_files(sample)}
    dropped = dropped_pairs(counted, data)
    chosen = _chosen([path for sample in data["samples"] for path in image_paths(sample)])
    chosen += [path for pair in dropped for path in (pair.target, *pair.controls)]
    pictures, undecodable = _decode(root, chosen)
    captions, unreadable = _read_captions(root, [path for pair in counted.pairs for path in pair.captions])
    return Seen(
        count=counted,
        changed=tuple(differences(root, listed)),
        pictures=pictures,
        undecodable=undecodable,
        captions=captions,
        unreadable=unreadable,
        wished_holdout=_wished_holdout(root),
    )


def _wished_holdout(root: Path) -> frozenset[str] | None:
    path = root / HOLDOUT_FILE
    if not path.is_file():
        return None
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    return frozenset(unicodedata.normalize("NFC", line.strip()) for line in lines if line.strip())


def holdout_faults(wished: frozenset[str] | None, data: dict[str, Any]) -> list[str]:
    """Samples that holdout.txt names now and the manifest trains on, or the other way round."""
    if wished is None:
        removed = str(data["holdout_rule"]).startswith(HOLDOUT_FILE)
        return [f"{HOLDOUT_FILE}, by which the manifest set samples aside, is gone"] if removed else []
    split = {unicodedata.normalize("NFC", sample["id"]): sample["split"] for sample in data["samples"]}
    return [
        f"{name} is {HOLDOUT_FILE}'s, and not held out in the manifest"
        if name in wished
        else f"{name} is held out in the manifest, and not in {HOLDOUT_FILE}"
        for name, kind in split.items()
        if (name in wished) != (kind == "holdout")
    ]


def image_paths(sample: dict[str, Any]) -> list[str]:
    masks = [sample["mask"]] if sample["mask"] else []
    return [image["path"] for image in (sample["target"], *sample["controls"], *masks)]


def listed_files(sample: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    records = [sample["target"], *sample["controls"], sample["mask"], sample["caption"]]
    return [(record["path"], record) for record in records if record]


def dropped_pairs(counted: Count, data: dict[str, Any]) -> list[Pair]:
    """Pairs that lie in the folder and are no sample of the manifest."""
    sampled = {sample["target"]["path"] for sample in data["samples"]}
    return [pair for pair in counted.pairs if pair.target not in sampled]


def _chosen(paths: list[str]) -> list[str]:
    """All, or 64 that look arbitrary and are the same at every judging."""
    unique = sorted(set(paths), key=lambda path: hashlib.sha256(path.encode()).digest())
    return unique[:DECODED_AT_MOST]


def _decode(root: Path, paths: list[str]) -> tuple[dict[str, Picture], dict[str, str]]:
    pictures, broken = {}, {}
    for path in paths:
        try:
            width, height = picture_size(inside(root, path), path)
            pictures[path] = Picture(width=width, height=height)
        except EvidenceError as error:
            broken[path] = error.message
    return pictures, broken


def _read_captions(root: Path, paths: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    texts, broken = {}, {}
    for path in paths:
        try:
            texts[path] = (root / path).read_bytes().decode("utf-8-sig")
        except UnicodeDecodeError as error:
            broken[path] = f"is not UTF-8 (byte {error.start}): save it as UTF-8"
        except OSError as error:
            broken[path] = f"can't be read ({error.strerror})"
    return texts, broken
