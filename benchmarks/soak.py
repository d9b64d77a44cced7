"""Kill a fit again and again at random moments, resume it each time, and compare it with the fit left alone.

    python benchmarks/soak.py OUT [--steps 300] [--interval 10] [--seed 0]

OUT becomes two workspaces over the embedded base, alike to the byte: in OUT/whole one process trains from start to
end, in OUT/killed `finetune fit` and `finetune fit --resume latest` get SIGKILL (on Windows TerminateProcess): while
they start, between and within steps, and while a checkpoint is written. Both adapters, every checkpoint and every line
of metrics and probes, times and memory left out, must be equal, and gate 07 must pass over the killed one. Dropout of
adapter and captions, accumulation and a cosine are on. A line for each kill goes to stderr, one JSON object to stdout.
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml
from safetensors.torch import load_file

from runtime import files
from runtime.config import load
from runtime.demo import series
from runtime.training import checkpoints, history, record
from runtime.training.trainables import WEIGHTS

FINETUNE = (sys.executable, "-m", "runtime")
MOMENTS = ("start", "step", "step", "save")
"""When a kill comes; half of them between two checkpoints."""
START_S = 12.0  # from the launch of a process to its first step, on two cores that other work shares
PATIENCE_S = 600.0
UNLIKE = {"at", "run", "step_s", "alloc_gib", "reserved_gib", "peak_gib", "rss_gib"}
"""Of a line of metrics or probes: what no two runs share."""
RECIPE: dict[str, Any] = {
    "data.batch_size": 1,
    "data.caption_dropout_rate": 0.2,
    "model.lora.lora_dropout": 0.1,
    "train.gradient_accumulation_steps": 2,
    "train.probe_draws": 2,
    "lr_scheduler.scheduler_type": "cosine",
    "logging.report_to": [],
}


class SoakError(Exception):
    """A fit ended by itself and not well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    moment: str
    seen: int
    """Steps of which the killed process left a line."""
    kept: int
    """The step from which the next one goes on."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--interval", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    wish = parser.parse_args()
    whole, killed = wish.out.resolve() / "whole", wish.out.resolve() / "killed"
    prepare(killed, {"train.max_train_steps": wish.steps, "train.checkpointing_steps": wish.interval})
    shutil.copytree(killed, whole)
    call(whole, "fit")
    started = time.monotonic()
    kills = harass(killed, killed / "outputs" / "demo", Random(wish.seed), wish.interval)
    found = {
        "steps": wish.steps,
        "kills": len(kills),
        "moments": dict(Counter(kill.moment for kill in kills)),
        "lost_steps": sum(kill.seen - kill.kept for kill in kills),
        **compare(newest(whole / "outputs" / "demo"), newest(killed / "outputs" / "demo")),
        "gate_07": verdict(killed),
        "wall_s": round(time.monotonic() - started),
    }
    print(json.dumps(found))
    return 0 if found["gate_07"] == "PASS" and not found["different"] else 1


def prepare(root: Path, changes: dict[str, Any]) -> None:
    """The demo's workspace with this recipe, through steps 01 to 06, cache and smoke fit."""
    root.mkdir(parents=True)
    document = yaml.safe_load(series.CONFIG.read_text(encoding="utf-8"))
    written = yaml.safe_dump(load.apply_overrides(document, {**RECIPE, **changes}))
    files.write_text(root / "config.yaml", written)
    series.prepare(root, "cpu")
    with contextlib.redirect_stdout(sys.stderr):
        for script in series.scripts()[:6]:
            if series.load_script(script).main(["--workspace", str(root)]):
                raise SoakError(f"{script.parent.parent.name} failed in {root}")
    call(root, "cache")
    call(root, "fit", "--smoke")


def call(root: Path, *words: str) -> None:
    subprocess.run([*FINETUNE, *words, "--workspace", str(root)], check=True, stdout=sys.stderr)


