"""Random numbers are pure functions of their labels."""

import subprocess
import sys
from typing import Any

import pytest
import torch

from runtime.training import draws

DRAWS: dict[str, Any] = {
    "noise": lambda *labels: draws.noise((2, 3), *labels).tolist(),
    "uniform": draws.uniform,
    "sigma": lambda *labels: draws.sigma("sigmoid", 2.0, *labels),
    "seed_of": draws.seed_of,
}


@pytest.mark.parametrize("name", DRAWS)
def test_same_labels_same_numbers_whatever_was_drawn_between(name: str) -> None:
    draw = DRAWS[name]
    first = draw(42, 7, 0)
    torch.manual_seed(1)
    draw(42, 8, 0)
    assert draw(42, 7, 0) == first
    for other in ((43, 7, 0), (42, 8, 0), (42, 7, 1), (42, 70), ("42", 7, 0), (42, 7, 0, 0)):
        assert draw(*other) != first


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    draws.noise((4,), 1)
    draws.sigma("shift", 2.0, 1)
    assert torch.equal(torch.rand(3), expected)


def test_kinds_do_not_share_a_stream() -> None:
    assert draws.seed_of("noise", 1) != draws.seed_of("sigma", 1)


def test_seeds_do_not_depend_on_the_process() -> None:
    """`hash()` of a text does."""
    code = "from runtime.training import draws; print(draws.seed_of('caption', 42, 'p0'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) == draws.seed_of("caption", 42, "p0")
    assert 0 <= draws.seed_of("caption", 42, "p0") < 2**63


@pytest.mark.parametrize(
    ("sampling", "shift", "mean"),
    [
        ("uniform", 2.0, 0.5),
        ("sigmoid", 2.0, 0.5),
        ("shift", 1.0, 0.5),
        ("shift", 2.0, 0.632),
        ("shift", 0.5, 0.368),
    ],
)
def test_sigma_lies_inside_and_around_its_mean(sampling: str, shift: float, mean: float) -> None:
    drawn = torch.tensor([draws.sigma(sampling, shift, 0, step) for step in range(4000)])
    assert float(drawn.min()) > 0.0 and float(drawn.max()) < 1.0
    assert float(drawn.mean()) == pytest.approx(mean, abs=0.015)


def test_uniform_reaches_the_ends_and_sigmoid_rarely_does() -> None:
    shares = {}
    for sampling in ("uniform", "sigmoid"):
        drawn = torch.tensor([draws.sigma(sampling, 1.0, 0, step) for step in range(4000)])
        shares[sampling] = float((drawn < 0.1).float().mean())
    assert shares["uniform"] == pytest.approx(0.1, abs=0.015)
    assert shares["sigmoid"] == pytest.approx(0.014, abs=0.006)  # P(normal < logit(0.1))


def test_shift_moves_the_draw_of_sigmoid() -> None:
    plain, shifted = (draws.sigma(s, 3.0, 1, 2, 3) for s in ("sigmoid", "shift"))
    assert shifted == pytest.approx(3.0 * plain / (1 + 2.0 * plain))


def test_noise_is_standard_normal() -> None:
    noise = draws.noise((100_000,), 1)
    assert noise.dtype == torch.float32
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(noise.std()) == pytest.approx(1.0, abs=0.01)
