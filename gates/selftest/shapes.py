"""The shapes of healthy evidence that faults are planted in: synthetic ones, and recordings of real runs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.selftest import nf4, recordings
from gates.selftest.editing import Made, write_json
from gates.selftest.fits import NOW
from gates.selftest.healthy import healthy, validate

RESUMED_AT, KILLED_AFTER = 20, 33  # steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    told: str
    make: Callable[[Path], Made]


def _skipped(root: Path) -> Made:
    made = healthy(root)
    made.evidence("06-quantize").unlink()
    shutil.rmtree(root / "models" / "nf4")
    skip = {"schema": "skip/1", "gate": "06", "reason": "64 GiB are enough", "at": NOW}
    write_json(root / ".gates" / "skips" / "06.json", skip)
    return made


def _otherwise(root: Path, change: Callable[[Path], dict[str, Any]]) -> Made:
    """NF4 of the denoiser come by in another way; the runs were made with the base as it lies there then."""
    made = healthy(root)
    record = change(root)

    def put(document: dict[str, Any]) -> None:
        others = [item for item in document["data"]["components"] if item["name"] != "transformer"]
        reason = "not measured: no plain denoiser is here"
        document["data"].update(components=[record, *others], output_error={"value": None, "reason": reason})

    made.edit(made.evidence("06-quantize"), put)
    prints = {"transformer": record["source_fingerprint"]}
    for kind in ("smoke", "full"):
        made.edit(made.run(kind) / "run.json", lambda d: d["model"]["fingerprints"].update(prints))
    return made


def resume(made: Made) -> Made:
    """v1 is killed after step 33 with its -last- at step 20; v2 goes on from there to the end."""
    full, second, at = made.run("full"), made.project / "v2", RESUMED_AT
    shutil.copytree(full, second)
    origin = {
        "run_id": "run-v1", "run": "v1", "step": at, "checkpoint": f"checkpoint-last-1-{at}-last",
        "digest": "0" * 64,
    }  # fmt: skip
    made.edit(second / "run.json", lambda d: d.update(run_id="run-v2", resumed_from=origin))
    made.edit(full / "run.json", lambda d: d.update(state="running", done_steps=at))
    for name in ("metrics.jsonl", "saves.jsonl", "probe.jsonl"):
        made.edit_lines(second / name, lambda lines: [x for x in lines if x["step"] > at])
        made.edit_lines(full / name, lambda lines: [x for x in lines if x["step"] <= KILLED_AFTER])
    with (full / "metrics.jsonl").open("a", encoding="utf-8", newline="\n") as handle:
        handle.write('{"step": 34, "lo')  # what a kill leaves of a line
    shutil.rmtree(second / "checkpoint-1-20")
    return made


def _resumed(root: Path) -> Made:
    made = resume(healthy(root))
    validate(made, "v2")
    return made


def prune(made: Made, step: int) -> Made:
    """The checkpoint of `step` taken away, and told so, as `checkpoints_total_limit` does."""
    run = made.run("full")

    def change(lines: list[dict[str, Any]]) -> None:
        line = next(x for x in lines if (x["kind"], x["step"]) == ("checkpoint", step))
        lines.append({**line, "event": "prune"})
        shutil.rmtree(run / line["path"])

    made.edit_lines(run / "saves.jsonl", change)
    return made


def _pruned(root: Path) -> Made:
    made = healthy(root, train={"checkpoints_total_limit": 1})
    for step in (20, 40):
        prune(made, step)
    return made


def _recorded(name: str) -> Shape:
    def make(root: Path) -> Made:
        recordings.unpack(name, root)
        return Made(root, folder="dataset", runs="outputs/demo")

    return Shape(told=recordings.TOLD[name], make=make)


SHAPES: dict[str, Shape] = {
    "cpu": Shape(told="a run on the CPU, synthetic", make=healthy),
    "xpu": Shape(told="a run on an Arc iGPU, synthetic", make=lambda root: healthy(root, "xpu")),
    "cuda": Shape(told="a run on a CUDA card, synthetic", make=lambda root: healthy(root, "cuda")),
    "nf4-skipped": Shape(told="step 06 left out with a reason, synthetic", make=_skipped),
    "nf4-dropped": Shape(
        told="a base that step 06 fetched, its shards dropped, synthetic",
        make=lambda root: _otherwise(root, nf4.drop),
    ),
    "nf4-taken": Shape(
        told="a base whose denoiser is NF4 already, synthetic", make=lambda root: _otherwise(root, nf4.take)
    ),
    "accumulation": Shape(
        told="four micro-batches a step, synthetic",
        make=lambda root: healthy(root, train={"gradient_accumulation_steps": 4}),
    ),
    "resumed": Shape(told="killed at step 33 and resumed from step 20, synthetic", make=_resumed),
    "controls": Shape(
        told="two controls a sample, synthetic", make=lambda root: healthy(root, controls=2)
    ),
    "pruned": Shape(told="all checkpoints but the last pruned, synthetic", make=_pruned),
    "recorded-cpu": _recorded("demo-cpu"),
    "recorded-cuda": _recorded("demo-cuda"),
    "recorded-controls": _recorded("demo-controls"),
}  # fmt: skip


def last_run(made: Made) -> Path:
    """The newest of the workspace's runs."""
    return max(made.project.glob("v*"), key=lambda path: int(path.name[1:]))


def manifest(made: Made) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((made.root / "cache/manifest.json").read_text(encoding="utf-8"))
    return document