def harass(root: Path, project: Path, random: Random, interval: int, most: int | None = None) -> list[Kill]:
    """Kill the fit of a workspace, at most `most` times, and go on with it until it completes."""
    kills: list[Kill] = []
    while True:
        before = record.versions(project)
        kept = resumable(project)
        command = [*FINETUNE, "fit", "--workspace", str(root), *(["--resume", "latest"] if kept else [])]
        with (root / "fit.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as fit:
            moment = random.choice(MOMENTS) if most is None or len(kills) < most else "never"
            run = project / f"v{before[-1][0] + 1 if before else 0}"
            if ended(fit, waiting(moment, run, kept, interval, random)):
                if fit.returncode != 0:
                    raise SoakError((root / "fit.log").read_text(encoding="utf-8", errors="replace"))
                return kills
            fit.kill()
        steps = [line["step"] for line in files.read_json_lines(run / "metrics.jsonl")]
        kills.append(Kill(moment=moment, seen=max(steps, default=kept), kept=resumable(project)))
        say(len(kills), kills[-1])


def waiting(moment: str, run: Path, kept: int, interval: int, random: Random) -> Callable[[], bool]:
    """Whether the moment has come; drawn here, so that the seed alone decides."""
    if moment == "never":
        return lambda: False
    if moment == "start":
        due = time.monotonic() + random.uniform(0.0, START_S)
        return lambda: time.monotonic() >= due
    if moment == "save":
        after, delay = kept + random.randint(0, 4) * interval, random.uniform(0.0, 0.05)
        return lambda: being_saved(run, after) and not time.sleep(delay)
    step, delay = kept + random.randint(1, 5 * interval), random.uniform(0.0, 0.3)
    return lambda: steps_of(run) >= step and not time.sleep(delay)


def steps_of(run: Path) -> int:
    """The last step of a run that has a line."""
    return max((line["step"] for line in files.read_json_lines(run / "metrics.jsonl")), default=0)


def being_saved(run: Path, after: int) -> bool:
    return run.is_dir() and any(run.glob(".checkpoint-*.tmp")) and steps_of(run) > after


def ended(process: subprocess.Popen[bytes], due: Callable[[], bool]) -> bool:
    """Waits for one of the two; True where the process ended first."""
    deadline = time.monotonic() + PATIENCE_S
    while process.poll() is None:
        if due():
            return process.poll() is not None
        if time.monotonic() > deadline:
            process.kill()
            raise SoakError(f"no end of {process.args!r} within {PATIENCE_S:.0f} s")
        time.sleep(0.001)
    return True


def resumable(project: Path) -> int:
    """The step that `--resume latest` would go on from; 0 where there is none."""
    for path, document in record.runs(project):
        if document["kind"] == "full" and (lasts := checkpoints.lasts(path)):
            return int(files.read_json(lasts[-1] / checkpoints.TRAINER_STATE)["step"])
    return 0


def newest(project: Path) -> Path:
    return next(path for path, document in record.runs(project) if document["kind"] == "full")


def compare(whole: Path, killed: Path) -> dict[str, Any]:
    """What of two runs, each with what it continues, is not the same, by name."""
    one, other = (history.read(run, files.read_json(run / "run.json")) for run in (whole, killed))
    states = (load_file(checkpoints.lasts(run)[-1] / "model.safetensors") for run in (whole, killed))
    equal = {
        "adapter": same(*states),
        "metrics": stripped(one.metrics) == stripped(other.metrics),
        "probes": stripped(one.probes) == stripped(other.probes),
        "checkpoints": one.checkpoints.keys() == other.checkpoints.keys()
        and all(
            same(
                load_file(whole.parent / path / WEIGHTS),
                load_file(killed.parent / other.checkpoints[step] / WEIGHTS),
            )
            for step, path in one.checkpoints.items()
        ),
    }
    counts = {"lines": len(one.metrics), "checkpoints": len(one.checkpoints)}
    return {**counts, "different": [name for name, fits in equal.items() if not fits]}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[n]) for n, tensor in one.items())


def stripped(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if name not in UNLIKE} for line in lines]


def verdict(root: Path) -> str:
    """Of the judge, in its own process."""
    command = [sys.executable, "-m", "gates", "check", "07", "--workspace", str(root), "--json"]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, encoding="utf-8", env=os.environ
    )
    return str(json.loads(done.stdout)["verdict"])


def say(number: int, kill: Kill) -> None:
    where = f"at step {kill.seen}" if kill.moment != "start" else f"while it started from {kill.kept}"
    print(f"kill {number} {where} ({kill.moment}): on from {kill.kept}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
