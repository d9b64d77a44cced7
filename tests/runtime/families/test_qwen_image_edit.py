"""Both edit families against diffusers' own pipelines, on the embedded base."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from runtime.families.base import Conditioning
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.families.qwen_image_edit_plus import QwenImageEditPlus


@pytest.fixture(scope="module")
def denoiser(nano: Path) -> Any:
    return QwenImageEdit().load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")


def told(controls: int = 1, batch: int = 1, size: int = 8) -> Conditioning:
    generator = torch.Generator().manual_seed(1)
    return Conditioning(
        embeds=torch.randn(batch, 9, 64, generator=generator),
        mask=None,
        controls=tuple(torch.randn(batch, 16, size, size, generator=generator) for _ in range(controls)),
    )


@pytest.mark.parametrize("controls", [0, 1, 2, 3])
def test_predict_has_the_shape_of_the_target(denoiser: Any, controls: int) -> None:
    noisy = torch.randn(2, 16, 8, 12)
    with torch.no_grad():
        velocity = QwenImageEditPlus().predict(
            denoiser, noisy, torch.tensor([0.2, 0.8]), told(controls, batch=2)
        )
    assert velocity.shape == noisy.shape and bool(velocity.isfinite().all())


def test_predict_is_the_call_of_diffusers_own_pipeline(denoiser: Any) -> None:
    """The target's tokens first, sigma in 0..1, shapes in patches."""
    noisy, conditioning = torch.randn(1, 16, 8, 12), told(size=6)
    asked: dict[str, Any] = {}

    hook = denoiser.register_forward_pre_hook(
        lambda module, given, named: asked.update(named), with_kwargs=True
    )
    with torch.no_grad():
        QwenImageEdit().predict(denoiser, noisy, torch.tensor([0.3]), conditioning)
    hook.remove()
    assert asked["hidden_states"].shape == (1, 24 + 9, 64)
    assert asked["img_shapes"] == [[(1, 4, 6), (1, 3, 3)]]
    assert asked["timestep"].tolist() == pytest.approx([0.3])
    # Token (row 1, column 2): channel c of its 2 x 2 patch stands at 4 c.
    token = asked["hidden_states"][0, 1 * 6 + 2]
    assert torch.equal(token.reshape(16, 2, 2), noisy[0, :, 2:4, 4:6])


def test_predict_depends_on_each_control_and_their_order(denoiser: Any) -> None:
    noisy, sigma, conditioning = torch.randn(1, 16, 8, 8), torch.tensor([0.5]), told(2)
    swapped = Conditioning(embeds=conditioning.embeds, mask=None, controls=conditioning.controls[::-1])
    with torch.no_grad():
        one = QwenImageEditPlus().predict(denoiser, noisy, sigma, conditioning)
        other = QwenImageEditPlus().predict(denoiser, noisy, sigma, swapped)
    assert not torch.allclose(one, other, atol=1e-4)


def zero_cond(nano: Path, tmp_path: Path) -> Path:
    """The base with 2511's switch in its config."""
    model = tmp_path / "2511"
    shutil.copytree(nano, model)
    config = json.loads((model / "transformer" / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "zero_cond_t": True})
    (model / "transformer" / "config.json").write_text(text, encoding="utf-8")
    return model


def test_2511_gives_controls_the_modulation_of_sigma_zero(nano: Path, tmp_path: Path, denoiser: Any) -> None:
    model = zero_cond(nano, tmp_path)
    family = QwenImageEditPlus()
    newer = family.load_denoiser(model, device="cpu", dtype=torch.float32, quantize="none")
    noisy, conditioning = torch.randn(1, 16, 8, 8), told()
    with torch.no_grad():
        answers = [family.predict(d, noisy, torch.tensor([0.9]), conditioning) for d in (denoiser, newer)]
        at_zero = [family.predict(d, noisy, torch.tensor([0.0]), conditioning) for d in (denoiser, newer)]
    assert not torch.allclose(*answers, atol=1e-3)
    assert torch.allclose(*at_zero, atol=1e-5)


