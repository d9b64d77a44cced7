"""Which recorded files lie here: so that `gate verify` can tell an absent input from a contradicted check.

A class is what travels together, or stays at home: KINDS. Its files are those that evidence, cache manifest and
saves name with their digests; the base is known by its folder.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gates import quantized, runs
from gates.evidence import SAMPLED_ABOVE, EvidenceError, file_digest, inside
from gates.validation import EVIDENCE as VALIDATION
from gates.workspace import Workspace

KINDS = {
    "base": "weights",
    "nf4": "weights",
    "adapter": "weights",
    "last": "weights",
    "dataset": "dataset",
    "cache": "cache",
    "pictures": "pictures",
}
"""class to the word by which --allow-absent and --without name it"""

# What a check opens beside the records that every verdict names as its inputs. A test removes each class in
# turn and holds this table against what then changes.
RESTS: dict[tuple[str, str | None, str], tuple[str, ...]] = {
    ("02", None, "layout-recognised"): ("dataset",),
    ("02", None, "manifest-matches-files"): ("dataset",),
    ("02", None, "pairs-complete"): ("dataset",),
    ("02", None, "images-decode"): ("dataset",),
    ("02", None, "captions-usable"): ("dataset",),
    ("02", None, "sizes-usable"): ("dataset",),
    ("04", None, "paths-exist"): ("base",),
    ("06", None, "components-present"): ("nf4",),
    ("06", None, "quantization-recorded"): ("nf4",),
    ("06", None, "size-ratio"): ("nf4",),
    ("06", None, "error-bounded"): ("nf4", "base"),
    ("06", None, "source-untouched"): ("base",),
    ("07", "cache", "cache-complete"): ("cache",),
    ("07", "cache", "cache-matches-config"): ("cache",),
    ("07", "cache", "cache-distinct"): ("cache",),
    ("07", "smoke", "checkpoint-written"): ("adapter",),
    ("07", "smoke", "one-last-checkpoint"): ("last",),
    ("07", "full", "smoke-passed-as-configured"): ("adapter", "last"),
    ("07", "full", "checkpoints-on-schedule"): ("adapter",),
    ("07", "full", "adapter-only"): ("adapter", "last"),
    ("07", "full", "adapter-learned"): ("adapter",),
    ("07", "full", "resumable-last"): ("last",),
    ("07", "full", "one-last-checkpoint"): ("last",),
    ("08", None, "all-samples-rendered"): ("pictures", "cache"),
    ("08", None, "images-not-degenerate"): ("pictures",),
    ("08", None, "adapter-changes-output"): ("pictures",),
    ("08", None, "zero-adapter-rejected"): ("pictures",),
    ("08", None, "unedited-kept"): ("pictures",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A file that a record names."""

    path: Path | None
    """None where its folder has no place on this machine"""
    shown: str
    size: int
    sha256: str

    @property
    def absent(self) -> bool:
        return self.path is None or not self.path.is_file()

    @property
    def changed(self) -> bool:
        """It is here, and not what was recorded; of a large one the size is looked at."""
        if self.path is None or not self.path.is_file():
            return False
        if self.path.stat().st_size != self.size:
            return True
        return self.size <= SAMPLED_ABOVE and file_digest(self.path) != self.sha256


@dataclass(frozen=True, slots=True)
class Survey:
    workspace: Workspace
    runs: tuple[Path, ...]
    """whose checkpoints count, ancestors among them"""
    _known: dict[str, tuple[list[str], list[str]]] = field(default_factory=dict)

    def absent(self, kind: str) -> list[str]:
        """Names of recorded files that are not here."""
        return self._look(kind)[0]

    def changed(self, kind: str) -> list[str]:
        """Names of recorded files that are here with other bytes; looked at only where some are absent."""
        return self._look(kind)[1]

    def _look(self, kind: str) -> tuple[list[str], list[str]]:
        if kind not in self._known:
            if kind == "base":
                self._known[kind] = (_absent_base(self.workspace), [])
            else:
                files = recorded(self.workspace, kind, self.runs)
                absent = [item.shown for item in files if item.absent]
                changed = [item.shown for item in files if absent and item.changed]
                self._known[kind] = (absent, changed)
        return self._known[kind]


