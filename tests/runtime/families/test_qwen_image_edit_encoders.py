"""What both edit families tell a denoiser of prompts and pictures, against diffusers' own pipelines."""

import json
import re
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from runtime.data import images
from runtime.data.buckets import cover
from runtime.demo import shapes
from runtime.errors import DataError
from runtime.families.base import Encoders, PromptAsk
from runtime.families.qwen_image_edit import PICTURE, QwenImageEdit, cut_prompt
from runtime.families.qwen_image_edit_plus import QwenImageEditPlus

EDIT, PLUS = QwenImageEdit(), QwenImageEditPlus()
PROMPT = "paint the circle red"
LIMIT = 1024


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return shapes.draw(shapes.edit(np.random.default_rng(2)).control)


@pytest.fixture(scope="module")
def edit(nano: Path) -> Any:
    return load(nano, EDIT)


@pytest.fixture(scope="module")
def plus(nano: Path) -> Any:
    return load(nano, PLUS)


def load(nano: Path, family: QwenImageEdit, **named: Any) -> Encoders:
    dtypes = {"text_dtype": torch.float32, "vae_dtype": torch.float32, **named}
    return family.load_encoders(nano, text_device="cpu", vae_device="cpu", **dtypes)


def embeds(family: QwenImageEdit, encoders: Encoders, prompt: str, *seen: Image.Image) -> torch.Tensor:
    return family.encode_prompts(encoders, [PromptAsk(prompt=prompt, images=seen)], LIMIT)[0].embeds


def latents(encoders: Encoders, image: Image.Image) -> torch.Tensor:
    return EDIT.encode_images(encoders, torch.from_numpy(images.to_array(image))[None])[0]


def error(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def test_encoders_are_frozen_and_without_denoiser(edit: Any) -> None:
    assert edit.pipeline.transformer is None
    for model in (edit.pipeline.text_encoder, edit.pipeline.vae):
        assert not model.training and not any(p.requires_grad for p in model.parameters())


def test_each_encoder_has_its_own_dtype(nano: Path) -> None:
    pipeline = load(nano, PLUS, text_dtype=torch.bfloat16).pipeline
    assert (pipeline.text_encoder.dtype, pipeline.vae.dtype) == (torch.bfloat16, torch.float32)


def test_either_encoder_is_loaded_alone_and_gone_with_its_encoders(
    nano: Path, edit: Any, picture: Image.Image
) -> None:
    encoders = load(nano, EDIT, text_encoder=False)
    assert encoders.pipeline.text_encoder is None
    assert torch.equal(latents(encoders, picture), latents(edit, picture))
    vae = weakref.ref(encoders.pipeline.vae)
    del encoders
    assert vae() is None, "the text encoder comes next and needs its room"
    encoders = load(nano, EDIT, vae=False)
    assert encoders.pipeline.vae is None
    assert torch.equal(embeds(EDIT, encoders, PROMPT, picture), embeds(EDIT, edit, PROMPT, picture))


@pytest.mark.parametrize(("family", "dropped"), [(EDIT, 64), (PLUS, 64)])
def test_template_prefix_is_what_the_pipeline_drops(edit: Any, plus: Any, family: Any, dropped: int) -> None:
    """The embedded tokenizer is pruned from the real one: another split would cut into the prompt."""
    pipeline = (edit if family is EDIT else plus).pipeline
    assert pipeline.prompt_template_encode_start_idx == family.facts.dropped_tokens == dropped
    prefix = pipeline.prompt_template_encode.split("{}")[0].removesuffix(PICTURE)
    assert len(pipeline.tokenizer(prefix)["input_ids"]) == dropped


# Rows of tokens: 64 of the system prompt, the pictures, 4 of PROMPT, 5 of the template's end. A picture of
# 64 px is 4 tokens between a start and an end, and 5 more where "Picture 1: " numbers it.
@pytest.mark.parametrize(
    ("family", "pictures", "length"),
    [(EDIT, 0, 73), (EDIT, 1, 79), (PLUS, 0, 73), (PLUS, 1, 84), (PLUS, 2, 95), (PLUS, 3, 106)],
)
def test_each_form_of_the_prompt_has_its_tokens(
    edit: Any, plus: Any, picture: Image.Image, family: Any, pictures: int, length: int
) -> None:
    encoders = edit if family is EDIT else plus
    seen: list[Any] = []
    hook = encoders.pipeline.text_encoder.model.register_forward_pre_hook(
        lambda _, given, named: seen.append(named["input_ids"][0].tolist()), with_kwargs=True
    )
    try:
        answer = embeds(family, encoders, PROMPT, *[picture] * pictures)
    finally:
        hook.remove()
    named = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "Picture")
    ids = [encoders.pipeline.tokenizer.encode(name)[0] for name in named]
    numbers = pictures if family is PLUS else 0
    assert [seen[0].count(token) for token in ids] == [pictures, 4 * pictures, pictures, numbers]
    assert len(seen[0]) == length and answer.shape == (length - 64, 64) and not answer.requires_grad


