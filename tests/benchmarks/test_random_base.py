"""benchmarks/random_base.py as a command: the published layout with narrow layers, through the product's readers."""

import functools
import re
from pathlib import Path
from typing import Any

import diffusers
import pytest
import random_base
import torch
from padded_vae import padded

from runtime import files, shards
from runtime.families import registry
from runtime.planning import architecture

WIDTH = 256  # two heads of the published width, so that its positions fit
DENOISER = {"num_attention_heads": 2, "attention_head_dim": 128, "joint_attention_dim": WIDTH}
NARROW = {"WIDTH": WIDTH, "HEADS": 2, "KEY_HEADS": 1, "SHARD_BYTES": 2e6}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "fullatt_block_indexes": [1],
}
BLOCK = 36 * WIDTH**2  # weights of linears


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`random_base.main`, in published shapes but for the widths; several shards to a block."""
    for name, value in NARROW.items():
        monkeypatch.setattr(random_base, name, value)
    monkeypatch.setitem(random_base.SMALL, "intermediate_size", 128)
    monkeypatch.setattr(
        random_base, "PUBLISHED", {**random_base.PUBLISHED, "intermediate_size": 512, "vocab_size": 1200}
    )
    monkeypatch.setattr(random_base, "PUBLISHED_VISION", VISION)
    monkeypatch.setattr(random_base, "padded", functools.partial(padded, base_dim=24))

    def main() -> None:
        with monkeypatch.context() as patch:  # the product's loader takes the class itself
            made = functools.partial(diffusers.QwenImageTransformer2DModel, **DENOISER)
            patch.setattr(diffusers, "QwenImageTransformer2DModel", made)
            random_base.main()

    return main


@pytest.mark.parametrize(
    ("words", "encoders", "text_layers", "vae_width"),
    [
        ((), "small", 2, 16),
        (("--encoders", "published", "--text-encoder-layers", "3"), "published", 3, 24),
    ],
)
def test_a_base_that_the_product_reads(
    words: tuple[str, ...],
    encoders: str,
    text_layers: int,
    vae_width: int,
    narrow: Any,
    call: Any,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    root = tmp_path / "base"
    call(narrow, str(root), "--layers", "2", *words)
    printed = capsys.readouterr().out
    found = re.fullmatch(
        rf"{re.escape(str(root))}: denoiser of ([\d,]+) parameters, {encoders} encoders\n", printed
    )
    assert found
    count = int(found[1].replace(",", ""))
    read = architecture.read(root)
    assert (read.denoiser.layers, read.denoiser.parameters) == (2, count)
    assert 2 * BLOCK < count < 2.5 * BLOCK
    assert (read.text_encoder.layers, read.vae.base_dim) == (text_layers, vae_width)
    folder = root / "transformer"
    index = files.read_json(folder / "diffusion_pytorch_model.safetensors.index.json")
    stored = {name: path.name for path in shards.find(folder) for name in shards.read_header(path)}
    assert index["weight_map"] == stored and len(set(stored.values())) > 3
    assert index["metadata"]["total_size"] == 2 * count
    denoiser: Any = registry.load_family(root).load_denoiser(
        root, device="cpu", dtype=torch.bfloat16, quantize="none"
    )
    assert sum(weight.numel() for weight in denoiser.parameters()) == count
    spread = denoiser.transformer_blocks[1].img_mlp.net[2].weight.float().std()
    assert spread.item() == pytest.approx(0.02, rel=0.02)
    scale = denoiser.transformer_blocks[0].attn.norm_q.weight.float().mean()
    assert scale.item() == pytest.approx(1, abs=0.02)
