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
    draws.uniform(1)
    assert torch.equal(torch.rand(3), expected)


def test_kinds_do_not_share_a_stream() -> None:
    assert draws.seed_of("noise", 1) != draws.seed_of("sigma", 1)


def test_seeds_do_not_depend_on_the_process() -> None:
    """`hash()` of a text does."""
    code = "from runtime.training import draws; print(draws.seed_of('caption', 42, 'p0'))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(result.stdout) == draws.seed_of("caption", 42, "p0")
    assert 0 <= draws.seed_of("caption", 42, "p0") < 2**63


def test_noise_is_standard_normal() -> None:
    noise = draws.noise((100_000,), 1)
    assert noise.dtype == torch.float32
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.01)
    assert float(noise.std()) == pytest.approx(1.0, abs=0.01)
