"""One shard to NF4: reading, quantizing and writing overlap, and few layers are in memory at a time.

One tensor is quantized by all threads of a pool, the next one is read, the one before is written. What stays plain
never becomes a tensor: it is copied in pieces. So beside the libraries there are at most two layers of the source,
one packed, and the pieces that the threads have in hand.
"""

import math
from collections.abc import Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from runtime import shards
from runtime.errors import UserError
from runtime.quantize import nf4
from runtime.quantize.crew import one_ahead
from runtime.quantize.meter import Meter
from runtime.quantize.nf4 import Rule
from runtime.shards import Entry, Writer

Header = Mapping[str, Entry]


def planned(rule: Rule, header: Header) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Every tensor of the shard to be, the late texts left out: name to (dtype, shape)."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, entry in header.items():
        packed = rule.takes(name, entry.dtype, entry.shape)
        found |= nf4.planned(name, entry.shape) if packed else {name: (entry.dtype, entry.shape)}
    return found


def pack(
    rule: Rule, source: Path, header: Header, target: Path, device: str, pool: Executor, meter: Meter
) -> dict[str, float]:
    """Write `source` as NF4 to `target`, and return the relative error of each linear.

    The bytes of `target` don't depend on the number of threads. Raises UserError for a weight with NaN in it.
    """
    names = sorted(header, key=lambda name: header[name].start)  # reading goes on from where it ended
    quantized = {name for name, it in header.items() if rule.takes(name, it.dtype, it.shape)}
    weights = one_ahead(
        [name for name in names if name in quantized], lambda name: shards.read_tensor(source, header[name])
    )
    errors: dict[str, float] = {}
    writer = Writer(target, planned(rule, header), [f"{name}.{nf4.STATE}" for name in quantized])
    try:
        with ThreadPoolExecutor(1, thread_name_prefix="writer") as writing:
            pending: Future[None] | None = None
            for name in names:
                if name in quantized:
                    parts, error = _quantized(name, next(weights), device, pool)
                    errors[nf4.module_of(name)] = _finite(source, name, error)
                    pending = _after(pending, writing.submit, _put, writer, name, parts)
                else:
                    pending = _after(pending, writing.submit, writer.copy, name, source, header[name])
                meter.advance(header[name].size, nf4.module_of(name))
            if pending is not None:
                pending.result()
        writer.close()
    finally:
        weights.close()
        writer.abandon()
    return errors


def _after(pending: "Future[None] | None", submit: object, *work: object) -> "Future[None]":
    """Hand `work` over once what was handed over before is done, so that no queue of weights builds up."""
    if pending is not None:
        pending.result()
    return submit(*work)  # type: ignore[operator,no-any-return]


def _quantized(name: str, weight: Tensor, device: str, pool: Executor) -> tuple[dict[str, Tensor], float]:
    packed, state = nf4.quantize(weight, device, pool)
    error = nf4.relative_error(weight, packed, state, pool)
    parts = {f"{name}.{suffix}": tensor.cpu() for suffix, tensor in state.as_dict(packed=True).items()}
    return {name: packed.cpu(), **parts}, error


def _put(writer: Writer, name: str, parts: Mapping[str, Tensor]) -> None:
    late = f"{name}.{nf4.STATE}"
    for part, tensor in parts.items():
        if part == late:
            writer.put_late(part, bytes(tensor.tolist()))
        else:
            writer.put(part, tensor)


def _finite(source: Path, name: str, error: float) -> float:
    if not math.isfinite(error):
        raise UserError(
            f"{source.name} holds numbers that are not finite, in {name}",
            remedy=f'{shards.FETCH}; or leave it plain: finetune quantize --keep "{nf4.module_of(name)}"',
        )
    return error
