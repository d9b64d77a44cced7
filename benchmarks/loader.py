"""Whether reading the cache ever holds a step up: windows of a fit from disk, from the page cache and from memory.

    python benchmarks/loader.py [--samples 2000] [--seconds 0.2 0.05 0] [--steps 200] [--out DIR]

Writes a cache of that many entries as the product writes them, each with numbers of its own (sharing payloads would
share their pages), in the shapes of 384x672 with one control and a text of 400 tokens: 3.4 MB in bf16, 6.8 GB for 2,000
entries. Then takes windows of `Batches` as a fit does, and after each keeps one core busy for so many seconds with
small operations, as launching kernels does; 0 seconds is how fast reading alone is.

    disk       every file's pages are dropped before (os.posix_fadvise; needs a file system that heeds it)
    pages      every file was read before
    memory     entries are tensors in a dict; nothing is read

Times of the three are taken turn about, `--repeats` times, and the median is told. One JSON object a line:
`step_s` a whole step, `waited_s` of it in which the loop had no window, `worst_s` the longest such wait, `over_memory`
how much longer a step took than from memory. `--tiny` is for CI: small entries, and figures that say nothing.
"""

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime import device as devices
from runtime import files
from runtime.cache.encode import Encoded
from runtime.cache.key import Wanted
from runtime.cache.store import TENSORS, Store
from runtime.data.order import Item, Order, Share
from runtime.index import Index
from runtime.training.batches import Batches

LATENTS, TEXT = (16, 48, 84), (400, 3584)
SMALL_LATENTS, SMALL_TEXT = (16, 4, 4), (8, 64)
SOURCES = ("disk", "pages", "memory")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument(
        "--seconds", type=float, nargs="+", default=(0.2, 0.05, 0.0), help="of a step's own work"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="+", default=(1,), help="data.num_workers")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of what is cached")
    parser.add_argument("--out", type=Path, help="for the cache, which stays; without, a temporary folder")
    parser.add_argument("--tiny", action="store_true")
    wish = parser.parse_args()
    if wish.tiny:
        wish.samples, wish.steps, wish.repeats, wish.seconds = 12, 8, 1, (0.01, 0.0)
    with tempfile.TemporaryDirectory() as temporary:
        store = make(wish.out or Path(temporary), wish.samples, devices.dtype_of(wish.dtype), tiny=wish.tiny)
        size = sum(path.stat().st_size for path in store.root.glob(f"*/{TENSORS}"))
        setup = {"samples": wish.samples, "dtype": wish.dtype, "entry_mib": size / wish.samples / files.MIB}
        for workers in wish.workers:
            for seconds in wish.seconds:
                for line in compare(store, workers, seconds, wish.steps, wish.repeats):
                    print(json.dumps({**setup, "workers": workers, **line}), flush=True)


def make(folder: Path, count: int, dtype: torch.dtype, *, tiny: bool) -> Store:
    """A finished cache of `count` entries; one that is there already, from an earlier call, is taken."""
    store = Store(folder / "cache", Index(path=folder / "index.json"))
    if store.manifest_path.is_file() and len(store.manifest()["entries"]) == count:
        return store
    latents, text = (SMALL_LATENTS, SMALL_TEXT) if tiny else (LATENTS, TEXT)
    generator = torch.Generator().manual_seed(0)
    wants = [
        Wanted(id=f"s{index}", split="train", document={}, key=f"{index:016x}", target=None, controls=())
        for index in range(count)
    ]
    for want in wants:
        shapes = {"target": latents, "control_0": latents, "prompt_embeds": text}
        tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
        store.write(want, Encoded(tensors=tensors))
    entries = {want.folder: store.entry(want.folder) for want in wants}
    store.write_manifest(wants, {}, "", entries)
    return store


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Seconds of each step, and of each wait for a window."""

    steps: Sequence[float]
    waits: Sequence[float]


def compare(store: Store, workers: int, seconds: float, steps: int, repeats: int) -> list[dict[str, Any]]:
    """A line for each source."""
    steps = min(steps, len(store.manifest()["entries"]))
    runs: dict[str, list[Taken]] = {source: [] for source in SOURCES}
    for repeat in range(repeats):
        for source in SOURCES:
            batches = opened(store, workers, seed=repeat)
            wanted = [batches.folders["train", name] for window in places(batches, steps) for name in window]
            prepare(store, source, wanted)
            if source == "memory":
                held = {folder: {n: t.clone() for n, t in store.read(folder).items()} for folder in wanted}
                batches.read = held.__getitem__  # type: ignore[assignment,method-assign]
            runs[source].append(take(batches, steps, seconds))
            del batches
            gc.collect()  # what is still mapped keeps its pages
    means = {s: statistics.median(statistics.mean(run.steps) for run in taken) for s, taken in runs.items()}
    return [
        {
            "source": source,
            "busy_s": seconds,
            "steps": steps,
            "step_s": means[source],
            "samples_per_s": 1 / means[source],
            "waited_s": statistics.median(statistics.mean(run.waits) for run in taken),
            "worst_s": max(max(run.waits) for run in taken),
            "over_memory": means[source] / means["memory"] - 1,
        }
        for source, taken in runs.items()
    ]


def opened(store: Store, workers: int, seed: int) -> Batches:
    items = [Item(id=e["id"], source="a", bucket=0) for e in store.manifest()["entries"]]
    order = Order(items=items, shares={"a": Share()}, seed=seed, shuffle=True)
    return Batches(store, order, caption_dropout=0.0, workers=workers)


def places(batches: Batches, steps: int) -> list[list[str]]:
    return [
        [slot.id for _, slots in batches._places(step, 1) for slot in slots] for step in range(1, steps + 1)
    ]


def prepare(store: Store, source: str, folders: Sequence[str]) -> None:
    """Bring the pages of these entries to the state that `source` names."""
    for folder in folders:
        path = store.root / folder / TENSORS
        if source == "disk":
            drop(path)
        elif source == "pages":
            path.read_bytes()


def drop(path: Path) -> None:
    advise: Callable[..., None] | None = getattr(os, "posix_fadvise", None)
    if advise is None:
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # pages that are not written yet stay
        advise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)


def take(batches: Batches, steps: int, seconds: float) -> Taken:
    """A loop over the windows as a fit has it."""
    taken: list[float] = []
    waits: list[float] = []
    before = time.perf_counter()
    for (micro,) in batches.windows(1, steps, 1):
        waits.append(time.perf_counter() - before)
        work(micro.conditioning.embeds, seconds)
        now = time.perf_counter()
        taken.append(now - before)
        before = now
    return Taken(steps=taken, waits=waits)


def work(given: Tensor, seconds: float) -> None:
    end = time.perf_counter() + seconds
    small = given[0, :4, :64].float()
    while time.perf_counter() < end:
        small = small * 0.5


if __name__ == "__main__":
    main()
