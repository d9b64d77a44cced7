"""Where the time of a training step goes: the accelerator's kernels of one step of `finetune fit`, by kind.

    python benchmarks/profile_step.py BASE [--size 1024 1024] [--quantize nf4] [--set KEY=VALUE]
    python benchmarks/profile_step.py --tiny

The step is profiled from the end of one update to the beginning of the next, data and metrics included. `idle` is the
share of a step, as it takes without the profiler, in which no kernel runs: what launching and the CPU's own work cost.
On a CPU the operators' own times are told instead. A table in markdown, the largest kernels, and one JSON object.
"""

import argparse
import os
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import measuring
import true_size
from measuring import Report
from true_size import Shape

from runtime import device as devices
from runtime.demo.series import BASE
from runtime.device import Device

OTHER = "elementwise, norms, other"
KINDS: dict[str, tuple[str, ...]] = {
    "attention": ("flash", "fmha", "sdpa", "dot_product", "attention"),
    "NF4 dequantize": ("quantize",),
    "optimizer, clipping": ("adam", "multi_tensor_apply", "_foreach", "optimizer"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "cublas", "splitk", "triton_tem", "mm", "matmul"),
    "copies": ("memcpy", "memset", "copy", "catarray", "aten::cat"),
}
"""In this order, by what a kernel's or an operator's name holds."""
FUSED = "triton_"
"""Of a fused kernel the name lists the operators that it began from, so that alone says what it is."""
SHOWN = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    name: str
    start_s: float
    end_s: float


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path, nargs="?", default=BASE)
    parser.add_argument("--size", type=int, nargs=2, default=(384, 672), help="height and width, pixels")
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    parser.add_argument("--tiny", action="store_true", help="the embedded base, on whatever device is there")
    wish = parser.parse_args()
    height, width = wish.size
    shape = true_size.TINY if wish.tiny else Shape(size=(height, width))
    changes = {"model.quantize": wish.quantize, **true_size.read_changes(wish.set)}
    report, text = Report(), ""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, report.trying():
        warmup = 1 if wish.tiny else wish.warmup
        kernels, step_s = profiled(Path(folder) / "work", wish.base, shape, changes, warmup)
        found = split(kernels, step_s)
        report.tell(**measuring.describe(devices.pick()), size=list(shape.size), **changes, **found)
        text = rendered(found, kernels)
    print(text)
    return int(report.failed)


def profiled(
    out: Path, base: Path, shape: Shape, changes: dict[str, Any], warmup: int, steps: int = 4
) -> tuple[list[Kernel], float]:
    """Kernels of the last step, and the median of those before it, which were not profiled."""
    last = warmup + steps
    length = {"train.max_train_steps": last, "train.checkpointing_steps": last}
    workspace = true_size.make(out, base, shape, {**length, **changes})
    where = devices.pick()
    # Else the profiler may leave and enter the driver between recordings, of which it then sees nothing.
    os.environ.update(TEARDOWN_CUPTI="0", DISABLE_CUPTI_LAZY_REINIT="1")
    running: list[Any] = []

    def turn(step: int) -> None:
        if step == 1:  # starts what the profiler needs of the driver
            with profiler(where):
                pass
        elif step == last - 1:
            running.append(profiler(where))
            running[0].__enter__()
        elif step == last:
            running[0].__exit__(None, None, None)

    fitted = measuring.fit(workspace, {}, warmup, turn=turn)
    return kernels_of(running[0], where), statistics.median(fitted.times[:-1])


def profiler(where: Device) -> Any:
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[getattr(ProfilerActivity, where.type.upper())])


def kernels_of(taken: Any, where: Device) -> list[Kernel]:
    """On an accelerator its kernels and copies; on a CPU each operator, with the time that is its own."""
    found = []
    for event in taken.events():
        if event.device_type.name != where.type.upper() or getattr(event, "is_user_annotation", False):
            continue
        start, end = event.time_range.start / 1e6, event.time_range.end / 1e6
        if not where.is_accelerator:
            end = start + event.self_cpu_time_total / 1e6
        found.append(Kernel(name=event.name, start_s=start, end_s=end))
    return found


def kind_of(name: str) -> str:
    lowered = name.lower()
    if lowered.startswith(FUSED) and not lowered.startswith("triton_tem"):
        return OTHER
    return next((kind for kind, words in KINDS.items() if any(word in lowered for word in words)), OTHER)


def split(kernels: Sequence[Kernel], step_s: float) -> dict[str, Any]:
    """Seconds by kind, the number of kernels, and how long none ran in a step of `step_s`."""
    seconds: dict[str, float] = dict.fromkeys([*KINDS, OTHER], 0.0)
    counts: Counter[str] = Counter()
    for kernel in kernels:
        kind = kind_of(kernel.name)
        seconds[kind] += kernel.end_s - kernel.start_s
        counts[kind] += 1
    busy = covered((kernel.start_s, kernel.end_s) for kernel in kernels)
    return {
        "step_s": step_s,
        "busy_s": busy,
        "idle": max(0.0, 1 - busy / step_s),
        "kernels": len(kernels),
        "seconds": seconds,
        "counts": dict(counts),
    }


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """Length of the union: kernels of two streams may run at once."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def rendered(found: dict[str, Any], kernels: Sequence[Kernel]) -> str:
    step = found["step_s"]
    rows = [
        [kind, f"{1e3 * seconds:.1f}", f"{seconds / step:.1%}", str(found["counts"].get(kind, 0))]
        for kind, seconds in found["seconds"].items()
    ]
    idle = [["no kernel", f"{1e3 * found['idle'] * step:.1f}", f"{found['idle']:.1%}", ""]]
    totals = [["step", f"{1e3 * step:.1f}", "100.0%", str(found["kernels"])]]
    kinds = measuring.table(["kind", "ms", "of the step", "kernels"], [*rows, *idle, *totals])
    return f"{kinds}\n\n{measuring.table(['largest', 'ms', 'times'], largest(kernels))}"


def largest(kernels: Sequence[Kernel]) -> list[list[str]]:
    spent: defaultdict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        spent[kernel.name].append(kernel.end_s - kernel.start_s)
    first = sorted(spent.items(), key=lambda item: -sum(item[1]))[:SHOWN]
    return [
        [name[:80].replace("|", "/"), f"{1e3 * sum(times):.1f}", str(len(times))] for name, times in first
    ]


if __name__ == "__main__":
    raise SystemExit(main())
