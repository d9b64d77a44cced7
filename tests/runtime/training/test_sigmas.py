"""Each distribution against its formula; strata that leave no share out; the same numbers wherever they are drawn."""

from math import exp, log
from statistics import NormalDist, mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.learning import Loss
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.training.sigmas import Sigmas

NORMAL = NormalDist()


def drawn(sigmas: Sigmas, count: int = 4000, family_shift: float = 2.0) -> list[float]:
    return [sigmas.draw(0, step, 0, family_shift=family_shift) for step in range(1, count + 1)]


@pytest.mark.parametrize(
    ("sigmas", "expected"),
    [
        (Sigmas(sampling="uniform"), 0.5),
        (Sigmas(sampling="sigmoid"), 0.5),
        (Sigmas(sampling="logit_normal", mean=1.0, std=0.5), 0.7199),  # integrated numerically
        (Sigmas(sampling="shift", shift=1.0), 0.5),
        (Sigmas(sampling="shift", shift=3.0), 0.7105),
        (Sigmas(sampling="family_shift"), 0.632),
        (Sigmas(sampling="uniform", low=0.2, high=0.4), 0.3),
    ],
)
def test_mean_and_range(sigmas: Sigmas, expected: float) -> None:
    values = drawn(sigmas)
    assert sigmas.low < min(values) and max(values) < sigmas.high
    assert mean(values) == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize("low", [0.0, 0.3])
def test_quantiles_are_those_of_the_distribution(low: float) -> None:
    """A quarter of the draws lies below the first quartile, and so on."""
    quartiles = {
        "uniform": lambda q: q,
        "sigmoid": lambda q: 1 / (1 + exp(-NORMAL.inv_cdf(q))),
        "logit_normal": lambda q: 1 / (1 + exp(-(0.5 + 2 * NORMAL.inv_cdf(q)))),
        "shift": lambda q: shifted(3.0, 1 / (1 + exp(-NORMAL.inv_cdf(q)))),
        "family_shift": lambda q: shifted(2.0, 1 / (1 + exp(-NORMAL.inv_cdf(q)))),
    }
    for name, quantile in quartiles.items():
        values = drawn(Sigmas(sampling=name, mean=0.5, std=2.0, shift=3.0, low=low))
        for share in (0.25, 0.5, 0.75):
            below = sum(value < low + (1 - low) * quantile(share) for value in values) / len(values)
            assert below == pytest.approx(share, abs=0.025), (name, share)


def shifted(shift: float, sigma: float) -> float:
    return shift * sigma / (1 + (shift - 1) * sigma)


def test_the_published_shift_of_1024_pixels() -> None:
    assert QwenImageEdit().shift(4096) == pytest.approx(2.000802574061872, abs=1e-15)
    assert log(QwenImageEdit().shift(256)) == pytest.approx(0.5, abs=1e-15)
    assert log(QwenImageEdit().shift(8192)) == pytest.approx(0.9, abs=1e-15)


@given(
    seed=st.integers(0, 2**40), strata=st.integers(2, 16), per_step=st.integers(1, 5), turn=st.integers(0, 9)
)
def test_strata_are_each_drawn_from_once_a_turn(seed: int, strata: int, per_step: int, turn: int) -> None:
    sigmas = Sigmas(sampling="uniform", strata=strata, per_step=per_step)
    places = [divmod(index, per_step) for index in range(turn * strata, (turn + 1) * strata)]
    values = [sigmas.draw(seed, step + 1, slot, family_shift=1.0) for step, slot in places]
    assert sorted(min(int(value * strata), strata - 1) for value in values) == list(range(strata))


def test_strata_calm_the_mean_of_a_few_steps() -> None:
    free, even = (drawn(Sigmas(sampling="sigmoid", strata=strata), 800) for strata in (None, 8))
    spread = [max(means) - min(means) for values in (free, even) if (means := in_eights(values))]
    assert spread[1] < spread[0] / 3


def in_eights(values: list[float]) -> list[float]:
    return [mean(values[start : start + 8]) for start in range(0, len(values), 8)]


@pytest.mark.parametrize("strata", [None, 4])
def test_a_draw_is_a_function_of_seed_step_and_slot(strata: int | None) -> None:
    sigmas = Sigmas(strata=strata, per_step=2)
    places = [(seed, step, slot) for seed in (1, 2) for step in (1, 2) for slot in (0, 1)]
    values = [sigmas.draw(*place, family_shift=1.0) for place in places]
    assert len(set(values)) == len(values)
    assert values == [sigmas.draw(*place, family_shift=1.0) for place in places]


def test_the_config_reaches_the_draw() -> None:
    loss = Loss(sigma_sampling="logit_normal", logit_mean=0.5, logit_std=2.0, sigma_min=0.1, sigma_max=0.9)
    found = Sigmas.of(loss, 3)
    assert (found.sampling, found.mean, found.std, found.low, found.high) == (
        "logit_normal",
        0.5,
        2.0,
        0.1,
        0.9,
    )
    assert Sigmas.of(Loss(sigma_sampling="shift", shift=3.0, sigma_strata=8), 3) == Sigmas(
        sampling="shift", shift=3.0, strata=8, per_step=3
    )


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        ({"logit_mean": 1.0}, "logit_mean: 1 does nothing for sigmoid"),
        ({"shift": 2.0}, "shift: 2 does nothing for sigmoid"),
        ({"sigma_sampling": "shift"}, "requires shift"),
        ({"sigma_min": 0.5, "sigma_max": 0.5}, "expected min < max"),
    ],
)
def test_keys_that_would_do_nothing_are_refused(given_: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Loss.model_validate(given_)
