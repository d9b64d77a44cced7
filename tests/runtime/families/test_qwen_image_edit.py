"""Both edit families against diffusers' own pipelines, on the embedded base."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runtime.data import images
from runtime.demo import shapes
from runtime.families.base import Conditioning
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.families.qwen_image_edit_plus import QwenImageEditPlus

SPLIT = ["<|vision_start|>", "<|image_pad|>", "<|vision_end|>"]


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return shapes.draw(shapes.edit(np.random.default_rng(2)).control)


@pytest.fixture(scope="module")
def edit(nano: Path) -> Any:
    return QwenImageEdit().load_encoders(nano, text_device="cpu", vae_device="cpu", dtype=torch.float32)


@pytest.fixture(scope="module")
def plus(nano: Path) -> Any:
    return QwenImageEditPlus().load_encoders(nano, text_device="cpu", vae_device="cpu", dtype=torch.float32)


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


def test_encoders_are_frozen_and_without_denoiser(edit: Any) -> None:
    assert edit.pipeline.transformer is None
    for model in (edit.pipeline.text_encoder, edit.pipeline.vae):
        assert not model.training and not any(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("family", "dropped"), [(QwenImageEdit, 64), (QwenImageEditPlus, 64)])
def test_template_prefix_is_what_the_pipeline_drops(edit: Any, plus: Any, family: Any, dropped: int) -> None:
    """The embedded tokenizer is pruned from the real one: another split would cut into the prompt."""
    pipeline = (edit if family is QwenImageEdit else plus).pipeline
    assert pipeline.prompt_template_encode_start_idx == family.dropped_tokens == dropped
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    if family is QwenImageEdit:
        prefix = prefix.removesuffix("".join(SPLIT))
    assert len(pipeline.tokenizer(prefix)["input_ids"]) == dropped


def tokens_of(pipeline: Any, text: str) -> int:
    return len(pipeline.tokenizer(text)["input_ids"])


@pytest.mark.parametrize(
    ("size", "image_tokens"), [((64, 64), 4), ((56, 56), 4), ((112, 56), 8), ((224, 224), 64)]
)
def test_edit_embeds_are_prompt_picture_and_template(
    edit: Any, picture: Image.Image, size: tuple[int, int], image_tokens: int
) -> None:
    """One token for 28 x 28 pixels, two for start and end of the picture, the template's tail."""
    prompt = "paint the circle red"
    embeds = QwenImageEdit().encode_prompt(edit, prompt, [picture.resize(size)])
    tail = tokens_of(edit.pipeline, "<|im_end|>\n<|im_start|>assistant\n")
    assert embeds.shape == (2 + image_tokens + tokens_of(edit.pipeline, prompt) + tail, 64)
    assert not embeds.requires_grad


def test_a_long_caption_is_not_cut(edit: Any, picture: Image.Image) -> None:
    long, longer = ("red " * words for words in (1100, 1101))
    lengths = [len(QwenImageEdit().encode_prompt(edit, text, [picture])) for text in (long, longer)]
    assert lengths[0] > 1100 and lengths[1] > lengths[0]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_plus_embeds_number_each_picture(plus: Any, picture: Image.Image, count: int) -> None:
    prompt = "paint the circle red"
    embeds = QwenImageEditPlus().encode_prompt(plus, prompt, [picture] * count)
    tail = tokens_of(plus.pipeline, "<|im_end|>\n<|im_start|>assistant\n")
    numbered = sum(tokens_of(plus.pipeline, f"Picture {n + 1}: ") + 2 + 4 for n in range(count))
    assert embeds.shape == (numbered + tokens_of(plus.pipeline, prompt) + tail, 64)


def test_the_two_families_tell_one_picture_differently(edit: Any, plus: Any, picture: Image.Image) -> None:
    one = QwenImageEdit().encode_prompt(edit, "x", [picture])
    other = QwenImageEditPlus().encode_prompt(plus, "x", [picture])
    assert len(other) > len(one)


