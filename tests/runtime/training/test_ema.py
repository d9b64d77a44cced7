"""The average of the trained weights: its value, its use, its resume."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from runtime.training.ema import STATE, Ema, decay_at


def parameters(dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [
        ("a", nn.Parameter(torch.zeros(3, dtype=dtype))),
        ("b", nn.Parameter(torch.ones(2, 2, dtype=dtype))),
    ]


def walk(named: list[tuple[str, nn.Parameter]], ema: Ema, steps: range) -> None:
    """Steps of weights that are a function of the step alone, each followed by an update."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for _, parameter in named:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        ema.update()


@pytest.mark.parametrize(
    ("decay", "updates", "expected"),
    [(0.99, 0, 0.1), (0.99, 1, 2 / 11), (0.99, 890, 0.99), (0.99, 5000, 0.99), (0.05, 0, 0.05)],
)
def test_the_decay_rises_to_its_value(decay: float, updates: int, expected: float) -> None:
    assert decay_at(decay, updates) == pytest.approx(expected)


def test_average_is_the_recurrence() -> None:
    named = parameters()
    ema = Ema(named, 0.3)
    expected = {name: p.detach().double() for name, p in named}
    for step in range(6):
        walk(named, ema, range(step, step + 1))
        decay = min(0.3, (1 + step) / (10 + step))
        expected = {name: decay * expected[name] + (1 - decay) * p.detach().double() for name, p in named}
    with ema.applied():
        for name, parameter in named:
            torch.testing.assert_close(parameter.detach().double(), expected[name], rtol=1e-6, atol=1e-7)
    assert ema.updates == 6


def test_it_starts_at_the_weights() -> None:
    named = parameters()
    with Ema(named, 0.9).applied():
        assert [p.detach().flatten().tolist() for _, p in named] == [[0.0] * 3, [1.0] * 4]


def test_weights_come_back_even_on_an_exception() -> None:
    named = parameters()
    ema = Ema(named, 0.9)
    walk(named, ema, range(3))
    kept = [p.detach().clone() for _, p in named]
    with pytest.raises(RuntimeError, match="inside"), ema.applied():
        assert not any(torch.equal(p, value) for (_, p), value in zip(named, kept, strict=True))
        with ema.applied():
            pass
        raise RuntimeError("inside")
    assert all(torch.equal(p, value) for (_, p), value in zip(named, kept, strict=True))


def test_a_resume_continues_bit_for_bit(tmp_path: Path) -> None:
    whole, first, later = parameters(), parameters(), parameters()
    one, two, three = Ema(whole, 0.9), Ema(first, 0.9), Ema(later, 0.9)
    walk(whole, one, range(9))
    walk(first, two, range(4))
    two.save(tmp_path)
    three.load(tmp_path)
    walk(later, three, range(4, 9))
    assert (one.updates, three.updates) == (9, 9)
    with one.applied(), three.applied():
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(whole, later, strict=True))


def test_state_is_fp32_under_the_names_of_training(tmp_path: Path) -> None:
    Ema(parameters(torch.bfloat16), 0.9).save(tmp_path)
    saved = load_file(tmp_path / STATE)
    assert {name: (t.dtype, tuple(t.shape)) for name, t in saved.items()} == {
        "a": (torch.float32, (3,)),
        "b": (torch.float32, (2, 2)),
    }


def test_a_state_of_another_adapter_is_refused(tmp_path: Path) -> None:
    named = parameters()
    Ema(named[:1], 0.9).save(tmp_path)
    with pytest.raises(KeyError, match="another adapter: \\['b'\\]"):
        Ema(named, 0.9).load(tmp_path)
