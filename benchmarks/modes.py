"""Whether each way to save memory or time trains the same weights, and what it costs: on this machine's accelerator.

    python benchmarks/random_base.py BASE --layers 4
    python benchmarks/modes.py BASE [--modes graphs ...] [--steps 20] [--flat 100] [--set KEY=VALUE]
    python benchmarks/modes.py --tiny

Each mode is a `finetune fit` of the same samples from the same start, all else off; `eager` checkpoints every block.
After `--steps` steps its adapter is compared with eager's: `weights` is ||w - e|| / ||e||, `update` is
||w - e|| / ||e - w0||. `eager again` says how much of that is the device's own: what two equal runs differ by. The fit
goes on to step `--flat`: memory allocated there, over that at `--steps`. A mode whose update is more than 0.03 away,
or whose memory grows, is an error. Then the modes that compile or record run on
eight text lengths in three buckets, and it is told how often the compiler was asked. One JSON object a line.
"""

import argparse
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import true_size
from measuring import Fitted, Line, Report
from torch import Tensor
from true_size import Shape

from runtime import device as devices
from runtime.demo.series import BASE
from runtime.training.session import Session
from runtime.workspace import Workspace

OFF: dict[str, Any] = {
    "train.gradient_checkpointing": True,
    "train.cached_modulation": False,
    "train.streamed_blocks": 0,
    "train.compile": False,
    "train.graphs": False,
}
EAGER, AGAIN = "eager", "eager again"
MODES: dict[str, dict[str, Any]] = {
    EAGER: {},
    AGAIN: {},
    "no checkpointing": {"train.gradient_checkpointing": False},
    "groups of two": {"train.gradient_checkpointing": 2},
    "selective": {"train.gradient_checkpointing": "selective"},
    "cached modulation": {"train.cached_modulation": True},
    "streamed": {"train.streamed_blocks": 2},
    "compile": {"train.compile": True},
    "compile, no checkpointing": {"train.compile": True, "train.gradient_checkpointing": False},
    "graphs": {"train.graphs": True},
    "compile, graphs": {"train.compile": True, "train.graphs": True},
    "all": {
        "train.compile": True,
        "train.graphs": True,
        "train.cached_modulation": True,
        "train.gradient_checkpointing": "selective",
    },
}
ACCELERATED = ("train.compile", "train.graphs")
LENGTHS = (67, 120, 181, 240, 333, 400, 512, 700)
BUCKETS = 3
WARMUP = 5
UPDATE_MAX = 3e-2  # two equal eager runs on an H200 differ by 5e-3; a wrong gradient by 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Of the adapter, flat, fp32, on the CPU: before the first step, and after the steps that are compared."""

    before: Tensor
    after: Tensor


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, nargs="?", default=BASE)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), help="only these, and eager")
    parser.add_argument("--size", type=int, nargs=2, default=(384, 672), help="height and width, pixels")
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--steps", type=int, default=20, help="after which weights are compared")
    parser.add_argument("--flat", type=int, default=100, help="at which memory is")
    parser.add_argument("--only", choices=("exact", "shapes"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of all modes")
    parser.add_argument("--tiny", action="store_true", help="the embedded base, on whatever device is there")
    wish = parser.parse_args()
    report = Report()
    size = true_size.TINY.size if wish.tiny else tuple(wish.size)
    report.tell(**measuring.describe(devices.pick()), size=size, quantize=wish.quantize)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        if wish.only != "shapes":
            exactness(report, Path(folder) / "one", wish)
        if wish.only != "exact":
            shapes(report, Path(folder) / "several", wish)
    print(rendered(report.lines))
    return int(report.failed)


def chosen(wish: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """On a CPU without what takes minutes there, or isn't there; but what is asked for by name."""
    if wish.modes:
        return {name: changes for name, changes in MODES.items() if name in (EAGER, *wish.modes)}
    able = devices.pick().is_accelerator
    return {n: c for n, c in MODES.items() if able or not any(key in c for key in ACCELERATED)}


def config_of(wish: argparse.Namespace, changes: Mapping[str, Any], steps: int) -> dict[str, Any]:
    length = {"train.max_train_steps": steps, "train.checkpointing_steps": steps}
    given = true_size.read_changes(wish.set)
    return {"model.quantize": wish.quantize, **length, **OFF, **changes, **given}


def exactness(report: Report, out: Path, wish: argparse.Namespace) -> None:
    shape = true_size.TINY if wish.tiny else Shape(size=(wish.size[0], wish.size[1]))
    steps, flat = (2, 4) if wish.tiny else (wish.steps, max(wish.steps, wish.flat))
    with report.trying(kind="exact"):
        workspace = true_size.make(out, wish.base, shape, {})
        eager: Weights | None = None
        for name, changes in chosen(wish).items():
            with report.trying(kind="exact", mode=name):
                fitted, weights = trained(workspace, config_of(wish, changes, flat), steps)
                eager = eager or weights
                line = {**compared(weights, eager), **cost(fitted, steps)}
                report.tell(kind="exact", mode=name, **line)
                judge(line)


def trained(workspace: Workspace, changes: Mapping[str, Any], steps: int) -> tuple[Fitted, Weights]:
    seen: list[Session] = []
    kept: list[Tensor] = []

    def ready(opened: Session) -> None:
        seen.append(opened)
        kept.append(flat_weights(opened))

    def turn(step: int) -> None:
        if step == steps:
            kept.append(flat_weights(seen.pop()))

    measuring.fresh_compiler()
    fitted = measuring.fit(workspace, changes, min(WARMUP, steps - 1), turn=turn, ready=ready)
    return fitted, Weights(before=kept[0], after=kept[1])


def flat_weights(opened: Session) -> Tensor:
    import torch

    parameters = opened.trained.adapter.parameters()
    return torch.cat([parameter.detach().float().cpu().flatten() for parameter in parameters])


def compared(weights: Weights, eager: Weights) -> Line:
    distance = float((weights.after - eager.after).norm())
    return {
        "weights": distance / float(eager.after.norm()),
        "update": distance / float((eager.after - eager.before).norm()),
        "same_start": bool((weights.before == eager.before).all()),
    }


def judge(line: Line) -> None:
    """Raises where a mode trains something else, or memory grows from step to step."""
    if not line["same_start"] or line["update"] > UPDATE_MAX:
        raise RuntimeError(f"update {line['update']:.2g} from eager's, at most {UPDATE_MAX} expected")
    if line["grown_gib"] > 0:
        raise RuntimeError(f"{line['grown_gib']:.3g} GiB more are allocated at the last step")


def cost(fitted: Fitted, steps: int) -> Line:
    """Seconds of a step, peaks, and how far memory has grown between the step compared and the last one."""
    grown = fitted.lines[-1]["alloc_gib"] - fitted.lines[steps - 1]["alloc_gib"]
    found = {"median_s": statistics.median(fitted.times), "warmup_s": fitted.before_s + fitted.warmup_s}
    return {**found, **fitted.memory_json(), "grown_gib": grown, **measuring.compilations()}


def shapes(report: Report, out: Path, wish: argparse.Namespace) -> None:
    """The same modes where text lengths and buckets change from step to step; each shape comes four times.

    A shape is recorded when it comes the second time, so the first two rounds are not timed."""
    if wish.tiny:
        shape = Shape(size=true_size.TINY.size, tokens=(18, 33), buckets=2)
    else:
        shape = Shape(size=(wish.size[0], wish.size[1]), tokens=LENGTHS, buckets=BUCKETS)
    steps = 4 * shape.samples
    modes = {n: c for n, c in chosen(wish).items() if n == EAGER or any(key in c for key in ACCELERATED)}
    with report.trying(kind="shapes"):
        workspace = true_size.make(out, wish.base, shape, {})
        for name, changes in modes.items():
            with report.trying(kind="shapes", mode=name):
                measuring.fresh_compiler()
                fitted = measuring.fit(workspace, config_of(wish, changes, steps), steps // 2)
                second = {"median_s": statistics.median(fitted.times), "max_s": max(fitted.times)}
                first = {"shapes": seen_shapes(fitted), "first_rounds_s": fitted.warmup_s}
                peaks = fitted.memory_json()
                made = {**measuring.compilations(), "speed": fitted.document.get("speed")}
                report.tell(kind="shapes", mode=name, **first, **second, **peaks, **made)


def seen_shapes(fitted: Fitted) -> int:
    return len({(line["bucket"], line["tokens"]) for line in fitted.lines})


def rendered(lines: list[Line]) -> str:
    tables = []
    for kind, (heads, row) in TABLES.items():
        rows = [
            [line["mode"], *row(line)] for line in lines if line.get("kind") == kind and "median_s" in line
        ]
        if rows:
            tables.append(measuring.table(["mode", *heads], rows))
    return "\n\n".join(tables)


def _exact(line: Line) -> list[str]:
    return [
        f"{line['weights']:.1e}",
        f"{line['update']:.1e}",
        f"{line['median_s']:.3f}",
        f"{line['peak_gib']:.2f}",
        f"{line['reserved_gib']:.2f}",
        f"{1024 * line['grown_gib']:.1f}",
    ]


def _several(line: Line) -> list[str]:
    speed = line["speed"]
    return [
        str(line["shapes"]),
        str(speed["compiled"]),
        str(line["recompiles"]),
        str(speed["recorded"]),
        f"{line['first_rounds_s']:.0f}",
        f"{line['median_s']:.3f}",
        f"{line['max_s']:.3f}",
        f"{line['peak_gib']:.2f}",
        f"{line['reserved_gib']:.2f}",
    ]


MEMORY = ["allocated, GiB", "reserved, GiB"]
TABLES = {
    "exact": (["weights", "update", "s a step", *MEMORY, "grown, MiB"], _exact),
    "shapes": (
        [
            "shapes",
            "compiled",
            "of them again",
            "recorded",
            "first rounds, s",
            "s a step",
            "at most",
            *MEMORY,
        ],
        _several,
    ),
}


if __name__ == "__main__":
    raise SystemExit(main())
