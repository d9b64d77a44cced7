import math
import random

import pytest

from gates.statistics import BLOCKS, CURVE_STEPS_MIN, T_LIMIT, growth, paired, t_limit, trend


def test_paired_against_a_worked_example() -> None:
    result = paired([1.0, 2.0, 3.0, 4.0], [0.9, 1.7, 2.6, 3.8])
    assert result.relative_drop == pytest.approx(0.1)
    # differences .1 .3 .4 .2: mean .25, standard deviation .1291, error .06455
    assert result.t == pytest.approx(0.25 / (0.1290994 / 2), rel=1e-5)


def test_paired_without_spread() -> None:
    assert paired([1.0, 2.0], [0.5, 1.5]).t == math.inf
    assert paired([1.0, 2.0], [1.5, 2.5]).t == -math.inf
    assert paired([1.0, 2.0], [1.0, 2.0]).t == 0.0
    assert math.isnan(paired([0.0, 0.0], [0.0, 0.0]).relative_drop)


def test_draws_of_one_sample_move_together() -> None:
    """Sixteen items of four samples, of which one fell a lot: little by items, next to nothing by samples."""
    before = [1.0] * 16
    after = [0.9 + 0.2 * (index // 4 % 2) - (0.3 if index < 4 else 0.0) for index in range(16)]
    alone = paired(before, after)
    grouped = paired(before, after, [index // 4 for index in range(16)])
    # samples: .4 -.1 .1 -.1, mean .075, standard deviation .2363, error .1181; 3 degrees of freedom
    assert grouped.t == pytest.approx(0.075 / (0.2362908 / 2), rel=1e-5)
    assert alone.t == pytest.approx(0.075 / (0.2113803 / 4 * math.sqrt(1.0)), rel=5e-2)
    assert (alone.limit, grouped.limit) == (T_LIMIT, 5.05)


def test_groups_need_one_for_each_item() -> None:
    with pytest.raises(ValueError):
        paired([1.0, 2.0, 3.0], [1.0, 1.0, 1.0], ["a", "b"])
    assert paired([1.0, 2.0], [0.5, 1.4], ["a", "a"]).limit == T_LIMIT  # one sample: only of itself


# One-sided 0.75 % points, from tables of the distribution.
@pytest.mark.parametrize(
    ("freedom", "exact"), [(1, 42.43), (2, 8.07), (3, 5.05), (4, 4.09), (7, 3.20), (8, 3.09), (9, 3.00)]
)
def test_the_limit_of_t(freedom: int, exact: float) -> None:
    assert t_limit(freedom) == pytest.approx(exact, abs=0.012)


def _curve(noise: float, steps: int = 320) -> list[float]:
    draw = random.Random(5)
    return [
        math.exp(math.log(0.5) * (1 - math.exp(-(step + 0.5) / steps / 0.3)) + draw.gauss(0, noise))
        for step in range(steps)
    ]


def test_trend_of_a_clean_fall() -> None:
    """The fitted shape itself: the drop is that of the whole run, and nothing is left over."""
    found = trend(_curve(0.0))
    assert found.drop == pytest.approx(1 - 0.5 ** (1 - math.exp(-1 / 0.3)), abs=2e-3)
    assert found.fell and found.detectable < 0.01 and found.steps == 320
    rising = trend(_curve(0.0)[::-1])
    assert not rising.fell and rising.drop < -0.5 and rising.t < -5 and rising.ends_t < -5


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_trend_of_what_has_no_logarithm(bad: float) -> None:
    found = trend([*_curve(0.1)[:-1], bad])
    assert math.isnan(found.t) and math.isnan(found.ends_t) and not found.fell


def test_trend_of_too_few_and_of_equal_losses() -> None:
    assert math.isnan(trend([1.0] * (CURVE_STEPS_MIN - 1)).t)
    level = trend([0.5] * CURVE_STEPS_MIN)
    assert level.t == pytest.approx(0.0, abs=1e-3) and level.drop == pytest.approx(0.0, abs=1e-12)
    assert not level.fell


def test_one_spike_does_not_make_a_trend() -> None:
    curve = [math.exp(random.Random(step).gauss(0, 0.5)) for step in range(10 * BLOCKS)]
    assert abs(trend([1e9, *curve[1:]]).t) < 2.75


STEPS = list(range(100, 200))
SERIES = {
    "flat": (lambda i: 1.0, 0.0, 1e-12),
    "a line": (lambda i: 1.0 + 0.01 * i, 0.01, 1e-6),
    "a jump in the middle": (lambda i: 1.0 + (i >= 50), 0.0, 1e-12),
    "a jump at the end": (lambda i: 1.0 + (i >= 90), 0.0, 1e-12),
    "a staircase": (lambda i: 1.0 + 0.1 * (i // 10), 0.01, 0.003),
    "a jump in two steps": (lambda i: 1.0 + 0.5 * (i >= 50) + 0.5 * (i >= 51), 0.0, 1e-12),
    "a jump, and a line": (lambda i: 1.0 + 0.01 * i + (i >= 30), 0.01, 0.002),
    "a jump where a window ends in two": (lambda i: 1.0 + 100 * (i >= 6), 0.0, 1e-12),
    "one spike": (lambda i: 1.0 + 5 * (i == 30), 0.0, 1e-12),
    "a fall": (lambda i: 2.0 - 0.01 * i, -0.01, 1e-3),
}


@pytest.mark.parametrize("name", SERIES)
def test_growth(name: str) -> None:
    make, expected, tolerance = SERIES[name]
    assert growth(STEPS, [make(i) for i in range(100)]) == pytest.approx(expected, abs=tolerance)


def test_growth_in_noise() -> None:
    noise = random.Random(0)
    values = [1.0 + noise.gauss(0, 0.01) for _ in STEPS]
    assert abs(growth(STEPS, values)) < 2e-4
    assert growth(STEPS, [v + 0.005 * i for i, v in enumerate(values)]) == pytest.approx(0.005, rel=0.2)


def test_growth_of_too_few() -> None:
    assert growth([1, 2, 3], [1.0, 2.0, 3.0]) == 0.0
