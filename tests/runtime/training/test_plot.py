"""The picture of a run: what is where, in which colour."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from runtime.training import plot
from runtime.training.history import History

METRICS = [{"step": step, "loss": 1.0, "loss_ema": 0.5, "lr": min(1.0, step / 21)} for step in range(1, 101)]
PROBES = [{"step": step, "train_mean": 0.2, "holdout_mean": 0.8} for step in (0, 50, 100)]


def history(metrics: list[dict[str, Any]], probes: list[dict[str, Any]]) -> History:
    return History(metrics=metrics, probes=probes, checkpoints={})


def rows(image: Image.Image, colour: tuple[int, int, int], columns: range) -> set[int]:
    return {
        row for row in range(image.height) for column in columns if image.getpixel((column, row)) == colour
    }


def test_each_series_lies_where_its_values_are() -> None:
    image = plot.draw("v0", history(METRICS, PROBES), 100)
    middle = range(560, 580)  # clear of the words, and of the markers at the checkpoints
    dots, smooth = rows(image, plot.FAINT, middle), rows(image, plot.SMOOTH, middle)
    train, held = rows(image, plot.TRAIN, middle), rows(image, plot.HELD, middle)
    assert all((dots, smooth, train, held))
    assert max(dots) < min(smooth) < min(held) < min(train), "higher values stand higher"
    assert max(smooth) - min(smooth) < 4 and max(train) - min(train) < 4
    across = plot.WIDTH - plot.LEFT - plot.RIGHT
    for step, wide in ((50, True), (75, False)):
        column = plot.LEFT + round(across * step / 100)
        marked = rows(image, plot.TRAIN, range(column, column + 1))
        assert (len(marked) > 8) == wide, "a marker at each checkpoint, none between"


def test_the_warm_up_is_shaded() -> None:
    """The rate is at its highest at step 21, so 20 steps were before."""
    image = plot.draw("v0", history(METRICS, PROBES), 100)
    edge = plot.LEFT + (plot.WIDTH - plot.LEFT - plot.RIGHT) * 20 // 100
    row = plot.TOP + 6
    assert image.getpixel((edge - 4, row)) == plot.SHADE and image.getpixel((edge + 4, row)) == (
        255,
        255,
        255,
    )


@pytest.mark.parametrize(
    ("rates", "steps"), [([], 0), ([0.5, 0.5, 0.5], 0), ([0.1, 0.2, 0.3, 0.3, 0.2], 2), ([0.1, 0.2], 1)]
)
def test_warm_up_is_read_from_the_rates(rates: list[float], steps: int) -> None:
    assert plot.warmup_of([{"step": n, "lr": rate} for n, rate in enumerate(rates, 1)]) == steps


@pytest.mark.parametrize(
    ("metrics", "probes"),
    [
        ([], []),
        ([], PROBES[:1]),
        (METRICS[:1], [{**PROBES[0], "holdout_mean": None}]),
        ([{**METRICS[0], "loss": None, "loss_ema": None}], [{**PROBES[0], "train_mean": None}]),
        ([{**METRICS[0], "loss": 1e30}, METRICS[1]], PROBES),
    ],
)
def test_what_is_short_empty_or_absurd_is_drawn_too(
    tmp_path: Path, metrics: list[dict[str, Any]], probes: list[dict[str, Any]]
) -> None:
    plot.write(tmp_path / "a.png", "größer: 画", history(metrics, probes), 10)
    with Image.open(tmp_path / "a.png") as image:
        assert image.size == (plot.WIDTH, plot.HEIGHT)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_enclose_the_values_and_are_even(low: float, width: float) -> None:
    ticks = plot.nice(low, low + width)
    assert 2 <= len(ticks) <= 9
    slack = 1e-9 * max(1.0, abs(low) + width)
    assert ticks[0] <= low + slack and ticks[-1] >= low + width - slack
    steps = [later - earlier for earlier, later in pairwise(ticks)]
    assert max(steps) - min(steps) <= 1e-6 * max(abs(tick) for tick in ticks) + 1e-12


def test_ticks_are_round() -> None:
    assert plot.nice(0.21, 0.79) == [0.2, 0.4, 0.6, 0.8]
    assert plot.nice(3.0, 3.0) == [2.6, 2.8, 3.0, 3.2, 3.4]
