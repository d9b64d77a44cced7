"""From pictures and prompts to tensors: what each entry's are, whatever is encoded beside it."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from runtime import files
from runtime.cache import build, encode, roundtrip
from runtime.cache.key import Picture, Wanted
from runtime.data import images
from runtime.data.buckets import Placed
from runtime.errors import CacheError, UserError
from runtime.progress import Progress

TOLERANCE = 1e-5
"""Relative, fp32: the norm of the difference over the norm. Kernels for a batch add in another order."""


def encoded(job: build.Job, *, at_once: int) -> list[encode.Encoded]:
    """As the cache phase does it: so many samples are handed on at once."""
    config = job.config.model_copy(
        update={"cache": job.config.cache.model_copy(update={"batch_size": at_once})}
    )
    encoders = encode.load(job.family, job.model, config)
    return [
        one
        for start in range(0, len(job.wants), at_once)
        for one in encode.encode(job.family, encoders, config, job.wants[start : start + at_once])
    ]


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / one.float().norm().clamp_min(1e-12))


def more_controls(lab: Any) -> None:
    """p0 has three controls, p1 two, of sizes of their own; captions are from 2 to 60 words long."""
    folder = lab.root / "dataset" / "control_images"
    for name, source in (("p0_control_1", "p3"), ("p0_control_2", "p4"), ("p1_control_1", "p5")):
        with Image.open(folder / f"{source}.png") as picture:
            picture.resize((48, 80)).save(folder / f"{name}.png")
    for number in range(11):
        text = " ".join(["paint the star"] * (1 + 2 * number))
        (lab.root / "dataset" / "training_images" / f"p{number}.txt").write_text(text, encoding="utf-8")
    lab.scan()


def test_a_batch_equals_single_samples(lab: Any, rebase: Callable[..., Path]) -> None:
    rebase("QwenImageEditPlusPipeline")
    more_controls(lab)
    changes = {"data.caption_dropout_rate": 0.5, "data.processor.controls_resize": "keep"}
    job = lab.job({**changes, "validation.guidance_scale": 2.0})
    alone, together = encoded(job, at_once=1), encoded(job, at_once=4)
    counts = {want.id: len(want.controls) for want in job.wants}
    assert (counts["p0"], counts["p1"], counts["p2"]) == (3, 2, 1)
    for want, one, other in zip(job.wants, alone, together, strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert len([name for name in one.tensors if name.startswith("control_")]) == counts[want.id]
        for name in one.tensors:
            assert one.tensors[name].shape == other.tensors[name].shape
            assert relative(one.tensors[name], other.tensors[name]) <= TOLERANCE, (want.id, name)
    lengths = {one.tensors["prompt_embeds"].shape[0] for one in alone}
    assert len(lengths) > 5
    first = next(i for i, want in enumerate(job.wants) if want.id == "p0")
    assert [tuple(alone[first].tensors[f"control_{i}"].shape) for i in range(3)] == [
        (16, 8, 8),
        (16, 10, 6),
        (16, 10, 6),
    ]


def test_the_cache_asks_for_so_many_at_once(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    job = lab.job({"cache.batch_size": 4, "data.processor.target_size": [32, 32]})
    asked: dict[str, list[int]] = {"encode_images": [], "encode_prompts": []}
    family = type(job.family)
    for name, sizes in asked.items():
        original = getattr(family, name)

        def counted(
            self: Any, encoders: Any, batch: Any, *more: Any, f=original, s=sizes, **named: Any
        ) -> Any:
            s.append(len(batch))
            return f(self, encoders, batch, *more, **named)

        monkeypatch.setattr(family, name, counted)
    monkeypatch.setattr(roundtrip, "chosen", lambda job: [])
    build.build(job, Progress(quiet=True))
    assert asked == {"encode_images": [4, 4, 4, 4, 4, 2], "encode_prompts": [4, 4, 3]}


@pytest.mark.parametrize("component", ["text_encoder", "vae"])
def test_precision_is_kept_in_the_file(lab: Any, held: Any, component: str) -> None:
    lab.cache({f"cache.dtypes.{component}": "bf16"})
    found = {name: str(tensor.dtype) for name, tensor in held.tensors("p0").items()}
    embeds, latents = ("bfloat16", "float32") if component == "text_encoder" else ("float32", "bfloat16")
    assert found == {
        "prompt_embeds": f"torch.{embeds}",
        "target": f"torch.{latents}",
        "control_0": f"torch.{latents}",
    }


def test_grey_black_and_white_reach_the_vae_in_minus_one_to_one(lab: Any) -> None:
    """Pixels in 0..1 give a washed-out adapter and no error."""
    job = lab.job()
    encoders = encode.load(job.family, job.model, job.config)
    for value in (0, 128, 255):
        picture = Image.new("RGB", (64, 64), (value, value, value))
        picture.save(lab.root / "flat.png")
        want = job.wants[0]
        flat = replace(want, target=replace(want.target, path=lab.root / "flat.png"))
        latents = encode.encode(job.family, encoders, job.config, [flat])[0].tensors["target"]
        pixels = torch.from_numpy(images.to_array(picture))
        assert float(pixels.min()) == pytest.approx(value / 127.5 - 1, abs=1e-6)
        reference = encoders.pipeline.vae.encode(pixels[None, :, None]).latent_dist.mode()[0, :, 0]
        config = encoders.pipeline.vae.config
        mean, std = (torch.tensor(x)[:, None, None] for x in (config.latents_mean, config.latents_std))
        assert torch.allclose(latents, (reference - mean) / std, atol=1e-5)
        decoded = job.family.decode(encoders.pipeline.vae, latents[None])[0]
        assert float((decoded - pixels).abs().mean()) < 0.1


@pytest.mark.parametrize(
    ("size", "area", "expected"),
    [((64, 64), 1024 * 1024, (64, 64)), ((64, 64), 1024, (32, 32)), ((128, 32), 1024, (64, 16))],
)
def test_what_the_text_encoder_sees_is_shrunk_never_enlarged(
    size: tuple[int, int], area: int, expected: tuple[int, int]
) -> None:
    assert encode._for_text_encoder(Image.new("RGB", size), area).size == expected


@pytest.mark.parametrize(
    ("pipeline", "tokens"),
    [
        ("QwenImageEditPipeline", 16 * 16),
        ("QwenImageEditPlusPipeline", 14 * 14 + 5),
    ],
)
def test_a_control_is_shown_at_its_familys_size(
    lab: Any, rebase: Callable[..., Path], pipeline: str, tokens: int
) -> None:
    """448 px: as it is for Edit, which takes a megapixel, at 384 px for 2509, which numbers it in 5 tokens more."""
    rebase(pipeline)
    job = lab.job({"data.processor.controls_size": [448, 448]})
    encoders = encode.load(job.family, job.model, job.config)
    want = next(want for want in job.wants if want.id == "p0")
    bare = replace(want, controls=())
    shown, alone = encode.encode(job.family, encoders, job.config, [want, bare])
    more = len(shown.tensors["prompt_embeds"]) - len(alone.tensors["prompt_embeds"])
    assert more == tokens + 2  # where a picture begins and ends


def test_the_background_lies_behind_transparent_pixels(lab: Any) -> None:
    path = lab.root / "clear.png"
    Image.new("RGBA", (64, 64), (0, 0, 0, 0)).save(path)
    picture = Picture(path=path, placed=Placed(size=(64, 64), box=(0, 0, 64, 64)))
    assert encode.fitted(picture, (9, 200, 30)).getcolors() == [(64 * 64, (9, 200, 30))]


# ---- captions


def test_no_dropout_no_empty_prompt(lab: Any, held: Any) -> None:
    assert "empty_embeds" not in held.tensors("p1")
    lab.cache({"data.caption_dropout_rate": 0.1})
    train = [sample.id for sample in lab.job().listed.of("train")]
    empty = [held.tensors(name)["empty_embeds"] for name in train]
    for index, one in enumerate(empty):  # one text, other controls
        assert all(not torch.allclose(one, other, atol=1e-3) for other in empty[index + 1 :])
    assert all("empty_embeds" not in held.tensors(s.id) for s in lab.job().listed.of("holdout"))


def test_the_empty_prompt_is_seen_with_the_controls_of_its_sample(lab: Any) -> None:
    job = lab.job({"data.caption_dropout_rate": 0.5})
    encoders = encode.load(job.family, job.model, job.config)
    want = next(want for want in job.wants if want.split == "train")
    blank = replace(want, document={**want.document, "prompt": "", "empty_prompt": False})
    with_empty, alone = encode.encode(job.family, encoders, job.config, [want, blank])
    assert torch.equal(with_empty.tensors["empty_embeds"], alone.tensors["prompt_embeds"])


def test_each_caption_of_several_has_its_embedding(lab: Any) -> None:
    job = lab.job()
    encoders = encode.load(job.family, job.model, job.config)
    want = next(want for want in job.wants if want.split == "train")
    two = ["make the sky green", "draw a house"]
    several = replace(want, document={**want.document, "alternatives": two})
    singles = [replace(want, document={**want.document, "prompt": text}) for text in two]
    found, *each = encode.encode(job.family, encoders, job.config, [several, *singles])
    assert set(found.tensors) == {
        "target",
        "control_0",
        "prompt_embeds",
        "prompt_embeds_1",
        "prompt_embeds_2",
    }
    for number, one in enumerate(each, 1):
        assert relative(found.tensors[f"prompt_embeds_{number}"], one.tensors["prompt_embeds"]) <= TOLERANCE


def test_a_caption_over_the_limit_names_the_sample_and_what_is_cut(
    lab: Any, held: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "one two three four five six seven eight " * 3
    (lab.root / "dataset" / "training_images" / "p1.txt").write_text(words, encoding="utf-8")
    lab.scan()
    job = lab.job({"data.max_prompt_tokens": 12})
    summary = build.build(job, Progress())
    mine = [note for note in summary.notes if note.startswith("p1: ")]
    (note,) = held.store.entry(held.folder("p1").name)["notes"]
    assert mine == [f"p1: {note}"] and mine[0] in capsys.readouterr().err
    kept, cut = _parts(job, words.strip())
    assert note == f"prompt_embeds: longer than 12 tokens, cut off: {encode._shown(cut)!r}"
    encoders = encode.load(job.family, job.model, job.config)
    want = next(want for want in job.wants if want.id == "p1")
    short = replace(want, document={**want.document, "prompt": kept})
    (again,) = encode.encode(job.family, encoders, job.config, [short])
    assert again.notes == []
    assert relative(held.tensors("p1")["prompt_embeds"], again.tensors["prompt_embeds"]) <= TOLERANCE
    assert build.build(job, Progress(quiet=True)).notes == summary.notes  # a rerun still says it


def _parts(job: build.Job, text: str) -> tuple[str, str]:
    """What twelve tokens hold of `text`, and the rest, by the tokenizer itself."""
    from transformers import Qwen2Tokenizer

    tokenizer = Qwen2Tokenizer.from_pretrained(job.model / "tokenizer", local_files_only=True)
    spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    return text[: spans[12][0]], text[spans[12][0] :]


# ---- masks


def weights(path: Path, size: tuple[int, int], box: tuple[float, float, float, float]) -> torch.Tensor:
    return encode.mask_weights(Picture(path=path, placed=Placed(size=size, box=box)))


def white_from(column: int, width: int, height: int) -> Image.Image:
    pixels = np.zeros((height, width), dtype=np.uint8)
    pixels[:, column:] = 255
    return Image.fromarray(pixels)


def test_a_half_white_mask_is_exactly_half_ones(lab: Any, held: Any) -> None:
    white_from(32, 64, 64).save(lab.root / "dataset" / "control_images" / "p1_mask.png")
    lab.scan()
    lab.cache()
    mask = held.tensors("p1")["mask"]
    assert (mask.shape, mask.dtype) == ((8, 8), torch.float32)
    assert torch.equal(mask, torch.tensor([[0.0] * 4 + [1.0] * 4] * 8))


@pytest.mark.parametrize("scale", [1, 2, 5])
def test_a_mask_of_another_size_follows_the_crop_of_its_target(lab: Any, scale: int) -> None:
    """A 128 x 64 target is cropped to its middle 64 x 64; the mask is white from column 80 on, 16 before its end."""
    Image.new("RGB", (128, 64)).save(lab.root / "dataset" / "training_images" / "p1.png")
    white_from(80 * scale, 128 * scale, 64 * scale).save(
        lab.root / "dataset" / "control_images" / "p1_mask.png"
    )
    lab.scan()
    (want,) = [want for want in lab.job().wants if want.id == "p1"]
    mask = encode.mask_weights(want.mask)
    assert torch.equal(mask, torch.tensor([[0.0] * 6 + [1.0] * 2] * 8))


def test_grey_counts_in_part_and_edges_are_averaged(tmp_path: Path) -> None:
    Image.new("L", (64, 64), 51).save(tmp_path / "grey.png")
    assert torch.equal(weights(tmp_path / "grey.png", (64, 64), (0, 0, 64, 64)), torch.full((8, 8), 51 / 255))
    quarter = np.zeros((64, 64), dtype=np.uint8)
    quarter[:, :2] = 255  # a quarter of the first latent's eight columns
    Image.fromarray(quarter).save(tmp_path / "edge.png")
    edge = weights(tmp_path / "edge.png", (64, 64), (0, 0, 64, 64))
    assert edge[:, 0] == pytest.approx(0.25, abs=1 / 255) and float(edge[:, 1:].max()) == 0


# ---- another text encoder (D1)


def narrow(model: Path) -> None:
    """A text encoder of width 48 in the place of that of 64."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    folder = model / "text_encoder"
    config = files.read_json(folder / "config.json")
    config["text_config"] |= {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1}
    config["vision_config"]["out_hidden_size"] = 48
    shutil.rmtree(folder)
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(**config)).save_pretrained(folder)


