"""A run as the trainer left it: its record, the joined lines of its lineage, and its checkpoints."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.evidence import (
    EvidenceError,
    MissingEvidenceError,
    Reading,
    attempt,
    differences,
    inside,
    read_json,
)
from gates.tensors import TensorEntry, TensorFacts, read_header, tensor_facts
from gates.workspace import Workspace

ADAPTER = "pytorch_lora_weights.safetensors"
STATE = "model.safetensors"
RESUMABLE = (ADAPTER, STATE, "optimizer.bin", "scheduler.bin", "random_states_0.pkl", "trainer_state.json")
LAST = re.compile(r"checkpoint-last-\d+-\d+-last")
ADAPTER_KEY = re.compile(r"\.lora_(A|B|magnitude_vector|embedding_[AB])(\.|$)")
MAX_ANCESTORS = 100  # a run resumed more often than that is a loop in the records


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """One save that was not pruned."""

    step: int
    path: str
    faults: tuple[str, ...]
    """a line for each recorded file that is absent or has other bytes"""
    unlisted: tuple[str, ...]
    """files in the folder that the save did not record"""
    tensors: Reading[dict[str, TensorEntry]]
    """of the adapter, from its header"""
    facts: Reading[dict[str, TensorFacts]] | None = None
    """of the adapter's values; of the first and the last checkpoint only"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Last:
    """The resumable checkpoint of the highest step."""

    path: str
    step: int
    missing: tuple[str, ...]
    faults: tuple[str, ...]
    unlisted: tuple[str, ...]
    trainer_state: Reading[dict[str, Any]]
    adapter: Reading[dict[str, TensorEntry]]
    state: Reading[dict[str, TensorEntry]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    path: str
    record: dict[str, Any]
    """run.json"""
    metrics: Reading[list[dict[str, Any]]]
    probes: Reading[list[dict[str, Any]]]
    saves: Reading[list[dict[str, Any]]]
    torn: tuple[str, ...]
    """notes on last lines that a kill tore"""
    planned_checkpoints: Reading[frozenset[int]]
    """of the lineage: each ancestor's up to where its successor took over, then the run's own"""
    checkpoints: Reading[list[Checkpoint]]
    last: Reading[Last]
    last_folders: tuple[str, ...]
    """names of the checkpoint-last-*-last in the run"""
    resumable: bool
    """a whole -last- is where `--resume latest` looks: in the run, else in the one that it continues"""
    best: str | None
    """path of the checkpoint with the lowest held-out probe of the lineage, as `finetune validate` picks it"""


@dataclass(frozen=True, slots=True)
class _Link:
    """A run of the lineage, and up to which step its lines count (None: all)."""

    folder: Path
    until: int | None


def find(workspace: Workspace, kind: str) -> Path | None:
    """The chosen run if it is of `kind`, else the newest launched of it, even a failed one."""
    chosen = workspace.chosen_run
    if chosen is not None and record_of(workspace, chosen)["kind"] == kind:
        return chosen
    return next(
        (path for path in workspace.run_folders() if record_of(workspace, path)["kind"] == kind), None
    )


def record_of(workspace: Workspace, folder: Path) -> dict[str, Any]:
    return workspace.json(folder / "run.json", "run")


def read(workspace: Workspace, folder: Path) -> Run:
    record = record_of(workspace, folder)
    links = attempt(lambda: _lineage(workspace, folder, record))
    torn: list[str] = []
    metrics = attempt(lambda: _joined(workspace, links.get(), "metrics", torn))
    probes = attempt(lambda: _joined(workspace, links.get(), "probe", torn))
    saves = attempt(lambda: _joined(workspace, links.get(), "saves", torn))
    return Run(
        path=workspace.shown(folder),
        record=record,
        metrics=metrics,
        probes=probes,
        saves=saves,
        torn=tuple(torn),
        planned_checkpoints=attempt(lambda: _planned(workspace, links.get())),
        checkpoints=attempt(lambda: _checkpoints(workspace, saves.get())),
        last=attempt(lambda: _last(workspace, folder, saves.get())),
        last_folders=tuple(last_names(folder)),
        resumable=_resumable(links.value or [_Link(folder, None)]),
        best=attempt(lambda: _best(workspace, links.get())).value,
    )


def _resumable(links: Sequence[_Link]) -> bool:
    for link in reversed(links):
        if names := last_names(link.folder):
            newest = link.folder / max(names, key=_step_of)
            return all((newest / name).is_file() for name in RESUMABLE)
    return False


def _best(workspace: Workspace, links: Sequence[_Link]) -> str | None:
    found = []
    for link in links:
        best = record_of(workspace, link.folder)["best"]
        if best is None or (link.until is not None and best["step"] > link.until):
            continue  # of steps that a successor did again
        if (path := inside(link.folder, best["checkpoint"]) / ADAPTER).is_file():
            found.append((best["holdout_loss"], workspace.shown(path.parent)))
    return min(found)[1] if found else None


def _lineage(workspace: Workspace, folder: Path, record: dict[str, Any]) -> list[_Link]:
    """Oldest first. A run names its ancestor's folder, a sibling of its own, and its run_id."""
    links = [_Link(folder, None)]
    while (origin := record["resumed_from"]) is not None:
        if len(links) > MAX_ANCESTORS:
            raise EvidenceError(workspace.shown(folder), "its lineage does not end")
        ancestor = folder.parent / Path(origin["run"]).name
        record = record_of(workspace, ancestor)
        if record["run_id"] != origin["run_id"]:
            raise EvidenceError(workspace.shown(ancestor), "is another run than the one that was resumed")
        until = links[0].until
        links.insert(0, _Link(ancestor, origin["step"] if until is None else min(origin["step"], until)))
        folder = ancestor
    return links


def _planned(workspace: Workspace, links: Sequence[_Link]) -> frozenset[int]:
    """A run may go on with another interval, or be made longer than it was planned."""
    planned: set[int] = set()
    since = 0
    for link in links:
        own = record_of(workspace, link.folder)["planned_checkpoints"]
        planned |= {step for step in own if step > since and (link.until is None or step <= link.until)}
        since = link.until or since
    return frozenset(planned)


def _joined(workspace: Workspace, links: Sequence[_Link], name: str, torn: list[str]) -> list[dict[str, Any]]:
    """Of each ancestor the lines up to where its successor took over, then the run's own."""
    joined = []
    for link in links:
        path = link.folder / f"{name}.jsonl"
        if not path.is_file() and link.until is None and name != "metrics" and len(links) > 1:
            continue  # a resumed run that was stopped before it had anything to say
        # NaN is what gate 07 must see and name, so here it is read.
        lines, note = workspace.lines(path, name, allow_nan=name == "metrics")
        torn += [note] if note else []
        for line in lines:
            if link.until is None or line["step"] <= link.until:
                joined.append({**line, "run": workspace.shown(link.folder)} if name == "saves" else line)
    return joined


def kept(saves: Sequence[dict[str, Any]], kind: str) -> dict[int, dict[str, Any]]:
    """Saves by step whose last event is no prune."""
    found: dict[int, dict[str, Any]] = {}
    for line in saves:
        if line["kind"] == kind and line["event"] == "save":
            found[line["step"]] = line
        elif line["kind"] == kind:
            found.pop(line["step"], None)
    return found


def _checkpoints(workspace: Workspace, saves: Sequence[dict[str, Any]]) -> list[Checkpoint]:
    lines = sorted(kept(saves, "checkpoint").items())
    ends = {lines[0][0], lines[-1][0]} if lines else set()
    return [_checkpoint(workspace, line, with_facts=step in ends) for step, line in lines]


def _checkpoint(workspace: Workspace, line: dict[str, Any], *, with_facts: bool) -> Checkpoint:
    folder, shown = _place(workspace, line)
    path, name = folder / ADAPTER, f"{shown}/{ADAPTER}"
    return Checkpoint(
        step=line["step"],
        path=shown,
        faults=tuple(differences(folder, line["files"], shown)),
        unlisted=_unlisted(folder, line["files"], shown),
        tensors=attempt(lambda: read_header(path, name)),
        facts=attempt(lambda: tensor_facts(path, name)) if with_facts else None,
    )


def _unlisted(folder: Path, recorded: Mapping[str, Any], shown: str) -> tuple[str, ...]:
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return tuple(f"{shown}/{name}" for name in files if name not in recorded)


def _place(workspace: Workspace, line: dict[str, Any]) -> tuple[Path, str]:
    run = workspace.resolve(line["run"])
    folder = inside(run, line["path"], f"{line['run']}/{line['path']}")
    return folder, workspace.shown(folder)


def _last(workspace: Workspace, folder: Path, saves: Sequence[dict[str, Any]]) -> Last:
    """The -last- of the highest step that lies there, held against its save, or that of its step.

    A copy under another epoch is as good: of several, `finetune clean` may leave any.
    """
    saved = [
        s
        for s in saves
        if s["run"] == workspace.shown(folder) and s["kind"] == "last" and s["event"] == "save"
    ]
    names = last_names(folder)
    if not saved or not names:
        raise MissingEvidenceError(workspace.shown(folder), "holds no resumable checkpoint")
    step = max(_step_of(name) for name in names)
    written = [line for line in saved if line["step"] == step] or saved[-1:]
    line = next((line for line in reversed(written) if line["path"] in names), written[-1])
    name = line["path"] if line["path"] in names else next(n for n in names if _step_of(n) == step)
    place = folder / name
    shown = workspace.shown(place)
    return Last(
        path=shown,
        step=step,
        missing=tuple(name for name in RESUMABLE if not (place / name).is_file()),
        faults=tuple(differences(place, line["files"], shown)),
        unlisted=_unlisted(place, line["files"], shown),
        trainer_state=attempt(lambda: _state(place / "trainer_state.json", f"{shown}/trainer_state.json")),
        adapter=attempt(lambda: read_header(place / ADAPTER, f"{shown}/{ADAPTER}")),
        state=attempt(lambda: read_header(place / STATE, f"{shown}/{STATE}")),
    )


def last_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if LAST.fullmatch(path.name) and path.is_dir())


def _step_of(name: str) -> int:
    return int(name.split("-")[3])


def _state(path: Path, shown: str) -> dict[str, Any]:
    document = read_json(path, shown)
    if not isinstance(document, dict) or type(document.get("step")) is not int:
        raise EvidenceError(shown, "has no whole number `step`")
    return document


def base_tensors(tensors: dict[str, TensorEntry]) -> list[str]:
    """Names that no adapter has: weights of the base."""
    return sorted(name for name in tensors if not ADAPTER_KEY.search(name))
