"""Which samples go into which micro-batch, and how many steps a run has.

Pure functions of their arguments: the order of an epoch depends on the seed, the epoch and
the ids alone, so a resumed run, a prefetch and a plan all see the same one. Sorting by
hash rather than `random.shuffle` also keeps it the same in every Python version.

An epoch sees each sample `views` times, spread evenly over it. Where sources have weights, the epoch
keeps its length and is shared out among them; each then walks through its samples in rounds of its own,
so that none is seen twice before all of its source were seen once.
"""

import hashlib
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, floor
from typing import NamedTuple

from runtime.config.model import Config
from runtime.data import buckets
from runtime.data.sample import Sample, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A sample to train on. Micro-batches hold one `bucket` only, and what is learned apart from what is held."""

    id: str
    source: str
    bucket: Hashable
    regularisation: bool = False


class Slot(NamedTuple):
    """A place in a micro-batch: the sample's id, and how often the epoch asked for it before."""

    id: str
    time: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What an epoch takes of a source."""

    views: int = 1
    weight: float | None = None
    batch_size: int = 1


@dataclass(frozen=True, slots=True)
class _View:
    """One sight of a sample in an epoch; `place` in 0..1 says when."""

    item: Item
    time: int
    place: float


@dataclass(slots=True, kw_only=True)
class Order:
    """The micro-batches of each epoch."""

    items: Sequence[Item]
    shares: Mapping[str, Share]
    seed: int
    shuffle: bool
    _epochs: dict[int, list[tuple[Slot, ...]]] = field(default_factory=dict)
    _ends: list[int] = field(default_factory=lambda: [0])
    """Micro-batches before each epoch, as far as asked for."""

    def epoch(self, number: int) -> list[tuple[Slot, ...]]:
        """Each micro-batch; what doesn't fill a batch makes a short one, nothing is left out."""
        if number not in self._epochs:
            if len(self._epochs) > 2:
                self._epochs.clear()
            self._epochs[number] = self._batches(number)
        return self._epochs[number]

    def locate(self, micro: int) -> tuple[int, int]:
        """Epoch and place of the `micro`-th micro-batch of a run, counted from 0."""
        epoch = 0
        while self.count(epoch + 1) <= micro:
            epoch += 1 if self._weighted else max(1, micro // len(self.epoch(0)) - epoch)
        return epoch, micro - self.count(epoch)

    def count(self, epochs: int) -> int:
        """Micro-batches in the first `epochs` epochs."""
        if not self._weighted:
            return epochs * len(self.epoch(0))
        while len(self._ends) <= epochs:
            self._ends.append(self._ends[-1] + len(self.epoch(len(self._ends) - 1)))
        return self._ends[epochs]

    @property
    def _weighted(self) -> bool:
        """Only then do epochs differ in how many micro-batches they have."""
        return any(share.weight is not None for share in self.shares.values())

    def _batches(self, epoch: int) -> list[tuple[Slot, ...]]:
        held: dict[Hashable, list[_View]] = {}
        for view in self._views(epoch):
            size = self.shares[view.item.source].batch_size
            held.setdefault((size, view.item.bucket, view.item.regularisation), []).append(view)
        batches = [
            views[start : start + self.shares[views[0].item.source].batch_size]
            for views in held.values()
            for start in range(0, len(views), self.shares[views[0].item.source].batch_size)
        ]
        if self.shuffle:
            # By their first view: of one bucket, batches of a x b samples are a batches of b, in this order.
            batches.sort(key=lambda batch: (batch[0].place, batch[0].item.id))
        return [tuple(Slot(view.item.id, view.time) for view in batch) for batch in batches]

    def _views(self, epoch: int) -> list[_View]:
        by_source: dict[str, list[Item]] = {}
        for item in self.items:
            by_source.setdefault(item.source, []).append(item)
        counts = _counts({name: len(items) for name, items in by_source.items()}, self.shares)
        views = [
            view
            for name, items in by_source.items()
            for view in (
                self._spread(items, self.shares[name].views, epoch)
                if self.shares[name].weight is None
                else self._rounds(items, counts[name], epoch)
            )
        ]
        return sorted(views, key=lambda view: (view.place, view.item.id)) if self.shuffle else views

    def _spread(self, items: Sequence[Item], times: int, epoch: int) -> list[_View]:
        return [
            _View(item, time, (time + _rank(self.seed, epoch, time, item.id)) / times)
            for time in range(times)
            for item in items
        ]

    def _rounds(self, items: Sequence[Item], count: int, epoch: int) -> list[_View]:
        first = epoch * count
        turns = range(first // len(items), (first + count - 1) // len(items) + 1)
        walk = [(turn, item) for turn in turns for item in self._round(items, turn)]
        start = first - turns.start * len(items)
        return [
            _View(item, turn - turns.start, (index + _rank(self.seed, epoch, index, item.id)) / count)
            for index, (turn, item) in enumerate(walk[start : start + count])
        ]

    def _round(self, items: Sequence[Item], turn: int) -> Sequence[Item]:
        if not self.shuffle:
            return items
        return sorted(items, key=lambda item: _rank(self.seed, f"round {turn}", 0, item.id))


def _counts(sizes: Mapping[str, int], shares: Mapping[str, Share]) -> dict[str, int]:
    """Views of each source in an epoch: its own, or its weight's share of all, by largest remainder."""
    own = {name: size * shares[name].views for name, size in sizes.items()}
    weights = {name: share.weight for name in sizes if (share := shares[name]).weight is not None}
    if not weights:
        return own
    total = sum(own[name] for name in weights)
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items() if weight}
    counts = {name: floor(value) for name, value in exact.items()}
    by_rest = sorted(exact, key=lambda name: (counts[name] - exact[name], name))
    for name in by_rest[: total - sum(counts.values())]:
        counts[name] += 1
    return {**own, **counts}


def _rank(seed: int, epoch: int | str, time: int, identity: str) -> float:
    """A number in 0..1 that looks random and is always the same."""
    digest = hashlib.sha256(f"{seed}/{epoch}/{time}/{identity}".encode()).digest()
    return int.from_bytes(digest[:6], "big") / 2**48


def order_of(config: Config, samples: Iterable[Sample], sources: Mapping[str, Settings], step: int) -> Order:
    """The order in which `config` trains; `step`: the family's size multiple, `sources`: settings by name."""
    sizings = {name: buckets.sizing(config.data.processor, kept, step) for name, kept in sources.items()}
    return Order(
        items=[
            Item(
                id=sample.id,
                source=sample.source,
                bucket=bucket_of(sample, sizings[sample.source]),
                regularisation=sources[sample.source].regularisation,
            )
            for sample in samples
            if sample.split == "train"
        ],
        shares={
            name: Share(
                views=kept.views,
                weight=kept.weight,
                batch_size=kept.batch_size or config.data.batch_size,
            )
            for name, kept in sources.items()
        },
        seed=config.train.seed,
        shuffle=config.data.shuffle,
    )


def bucket_of(sample: Sample, sizing: buckets.Sizing) -> tuple[tuple[int, int], ...]:
    """Final sizes of target and controls, and whether there is a mask."""
    placed = places(sample, sizing)
    masked = ((0, 0),) if placed.mask is not None else ()
    return (placed.size, *(control.size for control in placed.controls), *masked)


def places(sample: Sample, sizing: buckets.Sizing) -> buckets.Places:
    """Where each picture of a sample is cut, and to which size it is brought."""
    return buckets.place(
        sizing,
        target=(sample.target.height, sample.target.width),
        controls=[(control.height, control.width) for control in sample.controls],
        mask=(sample.mask.height, sample.mask.width) if sample.mask is not None else None,
    )


def planned_steps(
    order: Order, *, max_train_steps: int | None, num_epochs: int | None, accumulation: int
) -> int:
    """Updates of the run. Accumulation runs across the end of an epoch; only the last window may be short."""
    if max_train_steps is not None:
        return max_train_steps
    if num_epochs is None:
        raise ValueError("neither max_train_steps nor num_epochs is given")
    return ceil(order.count(num_epochs) / accumulation)


def planned_checkpoints(planned: int, interval: int) -> list[int]:
    """The steps at which a checkpoint is due: every multiple of `interval`, and the last one."""
    due = list(range(interval, planned + 1, interval))
    return due if due and due[-1] == planned else [*due, planned]
