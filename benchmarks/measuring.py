"""A fit of the product, timed from outside, step by step; and the lines and tables of what was measured.

A fit calls `update` of its progress after each step: the time from the end of one call to the beginning of the next is
that of a whole step with its data, metrics and, where one was due, checkpoint. In between others may have their turn.
"""

import contextlib
import json
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from true_size import configure

from runtime import device as devices
from runtime import files
from runtime.config.load import load_config
from runtime.device import Device
from runtime.planning import plan
from runtime.progress import Progress
from runtime.training import loop, session
from runtime.training.session import Session
from runtime.workspace import Workspace

Line = dict[str, Any]
LOOK_S = 0.02
COMPILATIONS = 4096  # of which torch keeps what it measured; 64 by default


@dataclass(slots=True)
class Memory:
    """Peaks in GiB: of the allocator, 0 on a CPU, and of the process."""

    where: Device
    peak_gib: float = 0.0
    reserved_gib: float = 0.0
    rss_gib: float = 0.0

    def look(self) -> devices.Memory:
        seen = devices.memory(self.where)
        self.peak_gib = max(self.peak_gib, seen.peak_gib)
        self.reserved_gib = max(self.reserved_gib, reserved_peak_gib(self.where))
        self.rss_gib = max(self.rss_gib, seen.rss_gib)
        return seen

    def to_json(self) -> Line:
        return {"peak_gib": self.peak_gib, "reserved_gib": self.reserved_gib, "rss_gib": self.rss_gib}


def reserved_peak_gib(where: Device) -> float:
    if not where.is_accelerator:
        return 0.0
    import torch

    return torch.accelerator.max_memory_reserved() / files.GIB


@dataclass(slots=True)
class Watched:
    memory: Memory
    together_gib: float = 0.0
    """The most at one moment of what the allocator had reserved and the process resident."""

    def look(self) -> None:
        now = self.memory.look()
        self.together_gib = max(self.together_gib, now.reserved_gib + now.rss_gib)

    def to_json(self) -> Line:
        return {**self.memory.to_json(), "together_gib": self.together_gib}


@contextlib.contextmanager
def watching(where: Device) -> Iterator[Watched]:
    """Looks every 20 ms, for the host's peak is nowhere kept; and before the product sets the device's back."""
    watched, over, plain = Watched(Memory(where)), threading.Event(), devices.reset_peak

    def look() -> None:
        while not over.wait(LOOK_S):
            watched.look()

    def reset_peak(device: Device) -> None:
        watched.look()
        plain(device)

    thread = threading.Thread(target=look, name="memory", daemon=True)
    devices.reset_peak = reset_peak
    thread.start()
    try:
        yield watched
    finally:
        over.set()
        thread.join()
        devices.reset_peak = plain
        watched.look()


