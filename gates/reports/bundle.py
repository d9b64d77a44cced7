"""`gate report --bundle ZIP`: what `gate verify` needs on another machine, in one deterministic archive.

    workspace/...       files of the workspace, at their places
    external/NAME/...   what lies outside of it under external:NAME, where it was asked for

.gates/local.json never travels; nor do job files, logs and remembered digests.
"""

import re
import shutil
import stat
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from gates import inventory, prompt_file, runs
from gates.evidence import EvidenceError, inside
from gates.workspace import EXTERNAL, Workspace

LIMIT_BYTES = 2 * 2**30  # adapters of one run; more is seldom sent to a colleague
LIMIT_FILES = 100_000
EPOCH = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can say
ROOT, OUTSIDE = "workspace", "external"
WITHOUT = ("weights",)
WITH = ("cache", "dataset")
PACKED = (".safetensors", ".png", ".jpg", ".jpeg", ".webp")  # compressing them again gains nothing
_UNSAFE = re.compile(r'[<>:"|?*\\\x00-\x1f]|(^|/)\.{1,2}(/|$)|^/|//|[ .](/|$)')
_RESERVED = re.compile(r"(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.[^/]*)?(/|$)", re.IGNORECASE)


class BundleError(Exception):
    """A bundle that can't be made, or must not be unpacked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    files: int
    size: int
    """bytes of the archive"""
    absent: tuple[str, ...]
    """what --allow-absent has to name, for the rest to be verified elsewhere"""
    homeless: tuple[str, ...]
    """files that could not go in: outside of the workspace, under no external:NAME"""


def write(
    workspace: Workspace, path: Path, *, without: Sequence[str] = (), also: Sequence[str] = ()
) -> Packed:
    """The archive at `path`, whole or not at all. Raises BundleError."""
    members, homeless = _members(workspace, without, also)
    total = sum(_size(place) for place in members.values())
    if total > LIMIT_BYTES or len(members) > LIMIT_FILES:
        raise BundleError(
            f"the bundle would hold {len(members)} files of {total / 2**30:.1f} GiB; "
            f"{LIMIT_FILES} of {LIMIT_BYTES / 2**30:g} GiB are the most: try --without weights"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with zipfile.ZipFile(temporary, "w") as archive:
            for name, place in sorted(members.items()):
                _add(archive, name, place)
        temporary.replace(path)
    except OSError as error:
        raise BundleError(f"{path.name} can't be written: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    absent = ("weights", *(word for word in WITH if word not in also))  # of weights the base stays, always
    return Packed(files=len(members), size=path.stat().st_size, absent=absent, homeless=tuple(homeless))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:  # a run that is still going prunes its checkpoints
        raise BundleError(f"{path.name} vanished; try again when nothing runs") from error


def _add(archive: zipfile.ZipFile, name: str, place: Path) -> None:
    info = zipfile.ZipInfo(name, EPOCH)
    info.create_system = 3  # else the archive differs by the system that it was made on
    info.external_attr = (stat.S_IFREG | 0o644) << 16
    info.compress_type = zipfile.ZIP_STORED if place.suffix in PACKED else zipfile.ZIP_DEFLATED
    info.file_size = place.stat().st_size  # decides on zip64
    with place.open("rb") as source, archive.open(info, "w") as target:
        shutil.copyfileobj(source, target, 2**20)


# ---- what goes in


def _members(
    workspace: Workspace, without: Sequence[str], also: Sequence[str]
) -> tuple[dict[str, Path], list[str]]:
    """Name in the archive to file; and files that have no name on another machine."""
    members: dict[str, Path] = {}
    homeless: list[str] = []
    for path in _wanted(workspace, without, also):
        if not path.is_file():
            continue
        name = _member(workspace, path)
        if name is None:
            homeless.append(workspace.shown(path))
        else:
            members[name] = path
    return members, sorted(set(homeless))


def _member(workspace: Workspace, path: Path) -> str | None:
    shown = workspace.shown(path)
    if not shown.startswith(EXTERNAL):
        name = f"{ROOT}/{shown}"
    else:
        outside, _, rest = shown.removeprefix(EXTERNAL).partition("/")
        if outside not in workspace.externals or not rest:
            return None
        name = f"{OUTSIDE}/{outside}/{rest}"
    return name if safe(name) else None


def _wanted(workspace: Workspace, without: Sequence[str], also: Sequence[str]) -> Iterator[Path]:
    """Nothing of models/nf4: a folder without its weights would have another fingerprint."""
    gates = workspace.root / ".gates"
    yield from (workspace.root / "config.yaml", gates / "target.json")
    for kind in ("evidence", "verdicts", "skips"):
        yield from (gates / kind).glob("*.json")
    folders = judged_runs(workspace)
    for folder in folders:
        yield from _of_run(folder, weights="weights" not in without)
    yield from _recorded(workspace, "pictures", folders)
    yield from _prompts(workspace)
    yield from _cache(workspace, tensors="cache" in also)
    if "dataset" in also:
        yield from _recorded(workspace, "dataset", folders)
        yield from _beside_dataset(workspace)


def judged_runs(workspace: Workspace) -> tuple[Path, ...]:
    """The newest run of each kind, which the verdicts are on, and those that it continues."""
    found: list[Path] = []
    for kind in ("full", "smoke"):
        try:
            newest = runs.find(workspace, kind)
        except (EvidenceError, OSError):
            continue
        found += [newest] if newest is not None else []
    return tuple(dict.fromkeys(run for one in found for run in inventory.lineage(workspace, one)))


def _of_run(folder: Path, *, weights: bool) -> Iterator[Path]:
    for pattern in ("run.json", "*.jsonl", "config.yaml", "validation/grid.png"):
        yield from folder.glob(pattern)
    for checkpoint in folder.glob("checkpoint-*"):
        yield checkpoint / "trainer_state.json"
        if weights:
            yield from (checkpoint / name for name in (runs.ADAPTER, runs.STATE))


def _recorded(workspace: Workspace, kind: str, folders: tuple[Path, ...]) -> Iterator[Path]:
    for item in inventory.recorded(workspace, kind, folders):
        if item.path is not None:
            yield item.path


def _cache(workspace: Workspace, *, tensors: bool) -> Iterator[Path]:
    try:
        folder = workspace.resolve(workspace.settings["cache"]["cache_dir"])
    except EvidenceError:
        return
    yield folder / "manifest.json"
    yield from folder.glob("*/entry.json")
    if tensors:
        yield from _recorded(workspace, "cache", ())


def _prompts(workspace: Workspace) -> Iterator[Path]:
    """What validation paints beside the holdout."""
    try:
        validation = workspace.settings["validation"]
        asked = [image for sample in validation["samples"] for image in sample["images"]]
        yield from (workspace.resolve(image) for image in asked)
        if validation["prompt_file"] is not None:
            yield workspace.resolve(validation["prompt_file"])
            for item in prompt_file.read(workspace, validation["prompt_file"]):
                yield from item["paths"]
    except EvidenceError:
        return  # gate 04 tells


def _beside_dataset(workspace: Workspace) -> Iterator[Path]:
    """Files of no sample by which gate 02 knows the layout."""
    try:
        data = workspace.evidence("02-dataset")
        place = workspace.resolve(data["root"])
    except EvidenceError:
        return
    folder = place if place.is_dir() else place.parent
    yield from (place, folder / "holdout.txt", folder / "import.json")
    if data["dataset_file"]:
        yield place.parent / data["dataset_file"]["path"]


# ---- and out again


def safe(name: str) -> bool:
    """A relative name that Windows takes as well, and that stays in its folder."""
    return bool(name) and not _UNSAFE.search(name) and not _RESERVED.search(name)


def unpack(path: Path, folder: Path) -> Path:
    """The workspace of a bundle, unpacked below `folder`. Raises BundleError, having written nothing unsafe."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            _refuse(path.name, members)
            for info in members:
                _extract(archive, info, inside(folder, info.filename))
    # zipfile's word for a compression that it lacks is NotImplementedError, for a password RuntimeError.
    except (OSError, zipfile.BadZipFile, EvidenceError, NotImplementedError, RuntimeError) as error:
        raise BundleError(f"{path.name} can't be unpacked: {error}") from error
    if not (folder / ROOT).is_dir():
        raise BundleError(f"{path.name} is no bundle: it has no {ROOT}/; make one with gate report --bundle")
    return folder / ROOT