@pytest.mark.parametrize("newer", [False, True])
def test_sigma_is_fp32_until_it_is_embedded(nano: Path, tmp_path: Path, newer: bool) -> None:
    """Rounded to bf16, 0.9985 would be 1."""
    family = QwenImageEdit()
    folder = zero_cond(nano, tmp_path) if newer else nano
    model = family.load_denoiser(folder, device="cpu", dtype=torch.bfloat16, quantize="none")
    seen: list[torch.Tensor] = []
    model.time_text_embed.time_proj.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    sigma = torch.tensor([0.9985])
    with torch.no_grad():
        family.predict(model, torch.randn(1, 16, 8, 8).bfloat16(), sigma, told().to("cpu", torch.bfloat16))
    assert seen[0].dtype == torch.float32
    assert torch.equal(seen[0], torch.cat([sigma, torch.zeros(1)]) if newer else sigma)
    assert not model.time_text_embed._forward_pre_hooks


@pytest.mark.parametrize(
    ("size", "controls", "tokens"), [(8, 0, 9 + 16), (8, 1, 9 + 16 + 16), (8, 2, 9 + 48)]
)
def test_tokens(size: int, controls: int, tokens: int) -> None:
    assert QwenImageEdit().tokens((16, size, size), told(controls, size=8)) == tokens
    assert QwenImageEdit().tokens((5, 16, size, size), told(controls, size=8)) == tokens


def test_shift_is_the_published_one() -> None:
    family = QwenImageEdit()
    assert family.shift(4096) == 2.000802574061872
    assert family.shift(256) == pytest.approx(np.exp(0.5)) and family.shift(8192) == pytest.approx(
        np.exp(0.9)
    )


@pytest.mark.parametrize(("tokens", "steps"), [(16, 4), (4096, 20), (8192, 8)])
def test_scheduler_is_that_of_the_pipeline(nano: Path, tokens: int, steps: int) -> None:
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

    scheduler = QwenImageEdit().scheduler(nano, tokens, steps)
    reference = QwenImageEdit().scheduler(nano, tokens, steps)
    mu = module.calculate_shift(tokens, 256, 8192, 0.5, 0.9)
    module.retrieve_timesteps(reference, steps, "cpu", sigmas=np.linspace(1.0, 1 / steps, steps), mu=mu)
    assert torch.allclose(scheduler.sigmas, reference.sigmas, atol=1e-6)
    assert len(scheduler.timesteps) == steps
    assert float(scheduler.sigmas[0]) == 1.0
    assert float(scheduler.sigmas[-2]) == pytest.approx(0.02)  # shift_terminal
    assert float(scheduler.sigmas[-1]) == 0.0


@pytest.mark.parametrize(
    ("dtype", "quantize"), [(torch.float32, "none"), (torch.bfloat16, "none"), (torch.bfloat16, "nf4")]
)
def test_the_denoiser_is_frozen_and_of_the_asked_dtype(nano: Path, dtype: torch.dtype, quantize: str) -> None:
    loaded = QwenImageEdit().load_denoiser(nano, device="cpu", dtype=dtype, quantize=quantize)
    assert {p.dtype for p in loaded.parameters()} - {torch.uint8} == {dtype}
    assert not any(p.requires_grad for p in loaded.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sample_whose_words_are_all_masked_is_finite_and_disturbs_no_other(
    nano: Path, dtype: torch.dtype
) -> None:
    """A row of attention that sees nothing is NaN in some kernels; here it still sees the pictures."""
    family = QwenImageEdit()
    model = family.load_denoiser(nano, device="cpu", dtype=dtype, quantize="none")
    conditioning = told(batch=2).to("cpu", dtype)
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[1] = False
    other = conditioning.embeds.clone()
    other[1] = 31.0
    noisy, sigma = torch.randn(2, 16, 8, 8).to(dtype), torch.tensor([0.4, 0.6])

    def answer(embeds: torch.Tensor, mask: torch.Tensor | None, row: slice) -> torch.Tensor:
        controls = tuple(control[row] for control in conditioning.controls)
        asked = Conditioning(embeds=embeds[row], mask=mask if mask is None else mask[row], controls=controls)
        with torch.no_grad():
            return family.predict(model, noisy[row], sigma[row], asked)

    both = answer(conditioning.embeds, mask, slice(0, 2))
    assert bool(both.isfinite().all())
    assert torch.equal(answer(other, mask, slice(0, 2)), both)
    alone = answer(conditioning.embeds, None, slice(0, 1))
    assert float((both[:1] - alone).norm() / alone.norm()) < (1e-5 if dtype == torch.float32 else 0.02)