def other_weights(model: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = model / "text_encoder" / "model.safetensors"
    tensors = {name: tensor.clone() * 1.5 for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(("change", "width"), [(narrow, 48), (other_weights, 64)])
def test_another_text_encoder_is_refused_then_rebuilt(
    lab: Any, held: Any, rebase: Callable[..., Path], change: Callable[[Path], None], width: int
) -> None:
    before = held.tensors("p1")
    change(rebase())
    with pytest.raises(CacheError, match=r"encoders\.text_encoder\.fingerprint: \w+ in the cache"):
        lab.launch()
    assert list(lab.cache().reasons) == ["changed: settings.encoders.text_encoder.fingerprint"]
    after = held.tensors("p1")
    assert after["prompt_embeds"].shape == (before["prompt_embeds"].shape[0], width)
    assert after["prompt_embeds"].shape != before["prompt_embeds"].shape or not torch.allclose(
        after["prompt_embeds"], before["prompt_embeds"], atol=1e-3
    )
    assert torch.equal(after["target"], before["target"])


@pytest.mark.parametrize("name", ["text_encoder", "vae"])
def test_a_device_that_is_absent_is_refused_when_it_is_needed(lab: Any, name: str) -> None:
    changes = {f"cache.devices.{name}": "xpu", f"cache.dtypes.{name}": "fp32"}
    assert lab.cache(changes).built == 0  # a cache of another machine serves
    with pytest.raises(UserError, match=r"device xpu is not there: torch .* sees no accelerator"):
        lab.cache({**changes, "data.processor.target_size": [32, 32]})


def test_names_of_texts() -> None:
    document = {"prompt": "p", "alternatives": ["q", "r"], "empty_prompt": True, "negative_prompt": " "}
    assert encode.texts(document) == {
        "prompt_embeds": "p",
        "prompt_embeds_1": "q",
        "prompt_embeds_2": "r",
        "empty_embeds": "",
        "negative_embeds": " ",
    }


def test_nothing_to_encode_is_nothing(lab: Any) -> None:
    job = lab.job()
    none: list[Wanted] = []
    assert encode.encode(job.family, None, job.config, none) == []  # type: ignore[arg-type]
