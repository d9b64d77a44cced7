"""Stretches of a run in which the machine slept, or worked slower than at its start.

Both look like a slow fit and are none: a record that names them spares the search.
"""

import ctypes
import sys
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Literal

SUSPENDED_S = 30.0  # clocks that are set move by less
FIRST, RECENT = 20, 10  # comparable steps
SLOWER = 1.5
LASTING = 10  # steps; a browser that opens is over sooner


@dataclass(slots=True, kw_only=True)
class Stretch:
    kind: Literal["suspended", "throttled"]
    from_step: int
    """suspended: the last step before it; throttled: the first slow one."""
    to_step: int
    seconds: float
    """suspended: how long the machine slept; throttled: how long these steps took."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Stretches:
    """What was found so far in `found`; a throttled stretch that still goes on grows there."""

    found: list[Stretch] = field(default_factory=list)
    _clocks: tuple[int, float, float] | None = None
    _first: dict[Hashable, list[float]] = field(default_factory=dict)
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _slow: list[tuple[int, float]] = field(default_factory=list)
    _current: Stretch | None = None

    def after(self, step: int, step_s: float, comparable: Hashable, clocks: tuple[float, float]) -> list[str]:
        """Take a step in; returns a line for each stretch that was found, or was over, with it.

        `comparable`: steps of which take the same time (bucket, tokens). `clocks`: as `read_clocks`.
        """
        return [*self._suspension(step, *clocks), *self._throttling(step, step_s, comparable)]

    def to_json(self) -> list[dict[str, Any]]:
        """`stretches` of run.json."""
        return [stretch.to_json() for stretch in self.found]

    def _suspension(self, step: int, awake: float, every: float) -> list[str]:
        before, self._clocks = self._clocks, (step, awake, every)
        if before is None:
            return []
        slept = (every - before[2]) - (awake - before[1])
        if slept <= SUSPENDED_S:
            return []
        self.found.append(Stretch(kind="suspended", from_step=before[0], to_step=step, seconds=slept))
        return [f"the machine slept for {slept:.0f} s between steps {before[0]} and {step}"]

    def _throttling(self, step: int, step_s: float, comparable: Hashable) -> list[str]:
        """Steps are measured against the first of their own kind, then looked at in one row."""
        first = self._first.setdefault(comparable, [])
        if len(first) < FIRST:
            first.append(step_s)
            return []
        self._ratios.append(step_s / max(median(first), 1e-9))
        if len(self._ratios) == RECENT and median(self._ratios) > SLOWER:
            return self._slower(step, step_s)
        over, self._current = self._current, None
        self._slow.clear()
        return [f"steps are as fast as at the start again, since step {step}"] if over else []

    def _slower(self, step: int, step_s: float) -> list[str]:
        if self._current is not None:
            self._current.to_step = step
            self._current.seconds += step_s
            return []
        self._slow.append((step, step_s))
        if len(self._slow) < LASTING:
            return []
        seconds = sum(duration for _, duration in self._slow)
        start = self._slow[0][0]
        self._current = Stretch(kind="throttled", from_step=start, to_step=step, seconds=seconds)
        self.found.append(self._current)
        return [
            f"since step {start} steps take {median(self._ratios):.1f} times as long as at the start: "
            "the device is throttled (heat, battery) or shared"
        ]


def read_clocks() -> tuple[float, float]:
    """Seconds without and with the time asleep; only their differences mean something."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "win32":
        return _unbiased_s(_kernel32()), time.monotonic()  # Windows' monotonic clock goes on in sleep
    return time.monotonic(), time.time()


def _kernel32() -> Any:
    return ctypes.windll.kernel32  # type: ignore[attr-defined,unused-ignore]  # Windows only


def _unbiased_s(kernel32: Any) -> float:
    """Time awake since the start of Windows, which counts in 100 ns."""
    ticks = ctypes.c_ulonglong()
    kernel32.QueryUnbiasedInterruptTime(ctypes.byref(ticks))
    return ticks.value / 1e7
