"""Joint attention in real numbers against diffusers' complex ones."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.families.base import Conditioning
from runtime.families.qwen_image_edit import QwenImageEdit

FAMILY = QwenImageEdit()


def told(lengths: list[int]) -> Conditioning:
    """Two controls of unlike sizes; padded and masked where lengths differ."""
    draw, longest = torch.Generator().manual_seed(7), max(lengths)
    mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    shapes = ((8, 8), (4, 12))
    return Conditioning(
        embeds=torch.randn(len(lengths), longest, 64, generator=draw),
        mask=None if len(set(lengths)) == 1 else mask,
        controls=tuple(torch.randn(len(lengths), 16, *shape, generator=draw) for shape in shapes),
    )


def answers(denoiser: Any, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The velocity, and the gradient of its square with regard to what was asked."""
    noisy = torch.randn(len(lengths), 16, 8, 8, generator=torch.Generator().manual_seed(8)).requires_grad_()
    sigma = torch.linspace(0.3, 0.9, len(lengths))
    velocity = FAMILY.predict(denoiser, noisy, sigma, told(lengths))
    (gradient,) = torch.autograd.grad(velocity.square().sum(), noisy)
    return velocity.detach(), gradient


@pytest.mark.parametrize("lengths", [[9], [5, 5], [9, 4]], ids=str)
def test_answers_and_gradients_are_those_of_the_complex_embedding(nano: Path, lengths: list[int]) -> None:
    denoiser: Any = FAMILY.load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
    exact = answers(denoiser, lengths)
    FAMILY.make_compilable(denoiser)
    for ours, theirs in zip(answers(denoiser, lengths), exact, strict=True):
        assert float((ours - theirs).norm() / theirs.norm()) < 2e-6
        assert not torch.equal(ours, torch.zeros_like(ours))


def test_tokens_are_turned_by_their_place(nano: Path) -> None:
    """Without the angles the answer would be another: the test above would see it."""
    denoiser: Any = FAMILY.load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
    FAMILY.make_compilable(denoiser)
    placed, _ = answers(denoiser, [9])
    denoiser.pos_embed.register_forward_hook(
        lambda module, given, angles: tuple(torch.ones_like(a) * torch.tensor([1.0, 0.0]) for a in angles)
    )
    unplaced, _ = answers(denoiser, [9])
    assert float((placed - unplaced).norm() / placed.norm()) > 1e-3
