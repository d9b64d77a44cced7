"""The embedded base and the demo's pairs, as they lie in the tree."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime.demo import bars, components, make_base, make_data, shapes, tokenizer

DEMO = Path(make_base.__file__).parent
BASE, DATA = DEMO / "base", DEMO / "data"
WEIGHTS = sorted(BASE.glob("*/*.safetensors"))


@pytest.fixture(scope="module")
def pipe() -> Any:
    return components.load(BASE)


def stems(folder: str, suffix: str) -> list[str]:
    return sorted(path.stem for path in (DATA / folder).glob(f"*{suffix}"))


def test_base_is_small_and_plain() -> None:
    files = [path for path in BASE.rglob("*") if not path.is_dir()]
    assert make_base.folder_bytes(BASE) <= make_base.MAX_BYTES == 12 * 2**20
    assert [path for path in files if path.is_symlink()] == []
    assert {path.parent.name for path in WEIGHTS} == {"transformer", "vae", "text_encoder"}


@pytest.mark.parametrize("path", WEIGHTS, ids=lambda path: path.parent.name)
def test_weights_are_bf16_and_finite(path: Path) -> None:
    from safetensors.torch import load_file

    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert b'"F32"' not in data[8 : 8 + length] and b'"BF16"' in data[8 : 8 + length]
    assert all(bool(tensor.isfinite().all()) for tensor in load_file(path).values())


def test_base_reads_as_the_real_classes(pipe: Any) -> None:
    names = {name: type(part).__name__ for name, part in pipe.components.items()}
    assert type(pipe).__name__ == "QwenImageEditPipeline"
    assert names == {
        "scheduler": "FlowMatchEulerDiscreteScheduler",
        "vae": "AutoencoderKLQwenImage",
        "text_encoder": "Qwen2_5_VLForConditionalGeneration",
        "tokenizer": "Qwen2Tokenizer",
        "processor": "Qwen2VLProcessor",
        "transformer": "QwenImageTransformer2DModel",
    }
    assert (pipe.transformer.config.in_channels, pipe.transformer.config.patch_size) == (64, 2)
    published = {name: pipe.scheduler.config[name] for name in components.SCHEDULER}
    assert published == components.SCHEDULER


@pytest.mark.parametrize(
    ("template", "count"), [(tokenizer.EDIT_PREFIX, 64), (tokenizer.T2I_PREFIX, 34)], ids=["edit", "t2i"]
)
def test_prefix_has_the_tokens_that_diffusers_drops(pipe: Any, template: str, count: int) -> None:
    assert len(pipe.tokenizer(template).input_ids) == count


def test_templates_are_those_of_diffusers(pipe: Any) -> None:
    from diffusers import QwenImagePipeline

    text_to_image = QwenImagePipeline(*[None] * 5)
    assert pipe.prompt_template_encode == tokenizer.EDIT_PREFIX + tokenizer.SUFFIX
    assert pipe.prompt_template_encode_start_idx == 64
    assert text_to_image.prompt_template_encode.startswith(tokenizer.T2I_PREFIX)
    assert text_to_image.prompt_template_encode_start_idx == 34


@pytest.mark.parametrize("text", ["make it blue", "把图片变成蓝色", "naïve café", "\tx\n", "🙂"])
def test_any_text_round_trips(pipe: Any, text: str) -> None:
    assert pipe.tokenizer.decode(pipe.tokenizer(text).input_ids) == text


def test_embeddings_keep_prompts_and_pictures_apart(pipe: Any) -> None:
    red, blue = Image.new("RGB", (64, 64), "red"), Image.new("RGB", (64, 64), "blue")
    text, mask = components.encode(pipe, ["paint it green"] * 2 + ["paint it black"], [red, blue, red])
    assert mask.all() and text.shape[2] == components.HIDDEN
    assert float((text[0] - text[1]).abs().max()) > 0.1
    assert float((text[0] - text[2]).abs().max()) > 0.1


def test_vae_meets_its_bar(pipe: Any) -> None:
    rng = np.random.default_rng(bars.HELD_OUT_SEED + 2)
    images = components.pixels([shapes.draw(shapes.scene(rng)) for _ in range(16)])
    assert bars.vae_psnr(pipe.vae, images) >= bars.VAE_PSNR_DB


def test_latents_are_those_of_the_pipeline(pipe: Any) -> None:
    import torch

    image = shapes.draw(bars.held_out(1)[0].control)
    frames = pipe.image_processor.preprocess(image, 64, 64).unsqueeze(2)
    with torch.no_grad():
        wanted = pipe._pack_latents(pipe._encode_vae_image(frames, None), 1, 16, 8, 8)
    torch.testing.assert_close(components.latents(pipe.vae, components.pixels([image])), wanted)


def test_base_edits_what_it_has_not_seen(pipe: Any) -> None:
    edits = bars.held_out(10, seed=bars.HELD_OUT_SEED + 3)
    seen = bars.render(pipe, edits, steps=8)
    judged = [bars.judge(edit, picture) for edit, picture in zip(edits, seen, strict=True)]
    assert sum(j.passed for j in judged) >= 8, judged


def test_the_bar_refuses_the_control_and_the_wrong_colour() -> None:
    for edit in bars.held_out(20):
        control, target = components.pixels([shapes.draw(edit.control), shapes.draw(edit.target)])
        assert bars.judge(edit, target).passed
        assert not bars.judge(edit, control).passed
        assert not bars.judge(edit, 255 - target).passed


def test_psnr_of_a_known_error() -> None:
    black = np.zeros((1, 2, 2, 3), np.uint8)
    assert bars.psnr(black, black + 51) == pytest.approx(20 * math.log10(5))


def test_every_two_colours_are_at_least_50_apart() -> None:
    values = np.array(list(shapes.COLOURS.values()), dtype=float)
    apart = np.abs(values[:, None] - values[None]).mean(-1)
    assert apart[~np.eye(len(values), dtype=bool)].min() >= 50 >= 2 * bars.EDITED_ERROR


def test_data_is_24_pairs_of_which_4_are_held_out() -> None:
    held_out = (DATA / "holdout.txt").read_text(encoding="utf-8").splitlines()
    targets = stems("training_images", ".png")
    assert len(targets) == 24
    assert targets == stems("control_images", ".png") == stems("training_images", ".txt")
    assert len(set(held_out)) == 4 and set(held_out) <= set(targets)
    assert {stem.split("-")[0] for stem in held_out} == set(shapes.KINDS)


def test_data_is_what_make_data_makes() -> None:
    made = make_data.pairs()
    assert sorted(pair.stem for pair in made) == stems("training_images", ".png")
    for pair in made:
        for folder, image in (("training_images", pair.target), ("control_images", pair.control)):
            with Image.open(DATA / folder / f"{pair.stem}.png") as saved:
                assert (saved.size, saved.mode) == ((64, 64), "RGB")
                assert saved.tobytes() == image.tobytes()
        caption = (DATA / "training_images" / f"{pair.stem}.txt").read_bytes()
        assert caption == (pair.caption + "\n").encode()
    assert len({pair.caption for pair in made}) >= 12
    assert make_data.pairs(seed=make_data.SEED + 1)[0].control.tobytes() != made[0].control.tobytes()