@pytest.mark.parametrize(
    ("family", "size", "tokens"),
    [
        (EDIT, (64, 64), 4),
        (EDIT, (56, 56), 4),
        (EDIT, (112, 56), 8),
        (EDIT, (224, 224), 64),
        (EDIT, (1024, 1024), 35 * 35),
        (PLUS, (384, 384), 14 * 14),
    ],
)
def test_a_picture_is_a_token_for_28_by_28_pixels(
    edit: Any, plus: Any, picture: Image.Image, family: Any, size: tuple[int, int], tokens: int
) -> None:
    """The two largest are the published ones; one constant for both families blurs the control.

    The processor takes at most 1,003,520 pixels, of which 35 x 35 tokens are the largest square.
    """
    encoders = edit if family is EDIT else plus
    numbered = 5 if family is PLUS else 0
    assert size[0] * size[1] <= family.facts.vl_pixels
    assert len(embeds(family, encoders, PROMPT, picture.resize(size))) == 9 + numbered + 2 + tokens


@pytest.mark.parametrize(("family", "pictures"), [(EDIT, 0), (EDIT, 1), (PLUS, 0), (PLUS, 1), (PLUS, 2)])
def test_one_prompt_is_bit_for_bit_that_of_diffusers_own_pipeline(
    edit: Any,
    plus: Any,
    picture: Image.Image,
    monkeypatch: pytest.MonkeyPatch,
    family: Any,
    pictures: int,
) -> None:
    """And without the logits, which at full size are the larger part of what the pipeline allocates."""
    encoders = edit if family is EDIT else plus
    pipeline, seen = encoders.pipeline, [picture, picture.rotate(90)][:pictures]
    hook = pipeline.text_encoder.lm_head.register_forward_pre_hook(lambda *given: pytest.fail("logits"))
    try:
        ours = embeds(family, encoders, PROMPT, *seen)
    finally:
        hook.remove()
    if family is EDIT and not seen:  # the pipeline itself takes no prompt without a picture
        template = pipeline.prompt_template_encode.replace(PICTURE, "")
        monkeypatch.setattr(pipeline, "prompt_template_encode", template)
    given = (seen if family is PLUS else seen[0]) if seen else None
    on_a_grid(pipeline, monkeypatch)
    theirs, mask = pipeline.encode_prompt(prompt=[PROMPT], image=given, device=torch.device("cpu"))
    assert mask is None  # nothing is padded in a batch of one
    assert torch.equal(ours, theirs[0])