class Watch(Progress):
    """`turn` is called after each step with its number; what it takes is not counted."""

    def __init__(self, where: Device, turn: Callable[[int], None]) -> None:
        super().__init__(quiet=True)
        self.where, self.turn = where, turn
        self.times: list[float] = []
        """Seconds of each step, in order."""
        self.memory = Memory(where)
        self._back = self.began = 0.0

    def start(self, label: str, total: int, done: int = 0) -> None:
        super().start(label, total, done)
        self.memory.look()
        self._back = self.began = time.perf_counter()

    def update(self, done: int, text: str = "") -> None:
        devices.synchronize(self.where)
        self.times.append(time.perf_counter() - self._back)
        self.memory.look()  # before the next step sets the peaks back
        self.turn(done)
        devices.synchronize(self.where)
        self._back = time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A fit that is over; times in seconds."""

    times: list[float]
    """Of each whole step, those of the warm-up left out."""
    step_s: list[float]
    """What metrics.jsonl says of the same steps: without data, metrics and checkpoints."""
    launch_s: float
    before_s: float
    """From the launch to the first step: the first probe, and what was compiled for it."""
    warmup_s: float
    resident_gib: float
    """Allocated after the launch."""
    load_peak_gib: float
    memory: Memory
    """Peaks from the launch on."""
    lines: list[Line]
    """metrics.jsonl, all of it."""
    document: Line
    """run.json."""

    def to_json(self) -> Line:
        return {
            **summary(self.times),
            "metrics_step_s": statistics.median(self.step_s),
            "launch_s": self.launch_s,
            "before_s": self.before_s,
            "warmup_s": self.warmup_s,
        }

    def memory_json(self) -> Line:
        resident = {"resident_gib": self.resident_gib, "load_peak_gib": self.load_peak_gib}
        return {**resident, **self.memory.to_json()}


def summary(times: Sequence[float]) -> Line:
    found = {"median_s": statistics.median(times), "min_s": min(times), "max_s": max(times)}
    return {**found, "mean_s": statistics.fmean(times), "steps": len(times)}


def fit(
    workspace: Workspace,
    changes: Mapping[str, Any],
    warmup: int,
    *,
    turn: Callable[[int], None] = lambda step: None,
    ready: Callable[[Session], None] = lambda opened: None,
) -> Fitted:
    """`finetune fit` over config.yaml with `changes`; `ready` is shown the session before its first step."""
    loaded = configure(workspace, changes)
    where = devices.pick(loaded.config.hardware.device)
    devices.free_cached(where)
    devices.reset_peak(where)
    started = time.perf_counter()
    opened = session.launch(workspace, loaded, smoke=False, resume=None)
    devices.synchronize(where)
    launched, seen = time.perf_counter(), devices.memory(where)
    ready(opened)
    devices.reset_peak(where)
    watch = Watch(where, turn)
    loop.fit(opened, watch)
    watch.memory.look()  # the last checkpoint and its probe come after the last update
    lines = files.read_json_lines(opened.run.path / "metrics.jsonl")
    return Fitted(
        times=watch.times[warmup:],
        step_s=[line["step_s"] for line in lines[warmup:]],
        launch_s=launched - started,
        before_s=watch.began - launched,
        warmup_s=sum(watch.times[:warmup]),
        resident_gib=seen.alloc_gib,
        load_peak_gib=seen.peak_gib,
        memory=watch.memory,
        lines=lines,
        document=opened.run.document,
    )


def planned_gib(workspace: Workspace) -> float:
    """The fit's peak on the device as the plan has it, for config.yaml as it is."""
    return plan.make_plan(workspace, load_config(workspace.config_path)).phases["fit"].peak_gib


def timed(where: Device, step: Callable[[], object]) -> float:
    """Seconds of a call whose work on the device is over."""
    devices.synchronize(where)
    started = time.perf_counter()
    step()
    devices.synchronize(where)
    return time.perf_counter() - started


def fresh_compiler() -> None:
    """Forgets what was compiled, and with it the models that it was compiled for, and what was counted."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch._dynamo.utils.set_compilation_metrics_limit(COMPILATIONS)
    torch._dynamo.utils.clear_compilation_metrics()


def compilations() -> Line:
    """What torch's compiler has done since `fresh_compiler`."""
    import torch._dynamo

    counters, done = torch._dynamo.utils.counters, torch._dynamo.utils.get_compilation_metrics()
    return {
        "compiled_graphs": int(counters["stats"]["unique_graphs"]),
        "recompiles": sum(one.recompile_reason is not None for one in done),
        "graph_breaks": sum(counters["graph_break"].values()),
    }


class Report:
    """JSON lines to stdout, each at once, and kept for a table; what a library prints goes to stderr meanwhile."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self._out = sys.stdout

    def tell(self, **line: Any) -> None:
        self.lines.append(line)
        print(json.dumps({n: _short(value) for n, value in line.items()}), file=self._out, flush=True)

    @contextlib.contextmanager
    def trying(self, **line: Any) -> Iterator[None]:
        """What fails inside becomes a line with the error, and the next case goes on."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            self.tell(**line, error=f"{type(error).__name__}: {str(error)[:300]}")

    @property
    def failed(self) -> bool:
        return any("error" in line for line in self.lines)


def _short(value: Any) -> Any:
    return float(f"{value:.6g}") if isinstance(value, float) else value


def describe(where: Device) -> Line:
    """The machine and the versions that figures depend on."""
    from runtime.training.record import packages

    return {"device": where.name, "type": where.type, "packages": packages(), "commit": commit()}


def commit() -> str:
    """Of the checkout, `+` where files differ from it; `unknown` without git."""
    import subprocess

    root = Path(__file__).parent
    try:
        name = subprocess.run(
            ["git", "describe", "--always", "--dirty=+"], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name.stdout.strip()


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
