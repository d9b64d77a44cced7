"""A VAE in a larger shape computes what the small one does, through the product's own loader."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import vae
from padded_vae import padded
from PIL import Image
from torch import Tensor

from runtime.cache import encode
from runtime.config.model import VaeMode
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.memory import vae as single_images

LARGER = {"base_dim": 24, "num_res_blocks": 2}


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("larger")
    padded(vae.BASE / "vae", **LARGER).save_pretrained(root / "vae")
    return root


@pytest.fixture(scope="module")
def pixels() -> Tensor:
    with Image.open(vae.PHOTOS / "chelsea.jpg") as photo:
        return encode.pixels(photo.convert("RGB").resize((96, 64)))[None]


def load(base: Path, mode: VaeMode) -> Any:
    return QwenImageEdit().load_vae(base, device="cpu", dtype=torch.float32, mode=mode)


@torch.no_grad()
@pytest.mark.parametrize("mode", ["exact", "folded"])
def test_the_same_function_of_a_picture(larger: Path, pixels: Tensor, mode: VaeMode) -> None:
    small, large = load(vae.BASE, mode), load(larger, mode)
    latents = single_images.encode(small, pixels)
    assert vae.apart(single_images.encode(large, pixels), latents) < 1e-4
    decoded = single_images.decode(small, latents)
    assert vae.apart(single_images.decode(large, latents), decoded) < 1e-4
    assert vae.psnr(decoded, pixels) > 15  # a picture, or agreement would say little


@torch.no_grad()
def test_the_same_function_of_a_film(larger: Path, pixels: Tensor) -> None:
    """Five frames pass the convolutions in time, which no picture does."""
    small, large = load(vae.BASE, "exact"), load(larger, "exact")
    film = torch.stack([pixels[..., :32, shift : shift + 48] for shift in range(0, 40, 8)], dim=2)
    latents = small.encode(film).latent_dist.mode()
    assert latents.shape[2] == 2
    assert vae.apart(large.encode(film).latent_dist.mode(), latents) < 1e-4
    decoded = [each.decode(latents, return_dict=False)[0] for each in (large, small)]
    assert decoded[0].shape == film.shape and vae.apart(*decoded) < 1e-4


def test_the_rest_of_the_config_is_kept(larger: Path) -> None:
    wished, found = (
        json.loads((base / "vae" / "config.json").read_text(encoding="utf-8")) for base in (vae.BASE, larger)
    )
    assert found == {**wished, **LARGER}


@pytest.mark.parametrize("shape", [(8, 1), (96, 0)])
def test_a_shape_that_cannot_hold_it_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"expected at least \{'base_dim': 16, 'num_res_blocks': 1\}"):
        padded(vae.BASE / "vae", *shape)
