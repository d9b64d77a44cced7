"""The sampler: same noise for base and adapter, and the published pipeline's steps."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runtime.data import images
from runtime.demo import shapes
from runtime.families.base import Conditioning, PromptAsk, conditioning_of
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.inference import sampler
from runtime.training import draws

FAMILY = QwenImageEdit()
SHAPE = (16, 8, 8)


@pytest.fixture(scope="module")
def told() -> Conditioning:
    return conditioning_of(
        {
            "prompt_embeds": torch.randn(5, 64),
            "control_0": torch.randn(16, 8, 8),
            "target": torch.zeros(16, 8, 8),
        }
    )


class Spy:
    """A denoiser that points at zero, and remembers."""

    def __init__(self, answer: Any = None) -> None:
        self.asked: list[tuple[torch.Tensor, float, Conditioning]] = []
        self.answer = answer

    def __call__(self, noisy: torch.Tensor, sigma: torch.Tensor, told: Conditioning) -> torch.Tensor:
        self.asked.append((noisy.clone(), float(sigma), told))
        return self.answer(noisy, told) if self.answer else torch.zeros_like(noisy)


def run(nano: Path, predict: Any, told: Conditioning, **changes: Any) -> torch.Tensor:
    settings: dict[str, Any] = {"steps": 4, "seed": 42, "name": "p0", **changes}
    return sampler.sample(FAMILY, predict, nano, SHAPE, told, **settings)[0]


def test_noise_is_a_function_of_seed_and_sample_alone(nano: Path, told: Conditioning) -> None:
    starts = []
    for changes in ({}, {}, {"steps": 2}, {"seed": 7}, {"name": "p1"}):
        spy = Spy()
        run(nano, spy, told, **changes)
        starts.append(spy.asked[0][0])
    assert torch.equal(starts[0], starts[1]) and torch.equal(starts[0], starts[2])
    assert not torch.equal(starts[0], starts[3]) and not torch.equal(starts[0], starts[4])
    assert torch.equal(starts[0], draws.noise((1, *SHAPE), "sample", 42, "p0"))


def test_sigmas_fall_from_one_as_the_schedule_says(nano: Path, told: Conditioning) -> None:
    spy = Spy()
    run(nano, spy, told)
    sigmas = [sigma for _, sigma, _ in spy.asked]
    assert sigmas == pytest.approx(FAMILY.scheduler(nano, 16, 4).sigmas[:-1].tolist(), abs=1e-6)
    assert sigmas[0] == 1.0 and sigmas == sorted(sigmas, reverse=True)


def test_the_true_velocity_leads_to_the_target(nano: Path, told: Conditioning) -> None:
    target, noise = torch.randn(1, *SHAPE), draws.noise((1, *SHAPE), "sample", 42, "p0")
    latents = run(nano, lambda noisy, sigma, told: noise - target, told)
    assert torch.allclose(latents, target, atol=1e-5)
    assert latents.dtype == torch.float32 and not latents.requires_grad


def test_guidance_of_one_is_none(nano: Path, told: Conditioning) -> None:
    plain, guided = Spy(lambda noisy, _: noisy * 0.1), Spy(lambda noisy, _: noisy * 0.1)
    one = run(nano, plain, told)
    other = run(nano, guided, told, negative=told, guidance=1.0)
    assert torch.equal(one, other) and len(guided.asked) == len(plain.asked) == 4


def test_guidance_asks_both_and_keeps_the_norm_of_each_token(nano: Path, told: Conditioning) -> None:
    negative = Conditioning(embeds=told.embeds * 0, mask=None, controls=told.controls)
    yes, no = torch.randn(1, *SHAPE), torch.randn(1, *SHAPE)
    spy = Spy(lambda noisy, asked: no if asked is negative else yes)
    run(nano, spy, told, steps=2, negative=negative, guidance=4.0)
    assert [asked[2] is negative for asked in spy.asked] == [False, True, False, True]
    guided = sampler._guide(yes, no, 4.0)

    def tokens(latents: torch.Tensor) -> torch.Tensor:
        packed: torch.Tensor = QwenImageEdit.pipeline_class._pack_latents(latents, 1, 16, 8, 8)
        return packed

    mixed = tokens(no) + 4.0 * (tokens(yes) - tokens(no))
    expected = mixed * tokens(yes).norm(dim=-1, keepdim=True) / mixed.norm(dim=-1, keepdim=True)
    assert torch.allclose(tokens(guided), expected, atol=1e-5)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_latents_are_those_of_diffusers_own_pipeline(
    nano: Path, monkeypatch: pytest.MonkeyPatch, guidance: float
) -> None:
    """Which resizes each control to a megapixel, so its arithmetic is held at 64 px here."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit as module

    monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio: (64, 64, None))
    picture = shapes.draw(shapes.edit(np.random.default_rng(4)).control)
    encoders = FAMILY.load_encoders(
        nano, text_device="cpu", vae_device="cpu", text_dtype=torch.float32, vae_dtype=torch.float32
    )
    denoiser = FAMILY.load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
    control = FAMILY.encode_images(encoders, torch.from_numpy(images.to_array(picture))[None])[0]
    asks = [PromptAsk(prompt=text, images=(picture,)) for text in ("make it red", " ")]
    embeds = [FAMILY.encode_prompts(encoders, [ask], 1024)[0].embeds for ask in asks]
    yes, no = (conditioning_of({"prompt_embeds": e, "control_0": control}) for e in embeds)
    ours = run(
        nano,
        lambda *asked: FAMILY.predict(denoiser, *asked),
        yes,
        negative=no if guidance > 1 else None,
        guidance=guidance,
    )
    pipeline = encoders.pipeline
    pipeline.register_modules(
        transformer=denoiser, scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(nano / "scheduler")
    )
    pipeline.set_progress_bar_config(disable=True)
    noise = draws.noise((1, *SHAPE), "sample", 42, "p0")
    theirs = pipeline(
        image=picture,
        # Not its own, which lack the image's grid: see the family.
        prompt_embeds=embeds[0][None],
        negative_prompt_embeds=embeds[1][None] if guidance > 1 else None,
        true_cfg_scale=guidance,
        height=64,
        width=64,
        num_inference_steps=4,
        latents=pipeline._pack_latents(noise, 1, 16, 8, 8),
        output_type="latent",
    ).images
    unpacked = pipeline._unpack_latents(theirs, 64, 64, 8)[:, :, 0]
    assert torch.allclose(ours, unpacked, atol=1e-4)


def test_to_image_clips_and_rounds() -> None:
    pixels = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0])[None, None].expand(3, 1, 5)
    picture = sampler.to_image(pixels)
    assert [picture.getpixel((x, 0)) for x in range(5)] == [(v, v, v) for v in (0, 0, 128, 255, 255)]


def test_to_image_is_the_inverse_of_to_array() -> None:
    picture = Image.effect_noise((9, 7), 80).convert("RGB")
    again = sampler.to_image(torch.from_numpy(images.to_array(picture)))
    assert np.array_equal(np.asarray(again), np.asarray(picture))
