"""What a step costs when blocks of the frozen denoiser live in host memory: time, both memories, copies hidden.

    python benchmarks/offload.py [--layers 60] [--counts 0 10 30 60] [--quantize none nf4] [--sizes 384x672 1024x1024]

Blocks have the published shape and random weights, a rank-16 adapter on the attention of both streams, one control of
the target's size, batch 1, each block recomputed, AdamW. `--tiny` takes small blocks, on a machine without
accelerator too, where the figures say only that the script works. One JSON object a line:

    step_s               median of a whole step
    peak_gib             allocated on the device, the largest of the steps; reserved_gib likewise
    host_gib             of the blocks in host memory; rss_gib of the whole process
    copied_gib           to the device, each step
    h2d_gib_s            GiB a second of such a copy by itself, in this run
    hidden               share of the copies' time by which a step did not become longer
    same_loss, same_gradients   bit for bit those without streaming (kernels of attention may differ by themselves)
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from adapter_dtype import TINY, make, question
from torch import Tensor, nn

from runtime import device as devices
from runtime.config.model import Lora
from runtime.device import GIB, Device
from runtime.memory import offload
from runtime.memory.offload import Streamed
from runtime.training import trainables

WARM_UP = 3
RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument(
        "--counts", type=int, nargs="+", default=(0, 10, 30, 60), help="the first is compared with"
    )
    parser.add_argument("--quantize", choices=("none", "nf4"), nargs="+", default=("none", "nf4"))
    parser.add_argument("--sizes", nargs="+", default=("384x672", "1024x1024"))
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--tiny", action="store_true")
    wish = parser.parse_args()
    where = devices.pick()
    if wish.tiny:
        wish.layers, wish.counts, wish.sizes, wish.steps = 3, (0, 3), ("32x32",), 1
    for quantized in wish.quantize:
        denoiser = make(where, wish.layers, quantized, TINY if wish.tiny else {})
        denoiser.enable_gradient_checkpointing()
        adapter = trainables.add_adapter(denoiser, lora(), seed=1)
        fill(adapter.named_parameters())
        for size in wish.sizes:
            height, width = map(int, size.split("x"))
            asked = question(where, denoiser, (height, width))
            setup = {"device": where.name, "layers": wish.layers, "quantize": quantized, "size": size}
            for line in compare(where, denoiser, adapter.parameters(), asked, wish.counts, wish.steps):
                print(json.dumps({**setup, **line}), flush=True)
        del denoiser, adapter, asked
        devices.free_cached(where)


def lora() -> Lora:
    return Lora(r=RANK, lora_alpha=RANK, target_modules="attention")


def fill(named: Sequence[tuple[str, nn.Parameter]]) -> None:
    """lora_B other than zero, or lora_A had no gradient to compare."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in named:
        if "lora_B" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    loss: Tensor
    gradients: list[Tensor]
    step_s: float
    peak_gib: float
    reserved_gib: float
    copied_gib: float


def compare(
    where: Device,
    denoiser: Any,
    trained: list[nn.Parameter],
    asked: dict[str, Any],
    counts: Sequence[int],
    steps: int,
) -> Iterator[dict[str, Any]]:
    """A line for each count of streamed blocks."""
    first: Measured | None = None
    for count in counts:
        streamed = offload.stream(denoiser.transformer_blocks, count, where) if count else None
        devices.free_cached(where)  # of the count before, and where the blocks came from
        found = measure(where, denoiser, trained, asked, streamed, steps)
        first = first or found
        line = {"streamed": count, **told(found)}
        line["same_loss"] = torch.equal(found.loss, first.loss)
        line["same_gradients"] = all(map(torch.equal, found.gradients, first.gradients))
        if streamed is not None:
            speed = bandwidth(streamed, where)
            copying = found.copied_gib / speed
            line |= {
                "host_gib": streamed.host_bytes / GIB,
                "planned_gib": offload.held(streamed.blocks[0].buffer.numel(), count).device / GIB,
                "h2d_gib_s": speed,
                "copying_s": copying,
                "hidden": 1 - (found.step_s - first.step_s) / copying,
                "note": streamed.note,
            }
            streamed.close()
        del streamed
        yield {**line, "rss_gib": devices.memory(where).rss_gib}


def told(found: Measured) -> dict[str, float]:
    names = ("step_s", "peak_gib", "reserved_gib", "copied_gib")
    return {name: getattr(found, name) for name in names}


def measure(
    where: Device,
    denoiser: Any,
    trained: list[nn.Parameter],
    asked: dict[str, Any],
    streamed: Streamed | None,
    steps: int,
) -> Measured:
    """Steps from the same weights, which are as they were afterwards."""
    kept = [parameter.detach().clone() for parameter in trained]
    optimizer = torch.optim.AdamW(trained, lr=1e-6)
    times: list[float] = []
    copied = 0
    devices.reset_peak(where)
    for step in range(WARM_UP + steps):
        before = streamed.copied_bytes if streamed else 0
        devices.synchronize(where)
        started = time.perf_counter()
        loss = backward(denoiser, asked)
        if step == 0:
            first = loss
            gradients = [p.grad.clone() for p in trained if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        devices.synchronize(where)
        times.append(time.perf_counter() - started)
        copied = (streamed.copied_bytes if streamed else 0) - before
    with torch.no_grad():
        for parameter, value in zip(trained, kept, strict=True):
            parameter.copy_(value)
    return Measured(
        loss=first,
        gradients=gradients,
        step_s=sorted(times[WARM_UP:])[steps // 2],
        peak_gib=devices.memory(where).peak_gib,
        reserved_gib=torch.accelerator.max_memory_reserved() / GIB if where.is_accelerator else 0.0,
        copied_gib=copied / GIB,
    )


def backward(denoiser: Any, asked: dict[str, Any]) -> Tensor:
    (velocity,) = denoiser(**asked)
    loss: Tensor = velocity.float().square().mean()
    torch.autograd.backward(loss)
    return loss.detach()


def bandwidth(streamed: Streamed, where: Device, times: int = 5) -> float:
    """GiB a second of copying blocks with nothing beside, the fastest of some."""
    streamed.idle()
    seconds = []
    for index in range(times):
        block = streamed.blocks[index % len(streamed.blocks)]
        devices.synchronize(where)
        started = time.perf_counter()
        streamed.feed.finish(streamed.feed.start(block.buffer))
        devices.synchronize(where)
        seconds.append(time.perf_counter() - started)
    return block.buffer.numel() / GIB / min(seconds)


if __name__ == "__main__":
    main()
