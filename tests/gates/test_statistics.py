import math
import random

import pytest

from gates.statistics import growth, paired


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


STEPS = list(range(100, 200))
SERIES = {
    "flat": (lambda i: 1.0, 0.0, 1e-12),
    "a line": (lambda i: 1.0 + 0.01 * i, 0.01, 1e-6),
    "a jump in the middle": (lambda i: 1.0 + (i >= 50), 0.0, 1e-12),
    "a jump at the end": (lambda i: 1.0 + (i >= 90), 0.0, 1e-12),
    "a staircase": (lambda i: 1.0 + 0.1 * (i // 10), 0.01, 0.003),
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