def recorded(workspace: Workspace, kind: str, folders: tuple[Path, ...]) -> list[Recorded]:
    """The files of a class; none where the record that lists them can't be read, which other checks tell."""
    listers: Mapping[str, Callable[[], Iterator[Recorded]]] = {
        "dataset": lambda: _dataset(workspace),
        "cache": lambda: _cache(workspace),
        "nf4": lambda: _nf4(workspace),
        "pictures": lambda: _pictures(workspace),
        "adapter": lambda: _saved(workspace, folders, "checkpoint"),
        "last": lambda: _saved(workspace, folders, "last"),
    }
    try:
        return list(listers[kind]())
    except EvidenceError:
        return []


def lineage(workspace: Workspace, folder: Path) -> Iterator[Path]:
    """A run and those that it continues, newest first."""
    for _ in range(runs.MAX_ANCESTORS):
        yield folder
        try:
            origin = runs.record_of(workspace, folder)["resumed_from"]
        except EvidenceError:
            return
        if origin is None:
            return
        folder = folder.parent / Path(origin["run"]).name


def _absent_base(workspace: Workspace) -> list[str]:
    try:
        name = workspace.settings["model"]["pretrained_model_name_or_path"]
    except EvidenceError:
        return []
    place = _place(workspace, name)
    return [] if place is not None and place.is_dir() else [name]


def _place(workspace: Workspace, reference: str) -> Path | None:
    try:
        return workspace.resolve(reference)
    except EvidenceError:
        return None


def _of(root: Path | None, shown: str, path: str, record: Mapping[str, Any]) -> Recorded:
    name = f"{shown}/{path}" if shown else path
    place = inside(root, path, name) if root is not None else None
    return Recorded(path=place, shown=name, size=record["size"], sha256=record["sha256"])


def _dataset(workspace: Workspace) -> Iterator[Recorded]:
    data = workspace.evidence("02-dataset")
    roots = {source["name"]: source["root"] for source in data["sources"]}
    for sample in data["samples"]:
        root = roots.get(sample["source"])
        if root is not None:
            parts = [sample["target"], *sample["controls"], sample["mask"], sample["caption"]]
            place = _place(workspace, root)
            yield from (_of(place, root, part["path"], part) for part in parts if part is not None)
    for source in data["sources"]:
        place = _place(workspace, source["origin"])
        yield from (_of(place, source["origin"], item["path"], item) for item in source["files"])


def _cache(workspace: Workspace) -> Iterator[Recorded]:
    shown = workspace.settings["cache"]["cache_dir"]
    folder = workspace.resolve(shown)
    manifest = workspace.json(folder / "manifest.json", "cache-manifest")
    for entry in manifest["entries"]:
        place = inside(folder, entry["folder"])
        for name, record in entry["files"].items():
            yield _of(place, f"{shown}/{entry['folder']}", name, record)


def _nf4(workspace: Workspace) -> Iterator[Recorded]:
    for component in workspace.evidence("06-quantize")["components"]:
        shown = f"{quantized.FOLDER}/{component['name']}"
        folder = inside(workspace.root, shown)
        yield from (_of(folder, shown, name, record) for name, record in component["files"].items())


def _pictures(workspace: Workspace) -> Iterator[Recorded]:
    for sample in workspace.evidence(VALIDATION)["samples"]:
        for picture in sample["pictures"].values():
            yield _of(workspace.root, "", picture["path"], picture)


def _saved(workspace: Workspace, folders: tuple[Path, ...], kind: str) -> Iterator[Recorded]:
    """Saves that were not pruned."""
    for folder in folders:
        lines = workspace.lines(folder / "saves.jsonl", "saves")[0]
        for line in runs.kept(lines, kind).values():
            place = inside(folder, line["path"])
            shown = workspace.shown(place)
            yield from (_of(place, shown, name, record) for name, record in line["files"].items())


def state_of(workspace: Workspace, path: str, sha256: str | None) -> str | None:
    """`absent`, `changed`, or None where the file that a verdict rests on is what it was."""
    place = _place(workspace, path)
    if place is None or not place.is_file():
        return "absent"
    return "changed" if sha256 is not None and file_digest(place) != sha256 else None