def _refuse(shown: str, members: Sequence[zipfile.ZipInfo]) -> None:
    total = sum(info.file_size for info in members)
    if total > LIMIT_BYTES or len(members) > LIMIT_FILES:
        raise BundleError(f"{shown} holds {len(members)} files of {total} bytes, more than is unpacked")
    seen: set[str] = set()
    for info in members:
        kind = stat.S_IFMT(info.external_attr >> 16)
        if info.is_dir() or kind not in (0, stat.S_IFREG) or info.flag_bits & 1:
            raise BundleError(f"{shown}: {info.filename!r} is no plain file")
        if not safe(info.filename) or info.filename.partition("/")[0] not in (ROOT, OUTSIDE):
            raise BundleError(f"{shown}: {info.filename!r} is no name that a bundle has")
        if info.filename.casefold() in seen:
            raise BundleError(f"{shown}: {info.filename!r} is in it twice")
        seen.add(info.filename.casefold())


def _extract(archive: zipfile.ZipFile, info: zipfile.ZipInfo, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    left = info.file_size
    with archive.open(info) as source, target.open("xb") as handle:
        while piece := source.read(2**20):
            left -= len(piece)
            if left < 0:
                raise BundleError(f"{info.filename!r} is larger than its archive says")
            handle.write(piece)


def opened(root: Path) -> Workspace:
    """A workspace; of one that was unpacked from a bundle, external:NAME is what lies beside it."""
    place = root if (root / ".gates").is_dir() or not (root / ROOT).is_dir() else root / ROOT
    workspace = Workspace.open(place)
    outside = workspace.root.parent / OUTSIDE
    if workspace.root.name == ROOT and not (workspace.root / ".gates" / "local.json").is_file():
        found = outside.iterdir() if outside.is_dir() else ()
        workspace.__dict__["externals"] = {path.name: str(path) for path in found}
    return workspace
