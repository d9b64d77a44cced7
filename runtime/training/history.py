"""A run's numbers from its first step on, across resumes, and whether it learns or only remembers."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from runtime import files
from runtime.training import record

RISES = 3  # checkpoints in a row; one or two happen without reason


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Lines of metrics.jsonl and probe.jsonl, and the folder of each plain checkpoint (`v0/checkpoint-3-50`)."""

    metrics: list[dict[str, Any]]
    probes: list[dict[str, Any]]
    checkpoints: dict[int, str]


def read(run: Path, document: dict[str, Any]) -> History:
    """Of each ancestor what counts: up to the step at which its successor took over."""
    links = list(reversed(record.lineage(run.parent, run, document)))

    def joined(name: str) -> list[dict[str, Any]]:
        lines = ((link, line) for link in links for line in files.read_json_lines(link.path / name))
        return [{**line, "run": link.path.name} for link, line in lines if line["step"] <= link.until]

    saves = [line for line in joined("saves.jsonl") if line["kind"] == "checkpoint"]
    pruned = {(line["run"], line["path"]) for line in saves if line["event"] == "prune"}
    kept = [line for line in saves if (line["run"], line["path"]) not in pruned]
    return History(
        metrics=joined("metrics.jsonl"),
        probes=joined("probe.jsonl"),
        checkpoints={line["step"]: f"{line['run']}/{line['path']}" for line in kept},
    )


def overfitting(probes: Sequence[dict[str, Any]], checkpoints: dict[int, str]) -> str:
    """One line where the held-out loss rose at 3 checkpoints in a row while the training loss fell; else empty.

    Only what came after the lowest held-out loss counts: a run that got better again is sound.
    """
    points = [p for p in probes if p["holdout_mean"] is not None and p["train_mean"] is not None]
    if not points:
        return ""
    best = min(range(len(points)), key=lambda index: float(points[index]["holdout_mean"]))
    after = points[best:]
    if not any(_parts(after[start : start + RISES + 1]) for start in range(len(after) - RISES)):
        return ""
    low, now = points[best], points[-1]
    return (
        f"overfitting: since step {low['step']} the held-out loss rose from {low['holdout_mean']:.4f} to "
        f"{now['holdout_mean']:.4f} while the training loss fell from {low['train_mean']:.4f} to "
        f"{now['train_mean']:.4f}; {_advice(points, checkpoints)}"
    )


def _parts(window: Sequence[dict[str, Any]]) -> bool:
    held = [point["holdout_mean"] for point in window]
    rises = all(later > earlier for earlier, later in pairwise(held))
    return rises and window[-1]["train_mean"] < window[0]["train_mean"]


def _advice(points: Sequence[dict[str, Any]], checkpoints: dict[int, str]) -> str:
    saved = [point for point in points if point["step"] in checkpoints]
    low = min((point["holdout_mean"] for point in points), default=None)
    if not saved:
        return "save more often: train.checkpointing_steps"
    best = min(saved, key=lambda point: float(point["holdout_mean"]))
    name = checkpoints[best["step"]]
    if best["holdout_mean"] == low:
        return f"the best checkpoint is {name}"
    return (
        f"the best checkpoint that there is, {name}, is past it: save more often, or lower the learning rate"
    )