def on_a_grid(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the pipeline's own call what it leaves out, which image is which token (diffusers issue 14194)."""
    processor, forward, kinds = pipeline.processor, pipeline.text_encoder.forward, []

    def processed(*given: Any, **named: Any) -> Any:
        inputs = processor(*given, **named)
        kinds.append(inputs.get("mm_token_type_ids"))
        return inputs

    monkeypatch.setattr(pipeline, "processor", processed)
    monkeypatch.setattr(
        pipeline.text_encoder, "forward", lambda **named: forward(mm_token_type_ids=kinds[-1], **named)
    )


def test_image_tokens_stand_on_a_grid(edit: Any, picture: Image.Image) -> None:
    """Turned by a quarter, a picture of 2 x 1 tokens' worth has another grid and the same number of tokens."""
    wide, seen = picture.resize((112, 56)), []
    rotary = edit.pipeline.text_encoder.model.language_model.rotary_emb
    hook = rotary.register_forward_pre_hook(
        lambda module, given, named: seen.append((given, named)), with_kwargs=True
    )
    try:
        embeds(EDIT, edit, PROMPT, wide)
    finally:
        hook.remove()
    (given, named) = seen[0]
    positions = named.get("position_ids", given[1] if len(given) > 1 else None)
    assert positions.shape[0] == 3  # time, height, width
    height, width = positions[1, 0], positions[2, 0]
    assert bool((height != width).any())


def asks_of_all_kinds(picture: Image.Image) -> dict[Any, list[PromptAsk]]:
    """Captions of 3, 9, 40 tokens and none; no, one and three pictures of several sizes."""
    other = Image.new("RGB", (112, 56), (10, 200, 30))
    asks = [
        PromptAsk(prompt="paint it red", images=(picture,)),
        PromptAsk(prompt="paint the circle red, paint the square blue"),
        PromptAsk(prompt="", images=(other,)),
        PromptAsk(prompt="red " * 40, images=(picture.rotate(180),)),
    ]
    several = PromptAsk(prompt="blue", images=(picture.resize((84, 140)), other, picture))
    return {EDIT: asks, PLUS: [*asks[:2], several, *asks[2:]]}


@pytest.mark.parametrize("family", [EDIT, PLUS])
def test_a_batch_is_what_each_prompt_gets_alone(
    edit: Any, plus: Any, picture: Image.Image, family: Any
) -> None:
    encoders, asks = edit if family is EDIT else plus, asks_of_all_kinds(picture)[family]
    together = family.encode_prompts(encoders, asks, LIMIT)
    for ask, one in zip(asks, together, strict=True):
        alone = embeds(family, encoders, ask.prompt, *ask.images)
        assert one.embeds.shape == alone.shape and error(one.embeds, alone) < 1e-5
        assert one.cut == ""


def test_padding_never_reaches_an_embedding(nano: Path, picture: Image.Image) -> None:
    encoders, asks = load(nano, PLUS, vae=False), asks_of_all_kinds(picture)[PLUS]
    before = PLUS.encode_prompts(encoders, asks, LIMIT)
    embedding = encoders.pipeline.text_encoder.get_input_embeddings().weight
    embedding[encoders.pipeline.tokenizer.pad_token_id] = 1e3
    after = PLUS.encode_prompts(encoders, asks, LIMIT)
    assert all(torch.equal(old.embeds, new.embeds) for old, new in zip(before, after, strict=True))


def test_padding_stands_behind_whatever_the_folder_says(nano: Path, tmp_path: Path) -> None:
    """Before the prompt, a padded position would see nothing at all, and some kernels answer that with NaN."""
    model = tmp_path / "left"
    shutil.copytree(nano, model)
    path = model / "tokenizer" / "tokenizer_config.json"
    document = {**json.loads(path.read_text(encoding="utf-8")), "padding_side": "left"}
    path.write_text(json.dumps(document), encoding="utf-8")
    tokenizer = load(model, EDIT, vae=False).pipeline.processor.tokenizer
    assert tokenizer(["red", "red red red"], padding=True)["attention_mask"][0][0] == 1


def test_prompts_of_one_length_are_not_masked(edit: Any, picture: Image.Image) -> None:
    """A mask forces attention off its fast path."""
    asks = [PromptAsk(prompt=f"paint it {colour}", images=(picture,)) for colour in ("red", "blue")]
    masks: list[Any] = []
    layer = edit.pipeline.text_encoder.model.language_model.layers[0]
    hook = layer.register_forward_pre_hook(
        lambda _, given, named: masks.append(named["attention_mask"]), with_kwargs=True
    )
    try:
        EDIT.encode_prompts(edit, asks, LIMIT)
        EDIT.encode_prompts(edit, [*asks, PromptAsk(prompt="red")], LIMIT)
    finally:
        hook.remove()
    assert masks[0] is None and masks[1] is not None


def test_each_prompt_keeps_its_own_picture(edit: Any, picture: Image.Image) -> None:
    dark = Image.new("RGB", picture.size, (10, 10, 10))
    asks = [PromptAsk(prompt="x", images=(image,)) for image in (picture, dark)]
    forth, back = (EDIT.encode_prompts(edit, order, LIMIT) for order in (asks, asks[::-1]))
    assert not torch.allclose(forth[0].embeds, forth[1].embeds, atol=1e-3)
    for one, other in zip(forth, back[::-1], strict=True):
        assert torch.allclose(one.embeds, other.embeds, atol=1e-5)


@pytest.mark.parametrize(("words", "cut"), [(8, ""), (9, " red"), (12, " red" * 4)])
def test_a_prompt_over_the_limit_is_cut_and_says_what_is_missing(
    edit: Any, picture: Image.Image, words: int, cut: str
) -> None:
    """The limit is on the prompt's own tokens, whatever else is in the batch."""
    long = PromptAsk(prompt=" red" * words, images=(picture,))
    short, encoded = EDIT.encode_prompts(edit, [PromptAsk(prompt=PROMPT), long], 8)
    assert (encoded.cut, short.cut) == (cut, "") and len(short.embeds) == 9
    assert error(encoded.embeds, embeds(EDIT, edit, " red" * 8, picture)) < 1e-5


@given(text=st.text(alphabet=" \n\tabré\u0301日本😀👩‍👩‍👧!'9", max_size=40), limit=st.integers(1, 30))
def test_cutting_loses_nothing_and_keeps_the_limit(edit: Any, text: str, limit: int) -> None:
    tokenizer = edit.pipeline.tokenizer
    kept, cut = cut_prompt(tokenizer, text, limit)
    assert kept + cut == text
    assert len(tokenizer(kept)["input_ids"]) <= limit
    assert bool(cut) == (len(tokenizer(text)["input_ids"]) > limit)


@pytest.mark.parametrize("token", ["<|image_pad|>", "<|vision_start|>", "<|im_end|>"])
def test_a_control_token_in_a_prompt_is_refused(edit: Any, picture: Image.Image, token: str) -> None:
    """A placeholder would take the picture of the next prompt."""
    asks = [PromptAsk(prompt=f"red {token}"), PromptAsk(prompt="x", images=(picture,))]
    with pytest.raises(DataError, match=re.escape(f"contains {token}")) as caught:
        EDIT.encode_prompts(edit, asks, LIMIT)
    assert caught.value.remedy


def test_more_pictures_than_the_family_takes_are_refused(edit: Any, picture: Image.Image) -> None:
    with pytest.raises(ValueError, match="2 images for one prompt, expected at most 1"):
        embeds(EDIT, edit, PROMPT, picture, picture)


def test_braces_in_a_prompt_are_text(edit: Any) -> None:
    assert len(embeds(EDIT, edit, "{red} {} {0}")) > len(embeds(EDIT, edit, "red"))


@pytest.mark.parametrize("colour", ["drawn", "black", "white", "grey"])
def test_latents_are_those_of_diffusers_own_pipeline(edit: Any, picture: Image.Image, colour: str) -> None:
    image = picture if colour == "drawn" else Image.new("RGB", (64, 64), colour)
    pipeline, ours = edit.pipeline, latents(edit, image)
    assert ours.shape == (16, 8, 8)
    reference = pipeline._encode_vae_image(
        pipeline.image_processor.preprocess(image, 64, 64)[:, :, None], None
    )
    assert torch.allclose(ours, reference[0, :, 0], atol=1e-5)
    if colour == "drawn":
        assert 0.2 < float(ours.std()) < 2.0  # normalised by the VAE's own mean and deviation


def test_a_batch_of_images_is_what_each_gets_alone(edit: Any) -> None:
    pixels = torch.rand(3, 3, 48, 64, generator=torch.Generator().manual_seed(3)) * 2 - 1
    together = EDIT.encode_images(edit, pixels)
    assert together.shape == (3, 16, 6, 8)
    for index, one in enumerate(together):
        assert error(one, EDIT.encode_images(edit, pixels[index : index + 1])[0]) < 1e-5


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (0.0, 255.0, "from 0 to 255"),
        (-1.002, 1.0, "from -1.002 to 1"),
        (-1.0, 1.002, "from -1 to 1.002"),
        (-1.0, float("nan"), "nan"),
        (-1.0005, 1.0005, ""),
    ],
)
def test_pixels_out_of_range_are_refused(edit: Any, low: float, high: float, said: str) -> None:
    pixels = torch.zeros(2, 3, 16, 16)
    pixels[1, 2, 0, 0], pixels[0, 0, 3, 3] = low, high
    if not said:
        assert EDIT.encode_images(edit, pixels).shape == (2, 16, 2, 2)
        return
    with pytest.raises(ValueError, match=said):
        EDIT.encode_images(edit, pixels)


@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 4, 16, 16), (1, 1, 16, 16)])
def test_pixels_of_another_shape_are_refused(edit: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[B, 3, H, W\]"):
        EDIT.encode_images(edit, torch.zeros(shape))


def test_decoding_what_was_encoded_gives_the_picture(edit: Any, picture: Image.Image) -> None:
    family = QwenImageEdit()
    pixels = torch.from_numpy(images.to_array(picture))
    decoded = family.decode(edit.pipeline.vae, latents(edit, picture)[None])[0]
    assert decoded.shape == (3, 64, 64)
    mse = float((decoded.clamp(-1, 1) - pixels).square().mean())
    assert 10 * np.log10(4 / mse) > 27


def test_same_pictures_of_odd_size_get_the_same_latents(edit: Any) -> None:
    """Target and control share the crop, or the edit learns a shift."""
    odd = Image.effect_noise((33, 65), 80).convert("RGB")
    one, other = (latents(edit, images.fit(odd.copy(), cover((65, 33), (64, 32)))) for _ in range(2))
    assert torch.equal(one, other)
