"""Checkpoints: written whole or not at all, the resumable one rolled forward, old ones pruned.

    checkpoint-<epoch>-<step>/            pytorch_lora_weights.safetensors
    checkpoint-last-<epoch>-<step>-last/  the same, and what a resume needs

A folder is filled under a temporary name and renamed. The new -last- stands before the old
one goes, so a kill at any moment leaves at least one whole.
"""

import contextlib
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import files
from runtime.errors import ResumeError
from runtime.training import record
from runtime.training.record import Run

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LambdaLR

    from runtime.training.ema import Ema
    from runtime.training.trainables import Adapter

PLAIN = re.compile(r"checkpoint-(\d+)-(\d+)")
LAST = re.compile(r"checkpoint-last-(\d+)-(\d+)-last")
STATE_FILES = ("model.safetensors", "optimizer.bin", "scheduler.bin", "random_states_0.pkl")
TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The moving parts of a run, as a checkpoint saves and restores them."""

    adapter: "Adapter"
    optimizer: "Optimizer"
    schedule: "LambdaLR"
    ema: "Ema | None" = None

    def offered(self) -> contextlib.AbstractContextManager[None]:
        """The weights that checkpoints are for, in the adapter for as long as the block runs."""
        return self.ema.applied() if self.ema is not None else contextlib.nullcontext()


def save_plain(run: Run, trained: Trained, *, step: int, epoch: int) -> Path:
    path = run.path / f"checkpoint-{epoch}-{step}"
    with _filling(path) as temporary, trained.offered():
        trained.adapter.save(temporary)
    run.saved("save", "checkpoint", step, epoch, path, "scheduled")
    return path


def save_last(run: Run, trained: Trained, state: dict[str, Any]) -> Path:
    """Roll the resumable checkpoint forward to `state["step"]`; earlier ones of this run go."""
    import torch

    step, epoch = state["step"], state["epoch"]
    path = run.path / f"checkpoint-last-{epoch}-{step}-last"
    with _filling(path) as temporary:
        with trained.offered():
            trained.adapter.save(temporary)
        trained.adapter.save_state(temporary)
        if trained.ema is not None:
            trained.ema.save(temporary)
        _write(trained.optimizer.state_dict(), temporary / "optimizer.bin")
        _write(trained.schedule.state_dict(), temporary / "scheduler.bin")
        # Draws depend on (seed, step, slot) alone; this file is for readers that expect it.
        _write({"torch_cpu": torch.get_rng_state()}, temporary / "random_states_0.pkl")
        files.write_json(temporary / TRAINER_STATE, {"schema": "trainer-state/1", **state})
    run.saved("save", "last", step, epoch, path, "rolled forward")
    for older in lasts(run.path)[:-1]:
        remove(run, older, "rolled forward")
    return path


def prune(run: Run, limit: int | None, best: str | None) -> None:
    """Keep the `limit` newest plain checkpoints, the best one always among them."""
    if limit is None:
        return
    kept = plains(run.path)
    candidates = [path for path in kept if path.name != best]
    for path in candidates[: max(0, len(kept) - limit)]:
        remove(run, path, f"train.checkpoints_total_limit: {limit}")


def remove(run: Run, path: Path, reason: str) -> None:
    """Take away a checkpoint of this run; the rename makes it gone at once for every reader."""
    matched = LAST.fullmatch(path.name) or PLAIN.fullmatch(path.name)
    assert matched is not None
    kind = "last" if LAST.fullmatch(path.name) else "checkpoint"
    # Noted first: a kill after it leaves a folder too many, which `finetune clean` takes; the other way round
    # the record would promise what is gone.
    run.saved("prune", kind, int(matched[2]), int(matched[1]), path, reason)
    doomed = path.with_name(f".{path.name}.removed")
    files.rename(path, doomed)
    shutil.rmtree(doomed)


def reduce(kept: Path) -> None:
    """Of a run that is resumed from `kept`, take the other -last-: a kill came before the old one went."""
    for other in lasts(kept.parent):
        if other != kept:
            remove(Run(path=kept.parent), other, "left by a kill")


def plains(run: Path) -> list[Path]:
    return _sorted(run, PLAIN)


def lasts(run: Path) -> list[Path]:
    return _sorted(run, LAST)


def _sorted(run: Path, pattern: re.Pattern[str]) -> list[Path]:
    found = ((pattern.fullmatch(path.name), path) for path in run.iterdir() if path.is_dir())
    return [path for _, path in sorted((int(match[2]), path) for match, path in found if match)]


@contextlib.contextmanager
def _filling(path: Path) -> Iterator[Path]:
    """A folder to fill, put in place where the block ends well; else its room is given back."""
    temporary = path.with_name(f".{path.name}.tmp")
    if temporary.exists():  # left by a kill while it was filled
        shutil.rmtree(temporary)
    temporary.mkdir()
    try:
        yield temporary
        for item in temporary.iterdir():
            files.sync(item)
    except Exception:  # of whatever kind: a full disk needs the room back, and the error goes on as it came
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():  # the same step saved twice: an interruption right at a boundary
        shutil.rmtree(path)
    files.rename(temporary, path)


def _write(value: Any, path: Path) -> None:
    """By a handle of our own: where torch opens the file itself, nothing tells of a full disk."""
    import torch

    with path.open("wb") as handle:
        torch.save(value, handle)


def find(project: Path, wanted: str, workspace: Path) -> Path:
    """The resumable checkpoint that `latest` or a path means. Raises ResumeError with what to do."""
    if wanted == "latest":
        return _latest(project)
    path = (workspace / wanted).resolve()
    if LAST.fullmatch(path.name) and (path / TRAINER_STATE).is_file():
        return path
    if PLAIN.fullmatch(path.name) and path.is_dir():
        right = lasts(path.parent)
        raise ResumeError(
            f"{path.name} holds the adapter alone; a resume needs optimizer and schedule too",
            remedy=f"finetune fit --resume {_written(right[-1], workspace) if right else 'latest'}",
        )
    raise ResumeError(f"no resumable checkpoint at {path}", remedy="finetune fit --resume latest")


def _written(path: Path, workspace: Path) -> str:
    """As a user would type it: relative to the workspace where it lies inside."""
    root = workspace.resolve()
    return (path.relative_to(root) if path.is_relative_to(root) else path).as_posix()


def _latest(project: Path) -> Path:
    """The newest whole one of the newest full runs; a broken one is passed over, but not for a finished run."""
    broken: list[str] = []
    for path, document in record.runs(project):
        if document.get("kind") != "full":
            continue
        faults = {last: unusable(last) for last in lasts(path)}
        whole = [last for last, fault in faults.items() if not fault]
        if whole and not (broken and document["state"] == "completed"):
            return whole[-1]
        broken += [f"{path.name}/{last.name} {fault}" for last, fault in faults.items() if fault]
    what = "; ".join(broken) or f"no full run below {project} has a checkpoint-last-*-last"
    raise ResumeError(f"nothing to resume: {what}", remedy="finetune fit")


def unusable(path: Path) -> str:
    """Why a -last- can't be resumed; empty where it is whole. What its save recorded is compared."""
    missing = [name for name in (*STATE_FILES, TRAINER_STATE) if not (path / name).is_file()]
    if missing:
        return f"lacks {', '.join(missing)}"
    for line in reversed(files.read_json_lines(path.parent / "saves.jsonl")):
        if line["event"] == "save" and line["path"] == path.name:
            if missing := [name for name in line["files"] if not (path / name).is_file()]:
                return f"lacks {', '.join(missing)}"
            changed = [
                n for n, kept in line["files"].items() if files.file_digest(path / n) != kept["sha256"]
            ]
            return f"has other bytes than were saved: {', '.join(changed)}" if changed else ""
    return ""


