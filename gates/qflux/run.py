"""A run directory of qflux, read as its trainer leaves it: <output_dir>/<project>/v<N>.

    train_config.yaml                    the config, written before the first step
    events.out.tfevents.*                with report_to: tensorboard: loss, smooth_loss, lr, epoch, fps, from step 0
    checkpoint-<epoch>-<step>/           the adapter and state.json {global_step, epoch, is_last}
    checkpoint-last-<epoch>-<step>-last/ the same, and the state of accelerate

The facts are of tsiendragon/qwen-image-finetune at 460ba1a, version 3.3.0.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.documents import read_yaml
from gates.evidence import (
    EvidenceError,
    MissingEvidenceError,
    Reading,
    attempt,
    file_digest,
    inside,
    read_json,
)
from gates.qflux.events import Scalars, read_scalars
from gates.runs import ADAPTER, STATE
from gates.tensors import TensorEntry, TensorFacts, read_header, tensor_facts
from gates.verdict import Input

TRAINER = "qflux"
CONFIG = "train_config.yaml"
EVENTS = "events.out.tfevents.*"
RESUMABLE = (STATE, "optimizer.bin", "scheduler.bin", "state.json")
LOGS_ELSEWHERE = "set logging.report_to: tensorboard in the qflux config, and run it again"
_PLAIN = re.compile(r"checkpoint-(\d+)-(\d+)")
_LAST = re.compile(r"checkpoint-last-(\d+)-(\d+)-last")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    name: str
    """of its folder"""
    step: int
    is_last: bool
    faults: tuple[str, ...]
    """where its state.json is absent or tells another step than its name"""
    files: tuple[str, ...]
    adapter: Reading[dict[str, TensorEntry]]
    state: Reading[dict[str, TensorEntry]] | None
    """of model.safetensors, which accelerate leaves in a -last-; None where there is none"""
    facts: Reading[dict[str, TensorFacts]] | None
    """of the adapter's values; of the first and the last checkpoint only"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    max_train_steps: int
    checkpointing_steps: int
    rank: int
    report_to: str
    resumed_at: int
    """the step that the run was resumed from; 0 where it was not"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QfluxRun:
    name: str
    settings: Reading[Settings]
    curve: Reading[list[tuple[int, float]]]
    """(step, loss) from 0 on: of the step's last micro-batch, over the number of those that it accumulates"""
    torn: tuple[str, ...]
    checkpoints: tuple[Checkpoint, ...]
    """by step; a plain one before the -last- of its step"""
    inputs: tuple[Input, ...]

    @property
    def lasts(self) -> list[Checkpoint]:
        return [item for item in self.checkpoints if item.is_last]


def looks_like(folder: Path) -> bool:
    """No run of ours, and with the signs of qflux."""
    if (folder / "run.json").is_file() or not folder.is_dir():
        return False
    return (folder / CONFIG).is_file() or any(
        (path / "state.json").is_file() for path in _checkpoints(folder)
    )


def _checkpoints(folder: Path) -> list[Path]:
    return [
        p for p in folder.iterdir() if p.is_dir() and (_PLAIN.fullmatch(p.name) or _LAST.fullmatch(p.name))
    ]


def read(folder: Path) -> QfluxRun:
    settings = attempt(lambda: _settings(folder))
    report_to = settings.value.report_to if settings.value else "tensorboard"
    torn: list[str] = []
    curve = attempt(lambda: _curve(folder, report_to, torn))
    paths = sorted(_checkpoints(folder), key=lambda path: (_step(path), _is_last(path), path.name))
    ends = {path.name for path in (*paths[:1], *paths[-1:])}
    files = [folder / CONFIG, *sorted(folder.glob(EVENTS)), *(path / ADAPTER for path in paths)]
    return QfluxRun(
        name=folder.name,
        settings=settings,
        curve=curve,
        torn=tuple(torn),
        checkpoints=tuple(_checkpoint(path, with_facts=path.name in ends) for path in paths),
        inputs=tuple(_input(folder, path) for path in files if path.is_file()),
    )


def _input(folder: Path, path: Path) -> Input:
    name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
    return Input(path=name, sha256=file_digest(path), size=path.stat().st_size)


def _settings(folder: Path) -> Settings:
    document, _ = read_yaml(folder / CONFIG, CONFIG)
    steps = _whole(document, "train", "max_train_steps")
    return Settings(
        max_train_steps=steps,
        checkpointing_steps=_whole(document, "train", "checkpointing_steps"),
        rank=_whole(document, "model", "lora", "r"),
        report_to=str(_at(document, "logging", "report_to")),
        resumed_at=_resumed_at(document.get("resume")),
    )


def _at(document: Any, *keys: str) -> Any:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document


def _whole(document: dict[str, Any], *keys: str) -> int:
    value = _at(document, *keys)
    if type(value) is not int or value < 1:
        raise EvidenceError(CONFIG, f"{'.'.join(keys)} is {value!r}, expected a whole number from 1 on")
    return value


def _resumed_at(resume: Any) -> int:
    if resume is None:
        return 0
    name = re.split(r"[\\/]", str(resume).rstrip("\\/"))[-1]
    match = _LAST.fullmatch(name) or _PLAIN.fullmatch(name)
    if match is None:
        raise EvidenceError(CONFIG, f"resume is {name!r}, expected a checkpoint-last-<epoch>-<step>-last")
    return int(match[2])


def _curve(folder: Path, report_to: str, torn: list[str]) -> list[tuple[int, float]]:
    paths = sorted(folder.glob(EVENTS))
    if not paths:
        raise MissingEvidenceError(
            EVENTS,
            f"is missing: logging.report_to is {report_to}, and only tensorboard leaves the losses here",
            remedy=LOGS_ELSEWHERE,
        )
    losses: list[tuple[int, float]] = []
    for path in paths:
        scalars, note = _scalars(folder, path)
        torn += [note] if note else []
        losses += scalars.get("loss", [])
    if not losses:
        raise MissingEvidenceError(EVENTS, "holds no scalar `loss`", remedy=LOGS_ELSEWHERE)
    return losses


def _scalars(folder: Path, path: Path) -> tuple[Scalars, str]:
    return read_scalars(inside(folder, path.name), path.name)


def _step(path: Path) -> int:
    match = _LAST.fullmatch(path.name) or _PLAIN.fullmatch(path.name)
    return int(match[2]) if match else 0


def _is_last(path: Path) -> bool:
    return _LAST.fullmatch(path.name) is not None


def _checkpoint(path: Path, *, with_facts: bool) -> Checkpoint:
    adapter, state = path / ADAPTER, path / STATE
    shown = f"{path.name}/{ADAPTER}"
    return Checkpoint(
        name=path.name,
        step=_step(path),
        is_last=_is_last(path),
        faults=tuple(_state_faults(path)),
        files=tuple(sorted(item.relative_to(path).as_posix() for item in path.rglob("*") if item.is_file())),
        adapter=attempt(lambda: read_header(adapter, shown)),
        state=attempt(lambda: read_header(state, f"{path.name}/{STATE}")) if state.is_file() else None,
        facts=attempt(lambda: tensor_facts(adapter, shown)) if with_facts else None,
    )


def _state_faults(path: Path) -> list[str]:
    shown = f"{path.name}/state.json"
    found = attempt(lambda: read_json(path / "state.json", shown))
    if found.error is not None:
        return [str(found.error)]
    step = _at(found.value, "global_step")
    return [] if step == _step(path) else [f"{shown} tells step {step}, its folder {_step(path)}"]
