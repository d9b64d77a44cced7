"""What each part of a step costs that a bench of the bare model leaves out: sigmas, data, records, checkpoints.

    python benchmarks/costs.py BASE [--size 1024 1024] [--quantize nf4] [--steps 24] [--set KEY=VALUE]
    python benchmarks/costs.py --tiny

One `finetune fit`, its parts timed where the loop calls them. In the first half of the steps the samples are kept in
memory, and every second step takes the sigma of the first: what drawn sigmas cost is the difference of the two. In the
second half what was read is forgotten after each step, so each sample is read from disk (from the system's file cache,
where that holds it). One JSON object a line.
"""

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import measuring
import true_size
from measuring import Fitted, Report
from true_size import Shape

from runtime import device as devices
from runtime.demo.series import BASE
from runtime.memory.modulation import Maker, Rows
from runtime.training import loop
from runtime.training.batches import Batches
from runtime.training.objective import FlowMatching
from runtime.training.record import Run
from runtime.training.session import Session
from runtime.training.sigmas import Sigmas
from runtime.training.trackers import Trackers

PARTS: dict[str, tuple[Any, str]] = {
    "sigma and noise drawn": (FlowMatching, "draw"),
    "line of metrics.jsonl": (Run, "metrics"),
    "trackers": (Trackers, "step"),
    "rows of the modulation table": (Rows, "read"),
    "run.json, now and then": (Run, "write"),
}
ONCE: dict[str, tuple[Any, str]] = {
    "checkpoint": (loop, "_checkpoint"),
    "modulation table, made at the start": (Maker, "make"),
}
"""`checkpoint` has its probe and its part of run.json in it; a table that is there already is not made again."""
DATA = "waiting for data"
INTERVAL = 100  # steps between checkpoints by default


@dataclass(slots=True)
class Clock:
    """Seconds spent in each part, of each step."""

    step: int = 1
    spent: dict[str, dict[int, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self.spent[part][self.step] += time.perf_counter() - started

        return timed

    def mean(self, part: str, steps: range) -> float:
        return statistics.fmean(self.spent[part][step] for step in steps)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, nargs="?", default=BASE)
    parser.add_argument("--size", type=int, nargs=2, default=(384, 672), help="height and width, pixels")
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24, help="timed")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--tiny", action="store_true", help="the embedded base, on whatever device is there")
    wish = parser.parse_args()
    height, width = wish.size
    shape = true_size.TINY if wish.tiny else Shape(size=(height, width))
    steps = 8 if wish.tiny else wish.steps
    changes = {"model.quantize": wish.quantize, **true_size.read_changes(wish.set)}
    report = Report()
    report.tell(**measuring.describe(devices.pick()), size=list(shape.size), **changes)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, report.trying():
        measure(report, Path(folder) / "work", wish.base, shape, wish.warmup, steps, changes)
    return int(report.failed)


def measure(
    report: Report, out: Path, base: Path, shape: Shape, warmup: int, steps: int, changes: dict[str, Any]
) -> None:
    kept = range(warmup + 1, warmup + 1 + steps // 2)
    read = range(kept.stop, warmup + 1 + steps)
    length = {"train.max_train_steps": read.stop - 1, "train.checkpointing_steps": read.stop - 1}
    workspace = true_size.make(out, base, shape, {**length, **changes})
    clock = Clock()
    with parts_timed(clock), fixed_sigma(frozenset(kept[1::2])):
        fitted = fit(workspace, clock, read, warmup)
    tell(report, clock, fitted, kept, read, warmup)


def fit(workspace: Any, clock: Clock, read: range, warmup: int) -> Fitted:
    forgetful: list[Batches] = []

    def turn(step: int) -> None:
        clock.step = step + 1
        if step + 1 in read:
            forgetful[0].read.cache_clear()

    def ready(opened: Session) -> None:
        forgetful.append(opened.batches)

    return measuring.fit(workspace, {}, warmup, turn=turn, ready=ready)


@contextmanager
def parts_timed(clock: Clock) -> Iterator[None]:
    with ExitStack() as stack:
        for part, (owner, name) in {**PARTS, **ONCE}.items():
            stack.enter_context(replaced(owner, name, clock.around(part, getattr(owner, name))))
        windows = Batches.windows

        def timed(batches: Batches, *given: Any) -> Iterator[Any]:
            following = clock.around(DATA, windows(batches, *given).__next__)
            while True:
                try:
                    yield following()
                except StopIteration:
                    return

        stack.enter_context(replaced(Batches, "windows", timed))
        yield


@contextmanager
def fixed_sigma(steps: frozenset[int]) -> Iterator[None]:
    """In these steps the sigma is that of the first, which the run has prepared for in any case."""
    plain = Sigmas.draw

    def draw(sigmas: Sigmas, seed: int, step: int, slot: int, *, family_shift: float) -> float:
        return plain(sigmas, seed, 1 if step in steps else step, slot, family_shift=family_shift)

    with replaced(Sigmas, "draw", draw):
        yield


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    plain = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, plain)


def tell(report: Report, clock: Clock, fitted: Fitted, kept: range, read: range, warmup: int) -> None:
    def median(steps: range) -> float:
        return statistics.median(fitted.times[step - warmup - 1] for step in steps)

    drawn, fixed, disk = median(kept[0::2]), median(kept[1::2]), median(read)
    report.tell(what="whole step, samples in memory", step_s=drawn, steps=len(kept[0::2]))
    report.tell(what="the same with one sigma", step_s=fixed, cost=drawn / fixed - 1, steps=len(kept[1::2]))
    report.tell(what="the same from disk", step_s=disk, cost=disk / drawn - 1, steps=len(read))
    for name, steps in (("from memory", kept), ("from disk", read)):
        waited = clock.mean(DATA, steps)
        report.tell(what=f"{DATA}, {name}", step_s=waited, share=waited / median(steps))
    for part in PARTS:
        spent = clock.mean(part, range(kept.start, read.stop))
        report.tell(what=part, step_s=spent, share=spent / drawn)
    for part in ONCE:
        spent = sum(clock.spent[part].values())
        report.tell(what=part, each_s=spent, share_of_100_steps=spent / INTERVAL / drawn)


if __name__ == "__main__":
    raise SystemExit(main())
