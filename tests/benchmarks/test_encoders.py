"""The scripts that measure the encoders, at tiny size: they run, and a random base is one that the product takes."""

import json
from pathlib import Path
from typing import Any

import cache_phase
import pytest
import random_base
import torch
import vae
from safetensors.torch import load_file

from runtime.cache import encode
from runtime.families.base import PromptAsk
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.planning import architecture

TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
VISION = {**random_base.PUBLISHED_VISION, "depth": 3, "hidden_size": 32, "num_heads": 2}


def told(text: str, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if line["kind"] == kind]


def test_the_vae_in_each_way(call: Any, capsys: Any) -> None:
    call(vae.main, "--tiny", "--dtype", "fp32", "--device", "cpu")
    printed = capsys.readouterr().out
    found = {(line["way"], line["what"]): line for line in told(printed, "random weights")}
    assert {way for way, _ in found} == set(vae.WAYS) and len(found) == 8
    for (way, _), line in found.items():
        assert line["bit_equal"] or way == "folded"
        assert (
            (line["difference"] == 0) == line["bit_equal"]
            and line["difference"] < 1e-5
            and line["seconds"] > 0
        )
    photos = {line["way"]: line for line in told(printed, "photo")}
    assert [photos[way]["decode_difference"] for way in ("stock", "exact")] == [0, 0]
    assert (
        0 < photos["folded"]["decode_difference"] < 1e-5 < 1e-3 < photos["tiled"]["decode_difference"] < 0.1
    )
    assert photos["tiled"]["seams"] > 0 and all(line["psnr_db"] > 25 for line in photos.values())


@pytest.mark.parametrize(("at", "found"), [(192, 100.0), (96, 0.0)])
def test_seams_are_where_tiles_are_joined(at: int, found: float) -> None:
    """A difference of one line, at the joint or in the middle of a tile."""
    made = QwenImageEdit().load_vae(vae.BASE, device="cpu", dtype=torch.float32, mode="tiled")
    difference = torch.zeros(1, 3, 256, 256)
    difference[..., at, : 190 - vae.NEAR] = 1.0
    difference[..., 5, 5] = 1e-4
    measured = vae.seams(difference, made)
    assert measured is not None and (measured > found if found else measured == 0)


def test_the_cache_phase_of_a_tiny_base(call: Any, capsys: Any, tmp_path: Path) -> None:
    words = ("--tiny", "--text-encoders", "nf4", "--device", "cpu", "--work", str(tmp_path))
    call(cache_phase.main, *words)
    lines = told(capsys.readouterr().out, "cache")
    assert [(line["batch"], line["samples"]) for line in lines] == [(1, 4), (2, 4)]
    for line in lines:
        assert line["encode_pictures_per_s"] == pytest.approx(
            8 / line["seconds"]["encode pictures"], rel=1e-3
        )
        assert 0 < line["pictures_per_s"] < line["encode_pictures_per_s"]
        assert line["wall_s"] >= sum(line["seconds"].values()) and line["rss_gib"] > 0.1
        assert line["together_gib"] == line["rss_gib"]  # a CPU's tensors are the process's
    assert (tmp_path / "work" / "models" / "nf4" / "text_encoder").is_dir()
    assert not list((tmp_path / "work").glob("cache-*"))


@pytest.fixture
def sharded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_base, "SHARD_BYTES", 100_000)


def test_a_random_base_is_read_by_the_products_loaders(tmp_path: Path, sharded: None) -> None:
    """Of small shapes, the text encoder in several shards, as the published one is."""
    root = tmp_path / "base"
    random_base.shutil.copytree(
        vae.BASE, root, ignore=random_base.shutil.ignore_patterns("*.safetensors", "transformer")
    )
    random_base.write_vae(root / "vae", base_dim=24, num_res_blocks=2)
    text = random_base.text_config({**TEXT, "num_key_value_heads": 2, "tie_word_embeddings": False})
    text["rope_parameters"] = {**text["rope_parameters"], "mrope_section": [2, 3, 3]}
    count = random_base.write_text_encoder(
        root / "text_encoder", text, {**VISION, "out_hidden_size": 64}, "cpu"
    )
    assert len(list((root / "text_encoder").glob("*.safetensors"))) > 3
    assert architecture.count_parameters(root / "text_encoder") == count
    family = QwenImageEdit()
    encoders = family.load_encoders(
        root, text_device="cpu", vae_device="cpu", text_dtype=torch.float32, vae_dtype=torch.float32
    )
    read = encoders.pipeline.text_encoder.state_dict()
    stored = {
        name: tensor
        for path in (root / "text_encoder").glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }
    head = stored["lm_head.weight"].numel()
    assert sum(tensor.numel() for tensor in read.values()) == count - head
    for own, published in (
        ("model.language_model.embed_tokens.weight", "model.embed_tokens.weight"),
        ("model.language_model.layers.2.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"),
        ("model.visual.blocks.2.attn.qkv.weight", "visual.blocks.2.attn.qkv.weight"),
    ):
        assert torch.equal(read[own], stored[published].float())
    (shown,) = family.encode_prompts(encoders, [PromptAsk(prompt="paint it red")], 64)
    assert shown.embeds.shape[1] == 64 and bool(shown.embeds.isfinite().all())
    (file,) = (root / "vae").glob("*.safetensors")
    assert {tensor.dtype for tensor in load_file(file).values()} == {torch.bfloat16}
    latents = family.encode_images(encoders, torch.rand(1, 3, 32, 32))
    assert latents.shape == (1, 16, 4, 4) and bool(latents.isfinite().all()) and float(latents.std()) > 0


def test_a_published_text_encoder_has_the_published_size() -> None:
    """8.29 billion parameters with its output head; the config alone, nothing is drawn."""
    from accelerate import init_empty_weights
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    text = random_base.text_config(random_base.PUBLISHED)
    vision = {**random_base.PUBLISHED_VISION, "out_hidden_size": random_base.WIDTH}
    with init_empty_weights():
        model = Qwen2_5_VLForConditionalGeneration(
            Qwen2_5_VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=False)
        )
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_292_166_656
    assert encode.BOTH == ("text_encoder", "vae")
