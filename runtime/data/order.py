"""Which samples go into which micro-batch, and how many steps a run has.

Pure functions of their arguments: the order of an epoch depends on the seed, the epoch and
the ids alone, so a resumed run, a prefetch and a plan all see the same one. Sorting by
hash rather than `random.shuffle` also keeps it the same in every Python version.
"""

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from math import ceil

from runtime.data.manifest import Sample

Keyed = tuple[str, Hashable]


def keys_of(samples: Iterable[Sample]) -> list[Keyed]:
    """(id, bucket). One target size for all, so only the number of controls keeps samples apart."""
    return [(sample.id, len(sample.controls)) for sample in samples]


def micro_batches(
    sample_keys: Sequence[Keyed], batch_size: int, seed: int, epoch: int, shuffle: bool
) -> list[list[str]]:
    """Ids of each micro-batch of an epoch, every id once; what doesn't fill a batch makes a short one."""
    buckets: dict[Hashable, list[str]] = {}
    for identity, bucket in sample_keys:
        buckets.setdefault(bucket, []).append(identity)
    batches = []
    for ids in buckets.values():
        ordered = sorted(ids, key=lambda identity: _rank(seed, epoch, identity)) if shuffle else ids
        batches += [ordered[start : start + batch_size] for start in range(0, len(ordered), batch_size)]
    return sorted(batches, key=lambda batch: _rank(seed, epoch, "batch/" + batch[0])) if shuffle else batches


def _rank(seed: int, epoch: int, identity: str) -> bytes:
    return hashlib.sha256(f"{seed}/{epoch}/{identity}".encode()).digest()


def count_micro_batches(sample_keys: Sequence[Keyed], batch_size: int) -> int:
    counts: dict[Hashable, int] = {}
    for _, bucket in sample_keys:
        counts[bucket] = counts.get(bucket, 0) + 1
    return sum(ceil(count / batch_size) for count in counts.values())


def planned_steps(
    *, max_train_steps: int | None, num_epochs: int | None, micro_per_epoch: int, accumulation: int
) -> int:
    """Updates of the run. Accumulation runs across the end of an epoch; only the last window may be short."""
    if max_train_steps is not None:
        return max_train_steps
    if num_epochs is None:
        raise ValueError("neither max_train_steps nor num_epochs is given")
    return ceil(num_epochs * micro_per_epoch / accumulation)


def planned_checkpoints(planned: int, interval: int) -> list[int]:
    """The steps at which a checkpoint is due: every multiple of `interval`, and the last one."""
    due = list(range(interval, planned + 1, interval))
    return due if due and due[-1] == planned else [*due, planned]
