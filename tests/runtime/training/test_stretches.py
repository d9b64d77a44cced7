"""Slept or slowed: named in the record, and only then."""

import ctypes
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime import files
from runtime.training import stretches
from runtime.training.stretches import Stretches

AWAKE = (0.0, 0.0)


def after(steps: Iterable[tuple[float, Any]]) -> tuple[Stretches, list[str]]:
    """Steps from 1 on, (seconds, kind), on a machine that never sleeps."""
    watched, said = Stretches(), list[str]()
    for number, (step_s, kind) in enumerate(steps, 1):
        said += watched.after(number, step_s, kind, AWAKE)
    return watched, said


def test_a_suspension_lies_between_two_steps() -> None:
    watched = Stretches()
    clocks = [(1.0, 1001.0), (2.0, 1002.0), (3.0, 1633.0), (4.0, 1634.0), (5.0, 1665.0), (6.0, 1697.0)]
    said = [watched.after(step, 1.0, "a", pair) for step, pair in enumerate(clocks, 11)]
    assert watched.to_json() == [
        {"kind": "suspended", "from_step": 12, "to_step": 13, "seconds": 630.0},
        {"kind": "suspended", "from_step": 15, "to_step": 16, "seconds": 31.0},
    ]
    assert said[2] == ["the machine slept for 630 s between steps 12 and 13"] and said[4] == []


def test_a_long_step_and_a_clock_set_back_are_no_suspension() -> None:
    watched = Stretches()
    for step, pair in enumerate([(0.0, 0.0), (900.0, 900.0), (901.0, -3000.0)]):
        assert watched.after(step, 1.0, "a", pair) == []
    assert watched.found == []


def test_throttled_from_the_first_slow_median_to_its_end() -> None:
    """Steps 1-20 are the measure. From step 31 on 2 s: six of the last ten are slow at 36; ten such medians at 45."""
    usual, slow = [(1.0, "a")] * 30, [(2.0, "a")] * 30
    watched, said = after([*usual, *slow[:14]])
    assert watched.found == [] and said == []
    watched, said = after([*usual, *slow[:15]])
    (line,) = said
    assert line.startswith("since step 36 steps take 2.0 times as long as at the start")
    assert watched.to_json() == [{"kind": "throttled", "from_step": 36, "to_step": 45, "seconds": 20.0}]
    watched, said = after([*usual, *slow, *usual])
    # Of ten the fifth usual one brings the median to 1.5, which is not above 1.5 any more.
    assert watched.to_json() == [{"kind": "throttled", "from_step": 36, "to_step": 64, "seconds": 54.0}]
    assert said[1:] == ["steps are as fast as at the start again, since step 65"]


def test_short_slowness_is_none() -> None:
    watched, said = after([*[(1.0, "a")] * 30, *[(2.0, "a")] * 9, *[(1.0, "a")] * 60])
    assert (watched.found, said) == ([], [])


def test_only_alike_steps_are_compared() -> None:
    """A bucket with twice the tokens takes twice as long, whichever comes first; a rare one has no measure yet."""
    watched, said = after([*[(1.0, "small")] * 40, *[(2.0, "large")] * 40, *[(9.0, "rare")] * 19])
    assert (watched.found, said) == ([], [])
    mixed = [(1.0, "small"), (2.0, "large")] * 40
    watched, _ = after([*mixed, *[(2 * s, kind) for s, kind in mixed]])
    (found,) = watched.found
    assert (found.kind, found.from_step, found.to_step) == ("throttled", 86, 160)


PAIRS = st.lists(st.tuples(st.floats(0.01, 100), st.sampled_from("ab")), max_size=120)


@given(PAIRS)
def test_stretches_are_in_order_apart_and_at_least_ten_steps(steps: list[tuple[float, str]]) -> None:
    watched, said = after(steps)
    twice, again = after(steps)
    assert (watched.to_json(), said) == (twice.to_json(), again), "a function of what it was given"
    bounds = [(s.from_step, s.to_step) for s in watched.found]
    assert bounds == sorted(bounds)
    assert all(last - first >= stretches.LASTING - 1 for first, last in bounds)
    assert all(one[1] < other[0] for one, other in pairwise(bounds))
    assert sum(line.startswith("since step") for line in said) == len(watched.found)


@given(PAIRS, st.sampled_from([0.25, 2.0, 64.0]))
def test_the_machines_speed_does_not_matter(steps: list[tuple[float, str]], factor: float) -> None:
    one, _ = after(steps)
    other, _ = after([(step_s * factor, kind) for step_s, kind in steps])
    assert [(s.from_step, s.to_step) for s in one.found] == [(s.from_step, s.to_step) for s in other.found]


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 29.9)), max_size=60))
def test_below_half_a_minute_nothing_is_a_suspension(gaps: list[tuple[float, float]]) -> None:
    watched, awake, every = Stretches(), 0.0, 0.0
    for step, (passed, slept) in enumerate(gaps):
        awake, every = awake + passed, every + passed + slept
        watched.after(step, 1.0, step, (awake, every))
    assert watched.found == []


def test_the_record_takes_them(conforms: Callable[[Any, str], None], lab: Any) -> None:
    watched, _ = after([*[(1.0, "a")] * 30, *[(2.0, "a")] * 30])
    assert watched.found
    conforms({**lab.fit().document, "stretches": watched.to_json()}, "run")


def test_a_fit_that_slept_has_it_in_its_record(
    lab: Any, conforms: Callable[[Any, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    clocks = iter([(0.0, 0.0), (1.0, 1.0), (2.0, 602.0), (3.0, 603.0), (4.0, 604.0), (5.0, 605.0)])
    monkeypatch.setattr(stretches, "read_clocks", lambda: next(clocks))
    run = lab.fit()
    document = files.read_json(run.path / "run.json")
    assert document["stretches"] == [{"kind": "suspended", "from_step": 2, "to_step": 3, "seconds": 600.0}]
    conforms(document, "run")


def test_the_clocks_go_on_together_while_awake() -> None:
    first = stretches.read_clocks()
    time.sleep(0.05)
    second = stretches.read_clocks()
    awake, every = second[0] - first[0], second[1] - first[1]
    assert awake >= 0.05 and abs(every - awake) < 0.05


def test_windows_counts_its_time_awake_in_100_ns(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kernel32:
        def QueryUnbiasedInterruptTime(self, pointer: Any) -> None:  # noqa: N802
            ctypes.cast(pointer, ctypes.POINTER(ctypes.c_ulonglong)).contents.value = 123_456_789

    monkeypatch.delattr(time, "CLOCK_BOOTTIME")
    monkeypatch.setattr(stretches.sys, "platform", "win32")
    monkeypatch.setattr(stretches, "_kernel32", Kernel32)
    monkeypatch.setattr(time, "monotonic", lambda: 99.0)
    assert stretches.read_clocks() == (12.3456789, 99.0)
