"""Progress with ETA: a live bar on a terminal, a heartbeat line now and then elsewhere.

Everything goes to stderr; stdout is for data. Only ASCII, so that a cp1252 console shows it.
"""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

HEARTBEAT_S = 10.0  # an agent's tool call must see a sign of life well before it gives up

T = TypeVar("T")


class Progress:
    def __init__(self, *, quiet: bool = False) -> None:
        self.quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._started = self._last = 0.0
        self._done_before = 0
        self._told = -1  # the last count that a heartbeat told

    def start(self, label: str, total: int, done: int = 0) -> None:
        self._started = time.monotonic()
        self._last = self._started
        self._label, self._total, self._done_before = label, total, done
        self._told = -1
        if self.quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[text]}"),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(label, total=total, completed=done, text="")

    def update(self, done: int, text: str = "") -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, text=text)
        elif not self.quiet and self._due(done):
            self.say(f"{self._label} {done}/{self._total}  {text}  ETA {duration(self.eta_s(done))}")

    def _due(self, done: int) -> bool:
        now = time.monotonic()
        finished = done == self._total and self._told != done
        if now - self._last < HEARTBEAT_S and not finished:
            return False
        self._last, self._told = now, done
        return True

    def eta_s(self, done: int) -> float:
        fresh = done - self._done_before
        elapsed = time.monotonic() - self._started
        return elapsed / fresh * (self._total - done) if fresh > 0 else 0.0

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def say(self, line: str) -> None:
        if self.quiet:
            return
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def over(self, items: Sequence[T], label: str, *, unit: str) -> Iterator[T]:
        """Yield `items` one by one, showing how far it is."""
        yield from self.counted(items, label, len(items), unit=unit)

    def chunks(self, items: Sequence[T], size: int, label: str, *, unit: str) -> Iterator[Sequence[T]]:
        """Yield `items` in pieces of `size`, showing how far it is."""
        self.start(label, len(items))
        try:
            for start in range(0, len(items), size):
                yield items[start : start + size]
                self._counted(min(start + size, len(items)), unit)
        finally:
            self.stop()

    def counted(self, items: Iterable[T], label: str, total: int, *, unit: str) -> Iterator[T]:
        """`over` for items that come one by one, of which only the number is known."""
        self.start(label, total)
        try:
            for index, item in enumerate(items):
                yield item
                self._counted(index + 1, unit)
        finally:
            self.stop()

    def _counted(self, done: int, unit: str) -> None:
        rate = done / max(1e-9, time.monotonic() - self._started)
        self.update(done, f"{rate:.1f} {unit}/s")


def duration(seconds: float) -> str:
    """`75` as `1 min 15 s`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
