"""What gate 07 judges: the cache, the newest smoke run and the newest full run, read once."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates import caches, quantized, runs
from gates.caches import Cache
from gates.checkpoint_files import files_of
from gates.checks import Evidence
from gates.evidence import (
    MissingEvidenceError,
    Reading,
    attempt,
    files_fingerprint,
    weights_fingerprint,
)
from gates.runs import Run
from gates.verdict import EvidenceRef
from gates.workspace import Workspace

FIT = {"smoke": "finetune fit --smoke", "full": "finetune fit"}
RESUME = "finetune fit --resume latest"


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheEvidence:
    cache: Reading[Cache]
    dataset: Reading[dict[str, Any]]
    settings: Reading[dict[str, Any]]
    """config.yaml with defaults"""
    prompts: Reading[list[dict[str, Any]]]
    """what validation.samples and validation.prompt_file ask for"""
    roundtrip: Reading[dict[str, Any]]
    encoders: dict[str, str]
    """component to its fingerprint now; those that are not on this machine are left out"""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    phase: str
    run: Reading[Run]
    config: Reading[dict[str, Any]]
    """config.yaml as parsed"""
    dataset: Reading[dict[str, Any]]
    cache_digest: Reading[str]
    weights: dict[str, str]
    """component to its fingerprint now; empty where the model is not on this machine"""
    plan: Reading[dict[str, Any]]
    target: dict[str, Any]
    require_device: str | None
    smoke: "RunEvidence | None" = None

    @property
    def record(self) -> dict[str, Any]:
        return self.run.get().record

    def line(self, name: str) -> EvidenceRef:
        return EvidenceRef(path=f"{self.run.get().path}/{name}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Training(Evidence):
    cache: CacheEvidence
    smoke: RunEvidence
    full: RunEvidence


def collect(workspace: Workspace) -> Training:
    dataset = attempt(lambda: workspace.evidence("02-dataset"))
    read = attempt(lambda: caches.read(workspace))
    cache = CacheEvidence(
        cache=read,
        dataset=dataset,
        settings=attempt(lambda: workspace.settings),
        prompts=attempt(lambda: caches.prompts(workspace)),
        roundtrip=attempt(lambda: workspace.evidence("07-cache-roundtrip")),
        encoders=_encoders(workspace, read.value),
    )
    found = {kind: attempt(lambda kind=kind: _read_run(workspace, kind)) for kind in FIT}  # type: ignore[misc]
    records = {kind: run.value.record for kind, run in found.items() if run.value}
    context: dict[str, Any] = {
        "config": attempt(lambda: workspace.config),
        "dataset": dataset,
        "cache_digest": attempt(lambda: caches.trained_digest(workspace)),
        "weights": _weights(workspace, records),
        "plan": attempt(lambda: workspace.evidence("04-plan")),
        "target": workspace.target,
        "require_device": workspace.require_device,
    }
    smoke = RunEvidence(phase="smoke", run=found["smoke"], **context)
    full = RunEvidence(phase="full", run=found["full"], smoke=smoke, **context)
    last = records.get("full") or records.get("smoke")
    return Training(
        cache=cache,
        smoke=smoke,
        full=full,
        inputs=tuple(sorted(workspace.inputs.values(), key=lambda item: item.path)),
        device=last["device"]["type"] if last else None,
        run={kind: run.value.path for kind, run in found.items() if run.value},
        waiting={
            kind: _still_running(kind, run.value)
            for kind, run in found.items()
            if run.value and run.value.record["state"] == "running"
        },
    )


def _read_run(workspace: Workspace, kind: str) -> Run:
    folder = runs.find(workspace, kind)
    if folder is None:
        raise MissingEvidenceError(
            workspace.shown(workspace.runs_folder()), f"holds no {kind} run", remedy=FIT[kind]
        )
    return runs.read(workspace, folder)


def _weights(workspace: Workspace, records: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Fingerprints of the components that the runs name, as they lie in the model and models/nf4 now."""
    model = _model(workspace)
    if model is None:
        return {}
    components = {part for record in records.values() for part in record["model"]["fingerprints"]}
    places = {"": model, "nf4": workspace.root / quantized.FOLDER}
    folders = {}
    for part in components:
        place, _, component = part.rpartition("/")
        if place in places and "\\" not in component:
            folders[part] = places[place] / component
    found = _fingerprints(folders)
    own = attempt(lambda: _own_weight(workspace)) if "transformer_weight" in components else None
    return found | ({"transformer_weight": own.value} if own and own.value else {})


def _encoders(workspace: Workspace, cache: Cache | None) -> dict[str, str]:
    """Fingerprints of the components that the cache was made with, NF4 where it says so."""
    model, folders = _model(workspace), {}
    for name, made in caches.encoders(cache).items() if cache else ():
        place = workspace.root / quantized.FOLDER if made.get("dtype") == "nf4" else model
        if place is not None and name.isidentifier():
            folders[name] = place / name
    return _fingerprints(folders)


def _model(workspace: Workspace) -> Path | None:
    """The base's folder, where it is on this machine."""
    name = attempt(lambda: workspace.settings["model"]["pretrained_model_name_or_path"])
    model = attempt(lambda: workspace.resolve(name.get())).value
    return model if model is not None and model.is_dir() else None


def _fingerprints(folders: dict[str, Path]) -> dict[str, str]:
    return {part: weights_fingerprint(path) for part, path in sorted(folders.items()) if path.is_dir()}


def _own_weight(workspace: Workspace) -> str | None:
    """Of model.transformer_weight, the checkpoint that is trained on instead of the base's own denoiser."""
    named = workspace.settings["model"]["transformer_weight"]
    return files_fingerprint(files_of(workspace.resolve(named), named)) if named else None


def _still_running(kind: str, run: Run) -> str:
    record = run.record
    gone = RESUME if kind == "full" and run.resumable else FIT[kind]
    return (
        f"the {kind} run {run.path} is still running: "
        f"step {record['done_steps']} of {record['planned_steps']}, last heartbeat {record['heartbeat_at']}; "
        f"wait with `finetune monitor --wait`, or, if its process is gone, `{gone}`"
    )
