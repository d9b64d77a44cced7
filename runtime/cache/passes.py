"""Two passes over what is to be encoded: prompts with the text encoder alone in memory, then pictures with the VAE.

Together they would need both encoders and the larger of their activations. What the first pass makes lies in the
cache's folder for parts until the second makes whole entries of it, so that a kill costs one batch in either.
"""

import contextlib
import os
import time
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runtime import device
from runtime.cache import encode, roundtrip
from runtime.cache.encode import Component, Encoded, Read
from runtime.cache.key import Wanted
from runtime.cache.roundtrip import Again
from runtime.progress import Progress

if TYPE_CHECKING:
    from runtime.cache.build import Job
    from runtime.families.base import Encoders

CHUNKS_AHEAD = 2
MOST_THREADS = 4  # each holds a photo at its full size


@dataclass(slots=True, kw_only=True)
class Tally:
    """What the passes did and what it took. `seconds` by stage; `peak_gib` by component, allocated on its device."""

    seconds: dict[str, float] = field(default_factory=dict)
    peak_gib: dict[str, float] = field(default_factory=dict)
    prompts: int = 0
    pictures: int = 0

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.monotonic() - started


def fill(job: "Job", todo: Sequence[Wanted], tally: Tally, progress: Progress) -> list[dict[str, Any]]:
    """Encode `todo` into entries; then, as evidence, how some of all that are in the cache differ when made again."""
    chosen = roundtrip.chosen(job)
    again = _text_pass(job, todo, chosen, tally, progress)
    return _picture_pass(job, todo, chosen, again, tally, progress)


def _text_pass(
    job: "Job", todo: Sequence[Wanted], chosen: Sequence[Wanted], tally: Tally, progress: Progress
) -> dict[str, Again]:
    """Leaves the embeddings of `todo` as parts; returns those of `chosen` made again, by key."""
    missing = [want for want in todo if not job.store.has_part(want)]
    if not missing and not chosen:
        return {}
    with _alone(job, "text_encoder", tally, progress) as encoders:
        for want, encoded in _encoded(job, encoders, missing, "prompts", tally, progress):
            tally.prompts += len(encoded.tensors)
            job.store.write_part(want, encoded)
            for note in encoded.notes:
                progress.say(f"{want.id}: {note}")
        with tally.timed("evidence"):
            return {want.key: roundtrip.ask_again(job, encoders, want) for want in chosen}


def _picture_pass(
    job: "Job",
    todo: Sequence[Wanted],
    chosen: Sequence[Wanted],
    again: Mapping[str, Again],
    tally: Tally,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Whole entries of `todo`; then `chosen` compared with what they are when made again, and decoded."""
    if not todo and not chosen:
        return []
    with _alone(job, "vae", tally, progress) as encoders:
        for want, encoded in _encoded(job, encoders, todo, "pictures", tally, progress):
            tally.pictures += len([name for name in encoded.tensors if name != "mask"])
            part = job.store.read_part(want)
            job.store.write(want, Encoded(tensors={**part.tensors, **encoded.tensors}, notes=part.notes))
            job.store.drop_part(want)
        job.store.drop_parts()
        if chosen:
            progress.say("encoding a few again, and decoding them, as evidence")
        with tally.timed("evidence"):
            return [roundtrip.compare(job, encoders, want, again[want.key]) for want in chosen]


@contextlib.contextmanager
def _alone(job: "Job", component: Component, tally: Tally, progress: Progress) -> "Iterator[Encoders]":
    """The one encoder, loaded; afterwards nothing of it is left on its device."""
    where = device.pick(getattr(job.config.cache.devices, component))
    device.reset_peak(where)
    progress.say(f"loading the {component.replace('_', ' ')}")
    with tally.timed(f"load {component}"):
        encoders = encode.load(job.family, job.model, job.config, job.made, only=component)
        device.synchronize(where)
    try:
        yield encoders
    finally:
        if where.is_accelerator:
            tally.peak_gib[component] = device.memory(where).peak_gib
        encode.unload(encoders, where)  # the caller's name for it goes with its frame


def _encoded(
    job: "Job",
    encoders: "Encoders",
    wants: Sequence[Wanted],
    what: str,
    tally: Tally,
    progress: Progress,
) -> Iterator[tuple[Wanted, Encoded]]:
    """Each of `wants` with its tensors; the time that the caller spends on one counts as writing."""
    at_once = job.config.cache.batch_size
    assert at_once != "auto"  # resolved
    # Equal sizes side by side, so that a batch of the encoder is one.
    ordered = sorted(wants, key=lambda want: str(want.document["sizes"]))
    parts = encode.loaded(encoders)
    chunks = progress.chunks(ordered, at_once, f"cache, {what}", unit="sample")
    with contextlib.closing(_read_ahead(job, ordered, parts, at_once)) as ahead:
        for chunk in chunks:
            with tally.timed("read"):
                reads = next(ahead)
            with tally.timed(f"encode {what}"):
                found = encode.encode(job.family, encoders, job.config, chunk, reads)
            with tally.timed("write"):
                yield from zip(chunk, found, strict=True)


def _read_ahead(
    job: "Job", wants: Sequence[Wanted], parts: Sequence[Component], at_once: int
) -> Generator[list[Read]]:
    """What each `at_once` of `wants` are given, opened by threads while the encoder is at those before."""
    threads = min(MOST_THREADS, os.cpu_count() or 1, CHUNKS_AHEAD * at_once)
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="cache-read")
    waiting: deque[list[Future[Read]]] = deque()
    try:
        for start in range(0, len(wants), at_once):
            chunk = wants[start : start + at_once]
            waiting.append([pool.submit(encode.read, job.config, want, parts) for want in chunk])
            if len(waiting) > CHUNKS_AHEAD:
                yield [future.result() for future in waiting.popleft()]
        while waiting:
            yield [future.result() for future in waiting.popleft()]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
