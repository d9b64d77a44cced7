"""What gate 08 judges: the validation record, its pictures, and the run whose adapter it used."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gates import caches, pictures, runs
from gates.caches import Entry
from gates.checks import Evidence
from gates.evidence import MissingEvidenceError, Reading, attempt, inside
from gates.runs import Run
from gates.workspace import Workspace

EVIDENCE = "08-validation"
WHERE = f".gates/evidence/{EVIDENCE}.json"
REMEDY = "finetune validate"
VARIANTS = ("base", "adapter", "zero")
AGREEMENT = 8.0  # of 255: what the VAE alone changes between two pictures of the same thing


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Distances between the pictures of one sample, 0..255."""

    adapter_to_base: float
    zero_to_base: float
    spreads: dict[str, float]
    sizes: dict[str, tuple[int, int]]
    unedited_error: float | None
    """of the adapter's picture where control and target agree; None where there is no such pair"""


@dataclass(frozen=True, kw_only=True)
class Validation(Evidence):
    data: Reading[dict[str, Any]]
    run: dict[str, str]
    judged: Reading[Run]
    """the newest full run"""
    dataset: Reading[dict[str, Any]]
    cached: Reading[list[Entry]]
    """entries of the cache that were not trained on"""
    cache_digest: Reading[str]
    settings: Reading[dict[str, Any]]
    root: Path

    @property
    def samples(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.data.get()["samples"]
        return found

    @property
    def heldout(self) -> list[dict[str, Any]]:
        return [sample for sample in self.samples if sample["split"] == "holdout"]

    @cached_property
    def facts(self) -> dict[str, Facts]:
        """By sample id; every picture is decoded once."""
        return {sample["id"]: _facts(self.root, sample) for sample in self.samples}


def collect(workspace: Workspace) -> Validation:
    judged = attempt(lambda: _newest_full(workspace))
    return Validation(
        data=attempt(lambda: workspace.evidence(EVIDENCE)),
        judged=judged,
        dataset=attempt(lambda: workspace.evidence("02-dataset")),
        cached=attempt(lambda: _not_trained_on(workspace)),
        cache_digest=attempt(lambda: caches.digest_now(workspace)),
        settings=attempt(lambda: workspace.settings),
        root=workspace.root,
        inputs=tuple(sorted(workspace.inputs.values(), key=lambda item: item.path)),
        device=judged.value.record["device"]["type"] if judged.value else None,
        run={"full": judged.value.path} if judged.value else {},
    )


def _newest_full(workspace: Workspace) -> Run:
    folder = runs.find(workspace, "full")
    if folder is None:
        where = workspace.shown(workspace.runs_folder())
        raise MissingEvidenceError(where, "holds no full run", remedy="finetune fit")
    return runs.read(workspace, folder)


def _not_trained_on(workspace: Workspace) -> list[Entry]:
    cache = caches.read(workspace)
    return cache.of("holdout", "prompt")


def saved_digest(run: Run, folder: str, checkpoint: str) -> str | None:
    """What the run recorded of the adapter in `checkpoint`; None where it saved no such folder."""
    for line in run.saves.get():
        if (line["event"], line["run"], line["path"]) == ("save", folder, checkpoint):
            digest: str | None = line["files"].get(runs.ADAPTER, {}).get("sha256")
            return digest
    return None


def _facts(root: Path, sample: dict[str, Any]) -> Facts:
    shown = {kind: picture["path"] for kind, picture in sample["pictures"].items()}
    read = {kind: pictures.pixels(inside(root, path, path), path) for kind, path in shown.items()}
    error = None
    if len({read[kind].shape for kind in ("control", "target", "adapter") if kind in read}) == 1 and (
        {"control", "target"} <= read.keys()
    ):
        agree = abs(read["control"] - read["target"]).max(axis=2) <= AGREEMENT
        if agree.any():
            error = float(abs(read["adapter"] - read["target"])[agree].mean())
    return Facts(
        adapter_to_base=pictures.distance(read["adapter"], read["base"]),
        zero_to_base=pictures.distance(read["zero"], read["base"]),
        spreads={kind: pictures.spread(picture) for kind, picture in read.items()},
        sizes={kind: (picture.shape[0], picture.shape[1]) for kind, picture in read.items()},
        unedited_error=error,
    )
