"""Micro-batches read from the cache, each a pure function of its place in the run."""

from collections.abc import Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor

from runtime.cache.store import Store
from runtime.data import order
from runtime.families import base
from runtime.families.base import Conditioning
from runtime.training import draws

KEPT_BYTES = 256 * 2**20  # of entries read before: a small dataset is read once, a large one from disk


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """`ids` [B]; `target` normalised latents [B, C, h, w] fp32 on the CPU; `dropped`: ids without caption."""

    ids: tuple[str, ...]
    epoch: int
    target: Tensor
    conditioning: Conditioning
    dropped: tuple[str, ...]
    bucket: str


class Batches:
    """The training samples of a cache, in the order of (seed, epoch)."""

    def __init__(
        self,
        store: Store,
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        caption_dropout: float,
        epochs: int | None = None,
    ) -> None:
        self.store, self.epochs = store, epochs
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self.caption_dropout = caption_dropout
        entries = store.manifest()["entries"]
        self.folders = {(entry["split"], entry["id"]): entry["folder"] for entry in entries}
        self._train = [
            (entry["id"], shapes_of(store, entry["folder"])) for entry in entries if entry["split"] == "train"
        ]
        largest = max((_size(entry) for entry in entries), default=1)
        self.read = lru_cache(maxsize=KEPT_BYTES // largest)(store.read)
        self.epoch = lru_cache(maxsize=2)(self._epoch)

    def ids(self, split: str) -> list[str]:
        return [name for kind, name in self.folders if kind == split]

    def _epoch(self, epoch: int) -> list[list[str]]:
        return order.micro_batches(
            self._train, batch_size=self.batch_size, seed=self.seed, epoch=epoch, shuffle=self.shuffle
        )

    @property
    def per_epoch(self) -> int:
        return len(self.epoch(0))

    def at(self, micro: int) -> MicroBatch:
        """The `micro`-th micro-batch of the run, counted from 0 across epochs."""
        epoch, place = divmod(micro, self.per_epoch)
        ids = self.epoch(epoch)[place]
        dropped = tuple(name for name in ids if self._drops(epoch, name))
        tensors = [self.read(self.folders["train", name]) for name in ids]
        items = [
            base.conditioning_of(t, "empty_embeds" if name in dropped else "prompt_embeds")
            for name, t in zip(ids, tensors, strict=True)
        ]
        target = torch.stack([t["target"].float() for t in tensors])
        return MicroBatch(
            ids=tuple(ids),
            epoch=epoch,
            target=target,
            conditioning=base.collate(items),
            dropped=dropped,
            bucket=bucket_name(shapes_of(self.store, self.folders["train", ids[0]])),
        )

    def _drops(self, epoch: int, name: str) -> bool:
        rate = self.caption_dropout
        return rate > 0 and draws.uniform("caption", self.seed, epoch, name) < rate

    def windows(self, first_step: int, steps: int, accumulation: int) -> Iterator[list[MicroBatch]]:
        """The micro-batches of each step from `first_step` on, the next one read ahead in a thread."""
        with ThreadPoolExecutor(max_workers=1) as pool:
            ahead = pool.submit(self._window, first_step, accumulation)
            for step in range(first_step, steps + 1):
                window = ahead.result()
                if step < steps:
                    ahead = pool.submit(self._window, step + 1, accumulation)
                yield window

    def _window(self, step: int, accumulation: int) -> list[MicroBatch]:
        """Windows cross epochs; where the run's length is a number of epochs, its last one may be short."""
        first = (step - 1) * accumulation
        end = first + accumulation
        if self.epochs is not None:
            end = min(end, self.epochs * self.per_epoch)
        return [self.at(micro) for micro in range(first, end)]


@cache
def shapes_of(store: Store, folder: str) -> Hashable:
    """Latent shapes of an entry, target first: samples of one micro-batch agree in it."""
    tensors = store.entry(folder)["tensors"]
    names = ["target", *sorted(name for name in tensors if name.startswith("control_"))]
    return tuple(tuple(tensors[name]["shape"]) for name in names if name in tensors)


def _size(entry: dict[str, Any]) -> int:
    return max(1, sum(int(recorded["size"]) for recorded in entry["files"].values()))


def bucket_name(shapes: Hashable) -> str:
    """`64x64+64x64`: height and width in pixels of target and controls."""
    assert isinstance(shapes, tuple)
    return "+".join(f"{shape[-2] * 8}x{shape[-1] * 8}" for shape in shapes)
