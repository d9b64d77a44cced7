"""How far a work of many GiB is, by bytes: layers differ in size by a factor of thousands, and an ETA by count lies."""

import time
from math import ceil

from runtime.files import GIB, MIB
from runtime.progress import Progress


class Meter:
    """Used by one thread."""

    def __init__(self, progress: Progress, label: str, total: int, done: int = 0) -> None:
        """`total` and `done` bytes; what was done before counts for no rate."""
        self._progress, self._done, self._before = progress, done, done
        self._started = time.monotonic()
        progress.start(f"{label}, MiB", ceil(total / MIB), done // MIB)

    def advance(self, size: int, text: str) -> None:
        """`size` bytes more are done."""
        self._done += size
        rate = (self._done - self._before) / GIB / max(1e-9, time.monotonic() - self._started)
        self._progress.update(ceil(self._done / MIB), f"{rate:.2f} GiB/s  {text}")

    def stop(self) -> None:
        self._progress.stop()
