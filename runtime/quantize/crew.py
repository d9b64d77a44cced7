"""Threads for work that torch and bitsandbytes do outside of Python's lock: pieces of a weight, and reading ahead."""

from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")


@contextmanager
def crew(count: int | None = None) -> Iterator[Executor]:
    """`count` threads, or as many as torch computes with (OMP_NUM_THREADS), each of them with one of torch's own.

    Torch's threads share one operation and wait for the slowest at its end: on two cores 1.35 s instead of 0.55
    for the same weight.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count or before, thread_name_prefix="crew") as pool:
            yield pool
    finally:
        torch.set_num_threads(before)


def one_ahead(items: Iterable[Item], read: Callable[[Item], Result]) -> Generator[Result]:
    """`read` of each item in order, the next one read while the caller works on the last."""
    with ThreadPoolExecutor(1, thread_name_prefix="reader") as reader:
        coming = None
        for item in items:
            coming, ready = reader.submit(read, item), coming
            if ready is not None:
                yield ready.result()
        if coming is not None:
            yield coming.result()
