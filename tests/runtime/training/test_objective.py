"""Flow matching against its formula, with a denoiser that only remembers what it was asked."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime.families.base import Conditioning
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.training.batches import MicroBatch
from runtime.training.objective import Draw, FlowMatching
from runtime.training.sigmas import Sigmas

TOLD = Conditioning(embeds=torch.zeros(2, 1, 4), mask=None, controls=())


def objective(sampling: str = "sigmoid", seed: int = 42) -> FlowMatching:
    return FlowMatching(family=QwenImageEdit(), sigmas=Sigmas(sampling=sampling), seed=seed)


def batch(ids: tuple[str, ...] = ("a", "b"), height: int = 8) -> MicroBatch:
    target = torch.zeros(len(ids), 16, height, 8)
    return MicroBatch(
        ids=ids,
        epoch=0,
        target=target,
        conditioning=TOLD,
        mask=None,
        regularisation=False,
        dropped=(),
        bucket="64x64",
    )


def test_noisy_target_and_velocity() -> None:
    target, noise = torch.randn(2, 16, 8, 8), torch.randn(2, 16, 8, 8)
    draw = Draw(sigmas=torch.tensor([0.25, 1.0]), noise=noise)
    asked: list[Any] = []

    def predict(noisy: Tensor, sigma: Tensor, told: Conditioning) -> Tensor:
        asked.append((noisy, sigma, told))
        return noise - target

    losses = objective().losses(predict, target, TOLD, draw)
    assert losses.tolist() == [0.0, 0.0]
    noisy, sigma, told = asked[0]
    assert torch.allclose(noisy[0], 0.75 * target[0] + 0.25 * noise[0], atol=1e-6)
    assert torch.equal(noisy[1], noise[1])  # sigma 1 is noise alone
    assert torch.equal(sigma, draw.sigmas) and told is TOLD


def test_one_loss_for_each_sample_in_fp32() -> None:
    target, noise = torch.zeros(2, 16, 8, 8), torch.zeros(2, 16, 8, 8)
    answer = torch.stack([torch.full((16, 8, 8), 1.0), torch.full((16, 8, 8), 3.0)]).bfloat16()
    draw = Draw(sigmas=torch.tensor([0.5, 0.5]), noise=noise)
    losses = objective().losses(lambda *asked: answer, target, TOLD, draw)
    assert losses.dtype == torch.float32 and losses.tolist() == [1.0, 9.0]


def test_draws_are_those_of_the_slot_however_the_step_is_cut() -> None:
    """So accumulation gives the same samples the same noise as one large batch."""
    whole = objective().draw(batch(("a", "b", "c")), 7, 0)
    parts = [objective().draw(batch((name,)), 7, slot) for slot, name in enumerate("abc")]
    assert torch.equal(whole.sigmas, torch.cat([part.sigmas for part in parts]))
    assert torch.equal(whole.noise, torch.cat([part.noise for part in parts]))


def test_draws_differ_between_steps_slots_and_seeds() -> None:
    drawn = [
        objective().draw(batch(), 1, 0),
        objective().draw(batch(), 2, 0),
        objective().draw(batch(), 1, 2),
        objective(seed=1).draw(batch(), 1, 0),
    ]
    sigmas = [sigma for draw in drawn for sigma in draw.sigmas.tolist()]
    assert len(set(sigmas)) == len(sigmas)
    assert not torch.equal(drawn[0].noise[0], drawn[0].noise[1])


def test_family_shift_follows_the_number_of_tokens() -> None:
    """A larger picture is shifted further towards noise, as the sampler does."""
    small, large = (objective("family_shift").draw(batch(height=height), 1, 0) for height in (8, 512))
    plain = objective("sigmoid").draw(batch(), 1, 0)
    assert bool((plain.sigmas < small.sigmas).all()) and bool((small.sigmas < large.sigmas).all())
    assert float(small.sigmas[0]) == pytest.approx(
        (shift := QwenImageEdit().shift(16))
        * float(plain.sigmas[0])
        / (1 + (shift - 1) * float(plain.sigmas[0]))
    )


def error_of(value: Tensor) -> Any:
    """A denoiser that is off by `value` everywhere, where target and noise are zero."""
    return lambda noisy, sigma, told: value


def zeros(**changes: Any) -> tuple[MicroBatch, Draw]:
    made = replace(batch(), **changes)
    return made, Draw(sigmas=torch.tensor([0.25, 0.5]), noise=torch.zeros_like(made.target))


def never(*asked: Any) -> Tensor:
    raise AssertionError("the base was asked")


def test_without_mask_weight_or_prior_a_step_descends_on_the_plain_loss() -> None:
    target, noise, answer = (torch.randn(2, 16, 8, 8) for _ in range(3))
    made, draw = replace(batch(), target=target), Draw(sigmas=torch.tensor([0.2, 0.7]), noise=noise)
    plain = objective().losses(error_of(answer), target, TOLD, draw)
    assert torch.equal(objective().step_losses(error_of(answer), never, made, draw), plain)


@pytest.mark.parametrize(("floor", "expected"), [(0.0, 4.0), (0.5, 3.0), (1.0, 2.5)])
def test_mask_weighs_and_is_normalised_by_its_mean(floor: float, expected: float) -> None:
    """An error of 4 under the white half and of 1 under the black: a small mask counts as much as a large one."""
    answer = torch.ones(2, 16, 8, 8)
    answer[..., :4] = 2.0
    mask = torch.zeros(2, 1, 8, 8)
    mask[..., :4] = 1.0
    made, draw = zeros(mask=mask)
    losses = replace(objective(), mask_floor=floor).step_losses(error_of(answer), never, made, draw)
    assert losses.tolist() == pytest.approx([expected] * 2, rel=1e-6)


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [("none", [1.0, 1.0]), ("sigma_sqrt", [16.0, 4.0]), ("cosmap", [1.0186, 1.2732])],
)
def test_weights_by_sigma(scheme: str, expected: list[float]) -> None:
    made, draw = zeros()
    answer = torch.ones(2, 16, 8, 8)
    losses = replace(objective(), weighting=scheme).step_losses(error_of(answer), never, made, draw)
    assert losses.tolist() == pytest.approx(expected, rel=1e-4)


def test_regularisation_is_held_to_what_the_base_says_and_not_to_its_pictures() -> None:
    made, draw = zeros(target=torch.randn(2, 16, 8, 8), regularisation=True)
    kept = torch.randn(2, 16, 8, 8, requires_grad=True)
    seen: list[Any] = []

    def base(noisy: Tensor, sigma: Tensor, told: Conditioning) -> Tensor:
        seen.append((noisy, torch.is_grad_enabled()))
        return kept

    def predict(noisy: Tensor, sigma: Tensor, told: Conditioning) -> Tensor:
        seen.append((noisy, torch.is_grad_enabled()))
        return kept.detach() + 2.0

    losses = replace(objective(), prior_weight=0.5).step_losses(predict, base, made, draw)
    assert losses.tolist() == pytest.approx([2.0, 2.0], rel=1e-5)
    assert torch.equal(seen[0][0], seen[1][0]) and [grad for _, grad in seen] == [False, True]
    assert not losses.requires_grad  # nothing flows into the base
