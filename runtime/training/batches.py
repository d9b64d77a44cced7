"""Micro-batches read from the cache, each a pure function of its place in the run."""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from runtime.cache.store import Store
from runtime.data.order import Order, Slot
from runtime.families import base
from runtime.families.base import Conditioning
from runtime.training import draws

AHEAD, AHEAD_BYTES = (
    16,
    256 * 2**20,
)  # micro-batches read before they are asked for: a disk's pause of seconds passes
KEPT_BYTES = 256 * 2**20  # of entries read before: a small dataset is read once, a large one from disk


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """`ids` [B]; `target` normalised latents [B, C, h, w] fp32 on the CPU; `mask` [B, 1, h, w] in 0..1 or None.

    `dropped`: ids without caption; `regularisation`: these hold the base's behaviour.
    """

    ids: tuple[str, ...]
    epoch: int
    target: Tensor
    conditioning: Conditioning
    mask: Tensor | None
    regularisation: bool
    dropped: tuple[str, ...]
    bucket: str


class Batches:
    """The training samples of a cache, in the order of (seed, epoch)."""

    def __init__(
        self,
        store: Store,
        ordered: Order,
        *,
        caption_dropout: float,
        workers: int = 1,
        epochs: int | None = None,
    ) -> None:
        self.store, self.order, self.epochs = store, ordered, epochs
        self.caption_dropout, self.workers = caption_dropout, workers
        entries = store.manifest()["entries"]
        self.folders = {(entry["split"], entry["id"]): entry["folder"] for entry in entries}
        self._regularisation = {item.id for item in ordered.items if item.regularisation}
        largest = max((_size(entry) for entry in entries), default=1)
        fits = AHEAD_BYTES // (largest * max(share.batch_size for share in ordered.shares.values()))
        self.ahead = max(workers, min(AHEAD, fits))
        """Micro-batches; beyond those of the step that is asked for."""
        self.read = lru_cache(maxsize=KEPT_BYTES // largest)(store.read)

    def ids(self, split: str) -> list[str]:
        return [name for kind, name in self.folders if kind == split]

    def learned(self) -> list[str]:
        """Training samples that are to be learned, those left out that hold the base's behaviour."""
        return [name for name in self.ids("train") if name not in self._regularisation]

    def at(self, micro: int) -> MicroBatch:
        """The `micro`-th micro-batch of the run, counted from 0 across epochs."""
        return self._read(*self._place(micro))

    def _place(self, micro: int) -> tuple[int, tuple[Slot, ...]]:
        epoch, place = self.order.locate(micro)
        return epoch, self.order.epoch(epoch)[place]

    def _read(self, epoch: int, slots: Sequence[Slot]) -> MicroBatch:
        tensors = [self.read(self.folders["train", slot.id]) for slot in slots]
        embeds = [self._embeds(epoch, slot, held) for slot, held in zip(slots, tensors, strict=True)]
        items = [base.conditioning_of(held, name) for held, name in zip(tensors, embeds, strict=True)]
        target = torch.stack([held["target"].float() for held in tensors])
        masked = all("mask" in held for held in tensors)
        return MicroBatch(
            ids=tuple(slot.id for slot in slots),
            epoch=epoch,
            target=target,
            conditioning=base.collate(items),
            mask=torch.stack([held["mask"][None] for held in tensors]) if masked else None,
            regularisation=slots[0].id in self._regularisation,
            dropped=tuple(
                slot.id for slot, name in zip(slots, embeds, strict=True) if name == "empty_embeds"
            ),
            bucket=bucket_name(tensors[0]),
        )

    def _embeds(self, epoch: int, slot: Slot, held: dict[str, Tensor]) -> str:
        """Which embedding this sight of a sample trains on: none, or one of its captions."""
        where = (self.order.seed, epoch, slot.time, slot.id)
        if self.caption_dropout > 0 and draws.uniform("caption", *where) < self.caption_dropout:
            return "empty_embeds"
        count = 1 + sum(name.startswith("prompt_embeds_") for name in held)
        chosen = int(draws.uniform("pick", *where) * count) if count > 1 else 0
        return f"prompt_embeds_{chosen}" if chosen else "prompt_embeds"

    def ids_of(self, step: int, accumulation: int) -> Iterator[tuple[str, ...]]:
        """The samples of each micro-batch of a step; nothing is read."""
        for _, slots in self._places(step, accumulation):
            yield tuple(slot.id for slot in slots)

    def windows(self, first_step: int, steps: int, accumulation: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step from `first_step` on; `workers` threads read `ahead` of them before."""
        # Here and not in the threads: an order remembers the epochs that it was asked for.
        places = (self._places(step, accumulation) for step in range(first_step, steps + 1))
        if not self.workers:
            yield from map(self._window, places)
            return
        pool = ThreadPoolExecutor(max_workers=self.workers)
        try:
            waiting: deque[list[Future[MicroBatch]]] = deque()
            for some in places:
                waiting.append([pool.submit(self._read, *place) for place in some])
                if sum(map(len, waiting)) - len(waiting[0]) >= self.ahead:
                    yield [reading.result() for reading in waiting.popleft()]
            while waiting:
                yield [reading.result() for reading in waiting.popleft()]
        finally:
            pool.shutdown(cancel_futures=True)

    def _window(self, places: Sequence[tuple[int, tuple[Slot, ...]]]) -> list[MicroBatch]:
        return [self._read(epoch, slots) for epoch, slots in places]

    def _places(self, step: int, accumulation: int) -> list[tuple[int, tuple[Slot, ...]]]:
        """Windows cross epochs; where the run's length is a number of epochs, its last one may be short."""
        first = (step - 1) * accumulation
        end = first + accumulation
        if self.epochs is not None:
            end = min(end, self.order.count(self.epochs))
        return [self._place(micro) for micro in range(first, end)]


def _size(entry: dict[str, Any]) -> int:
    return max(1, sum(int(recorded["size"]) for recorded in entry["files"].values()))


def bucket_name(held: dict[str, Tensor]) -> str:
    """`64x64+64x64`: height and width in pixels of target and controls."""
    controls = sorted((name for name in held if name.startswith("control_")), key=lambda name: int(name[8:]))
    return "+".join(
        f"{held[name].shape[-2] * 8}x{held[name].shape[-1] * 8}" for name in ("target", *controls)
    )
