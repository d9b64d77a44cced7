"""Signs of life where there is no terminal, a bar where there is one."""

from typing import Any

import pytest

from runtime import progress
from runtime.progress import Progress, duration


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress, "time", made)
    return made


def run(clock: Clock, shown: Progress, steps: int, seconds: float, done: int = 0) -> None:
    shown.start("fit", steps, done)
    for step in range(done + 1, steps + 1):
        clock.now += seconds
        shown.update(step, f"loss {step}")
    shown.stop()


def test_a_heartbeat_every_ten_seconds_and_one_at_the_end(clock: Clock, capsys: Any) -> None:
    run(clock, Progress(), 50, 1.0)
    out, err = capsys.readouterr()
    assert out == ""  # stdout is for data
    assert err.splitlines() == [
        *(f"fit {step}/50  loss {step}  ETA {50 - step} s" for step in (10, 20, 30, 40)),
        "fit 50/50  loss 50  ETA 0 s",
    ]


def test_the_end_is_told_once(clock: Clock, capsys: Any) -> None:
    """Of a count in MiB, tensors that are smaller leave it as it is."""
    shown = Progress()
    shown.start("quantize", 2)
    for done, name in ((1, "a"), (2, "b"), (2, "c"), (2, "d")):
        shown.update(done, name)
    shown.start("again", 2)
    shown.update(2, "e")
    assert [line.split()[2] for line in capsys.readouterr().err.splitlines()] == ["b", "e"]


def test_slow_steps_are_told_each(clock: Clock, capsys: Any) -> None:
    run(clock, Progress(), 3, 60.0)
    assert capsys.readouterr().err.splitlines() == [
        "fit 1/3  loss 1  ETA 2 min 00 s",
        "fit 2/3  loss 2  ETA 1 min 00 s",
        "fit 3/3  loss 3  ETA 0 s",
    ]


def test_a_resumed_run_does_not_count_what_was_done_before(clock: Clock, capsys: Any) -> None:
    run(clock, Progress(), 100, 20.0, done=98)
    assert capsys.readouterr().err.splitlines()[0] == "fit 99/100  loss 99  ETA 20 s"


def test_quiet_says_nothing(clock: Clock, capsys: Any) -> None:
    shown = Progress(quiet=True)
    run(clock, shown, 3, 60.0)
    shown.say("checkpoint")
    assert capsys.readouterr() == ("", "")


def test_over_yields_all_and_gives_the_rate(clock: Clock, capsys: Any) -> None:
    seen = []
    for item in Progress().over(["a", "b"], "cache", unit="sample"):
        clock.now += 2.0
        seen.append(item)
    assert seen == ["a", "b"]
    assert capsys.readouterr().err == "cache 2/2  0.5 sample/s  ETA 0 s\n"


def test_over_stops_the_bar_when_the_work_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped = []
    monkeypatch.setattr(Progress, "stop", lambda self: stopped.append(1))
    items = Progress(quiet=True).over([1, 2], "x", unit="y")
    next(items)
    items.close()
    assert stopped == [1]


def test_on_a_terminal_a_bar_is_drawn_and_lines_stand_above_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    import sys

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    shown = Progress()
    shown.start("fit", 2)
    shown.update(1, "loss [0.5]")
    shown.say("checkpoint [bold]x[/bold]")
    shown.stop()
    out, err = capsys.readouterr()
    assert out == ""
    assert "checkpoint [bold]x[/bold]" in err  # names with brackets are no markup


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (75, "1 min 15 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (90061, "25 h 01 min"),
    ],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