def test_published_sizes_for_the_text_encoder() -> None:
    """Edit shows it a megapixel, plus 384 x 384; one constant for both blurs the control."""
    assert QwenImageEdit.vl_pixels == 1024 * 1024
    assert QwenImageEditPlus.vl_pixels == 384 * 384


def test_prompt_is_that_of_diffusers_own_pipeline(edit: Any, picture: Image.Image) -> None:
    embeds, mask = edit.pipeline.encode_prompt(
        prompt=["make it red"], image=picture, device=torch.device("cpu")
    )
    assert mask is None  # nothing is padded in a batch of one
    assert torch.equal(QwenImageEdit().encode_prompt(edit, "make it red", [picture]), embeds[0])


def test_controls_of_one_prompt_change_the_embeds(edit: Any, picture: Image.Image) -> None:
    dark = Image.new("RGB", picture.size, (10, 10, 10))
    one, other = (QwenImageEdit().encode_prompt(edit, "x", [control]) for control in (picture, dark))
    assert one.shape == other.shape and not torch.allclose(one, other, atol=1e-3)


def test_latents_are_those_of_diffusers_own_pipeline(edit: Any, picture: Image.Image) -> None:
    pipeline = edit.pipeline
    latents = QwenImageEdit().encode_image(edit, torch.from_numpy(images.to_array(picture)))
    assert latents.shape == (16, 8, 8)
    reference = pipeline._encode_vae_image(
        pipeline.image_processor.preprocess(picture, 64, 64)[:, :, None], None
    )
    assert torch.allclose(latents, reference[0, :, 0], atol=1e-5)
    assert 0.2 < float(latents.std()) < 2.0  # normalised by the VAE's own mean and deviation


def test_decoding_what_was_encoded_gives_the_picture(edit: Any, picture: Image.Image) -> None:
    family = QwenImageEdit()
    pixels = torch.from_numpy(images.to_array(picture))
    decoded = family.decode(edit.pipeline.vae, family.encode_image(edit, pixels)[None])[0]
    assert decoded.shape == (3, 64, 64)
    mse = float((decoded.clamp(-1, 1) - pixels).square().mean())
    assert 10 * np.log10(4 / mse) > 27


def test_same_pictures_of_odd_size_get_the_same_latents(edit: Any) -> None:
    """Target and control share the crop, or the edit learns a shift."""
    odd = Image.effect_noise((33, 65), 80).convert("RGB")
    one, other = (
        QwenImageEdit().encode_image(
            edit, torch.from_numpy(images.to_array(images.fit_cover(odd.copy(), (64, 32))))
        )
        for _ in range(2)
    )
    assert torch.equal(one, other)


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

    def spy(**named: Any) -> Any:
        asked.update(named)
        return denoiser(**named)

    with torch.no_grad():
        QwenImageEdit().predict(spy, noisy, torch.tensor([0.3]), conditioning)  # type: ignore[arg-type]
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


def test_2511_gives_controls_the_modulation_of_sigma_zero(nano: Path, tmp_path: Path, denoiser: Any) -> None:
    model = tmp_path / "2511"
    shutil.copytree(nano, model)
    config = json.loads((model / "transformer" / "config.json").read_text(encoding="utf-8"))
    text = json.dumps({**config, "zero_cond_t": True})
    (model / "transformer" / "config.json").write_text(text, encoding="utf-8")
    family = QwenImageEditPlus()
    newer = family.load_denoiser(model, device="cpu", dtype=torch.float32, quantize="none")
    noisy, conditioning = torch.randn(1, 16, 8, 8), told()
    with torch.no_grad():
        answers = [family.predict(d, noisy, torch.tensor([0.9]), conditioning) for d in (denoiser, newer)]
        at_zero = [family.predict(d, noisy, torch.tensor([0.0]), conditioning) for d in (denoiser, newer)]
    assert not torch.allclose(*answers, atol=1e-3)
    assert torch.allclose(*at_zero, atol=1e-5)


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