def read_state(path: Path) -> dict[str, Any]:
    """trainer_state.json of a -last-. Raises ResumeError where the folder is not whole."""
    if fault := unusable(path):
        raise ResumeError(f"{path.name} {fault}", remedy="finetune fit")
    try:
        state: dict[str, Any] = files.read_json(path / TRAINER_STATE)
    except ValueError as error:
        raise ResumeError(
            f"{path.name}: {TRAINER_STATE} is damaged: {error}", remedy="finetune fit"
        ) from error
    return state


def restore(path: Path, trained: Trained) -> None:
    """Adapter, optimizer and schedule as they stood. Nothing is unpickled but tensors and numbers."""
    import torch

    trained.adapter.load_state(path)
    if trained.ema is not None:
        trained.ema.load(path)
    trained.optimizer.load_state_dict(
        torch.load(path / "optimizer.bin", map_location="cpu", weights_only=True)
    )
    trained.schedule.load_state_dict(
        torch.load(path / "scheduler.bin", map_location="cpu", weights_only=True)
    )


def _differing(name: str, then: Any, now: Any) -> list[str]:
    """Of a section each key, as config.yaml writes it."""
    if isinstance(then, dict) and isinstance(now, dict):
        keys = dict.fromkeys([*now, *then])
        return [line for key in keys for line in _differing(f"{name}.{key}", then.get(key), now.get(key))]
    return [f"{name}: {then} then, {now} now"] if then != now else []


def refuse_differences(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """A resume must train the same thing. Raises ResumeError listing each difference."""
    lines = [line for name in now for line in _differing(name, saved.get(name), now[name])]
    if lines:
        raise ResumeError(
            "the checkpoint is of another training:\n  " + "\n  ".join(lines),
            remedy="restore these values, or start anew with: finetune fit",
        )
