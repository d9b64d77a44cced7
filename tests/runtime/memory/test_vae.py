"""The VAE of single images: exact, folded and tiled, against diffusers' own encode and decode."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.inference.painter import Painter
from runtime.memory import vae as single_images
from runtime.training import samples

FAMILY = QwenImageEdit()
SIZES = [(16, 16), (64, 48), (40, 88)]
TOLERANCE = 5e-6
"""Relative, fp32 on a CPU: kernels of two dimensions add in another order than those of three."""


def load(nano: Path, mode: Any, dtype: torch.dtype = torch.float32) -> Any:
    return FAMILY.load_vae(nano, device="cpu", dtype=dtype, mode=mode)


def asked(size: tuple[int, int], batch: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Pixels of `size`, and latents of such a picture."""
    draw = torch.Generator().manual_seed(7)
    height, width = size
    pixels = torch.rand(batch, 3, height, width, generator=draw) * 2 - 1
    latents = torch.randn(batch, 16, height // 8, width // 8, generator=draw)
    return pixels.to(dtype), latents.to(dtype)


def stock(vae: Any, pixels: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    mean = vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
    return mean, vae.decode(latents[:, :, None], return_dict=False)[0][:, :, 0]


def ours(vae: Any, pixels: Tensor, latents: Tensor) -> tuple[Tensor, Tensor]:
    return single_images.encode(vae, pixels), single_images.decode(vae, latents)


def apart(one: Tensor, other: Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_exact_is_bit_for_bit_diffusers_own(
    nano: Path, size: tuple[int, int], batch: int, dtype: torch.dtype
) -> None:
    vae, given = load(nano, "exact", dtype), asked(size, batch, dtype)
    for made, wished in zip(ours(vae, *given), stock(vae, *given), strict=True):
        assert made.dtype == dtype and torch.equal(made, wished)


@torch.no_grad()
def test_no_frame_is_kept_for_the_next(nano: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What halves the peak: no convolution is given a place for a copy of its input."""
    vae = load(nano, "exact")
    for part in (vae.encoder, vae.decoder):
        original = part.forward

        def forward(*given: Any, original: Any = original, **named: Any) -> Any:
            assert len(given) == 1 and not named
            return original(*given)

        monkeypatch.setattr(part, "forward", forward)
    ours(vae, *asked((16, 16), 1, torch.float32))
    with pytest.raises(AssertionError):
        stock(vae, *asked((16, 16), 1, torch.float32))


@pytest.mark.parametrize(("size", "batch"), [((64, 48), 1), ((40, 88), 3)])
@torch.no_grad()
def test_folded_is_equal_to_rounding(nano: Path, size: tuple[int, int], batch: int) -> None:
    given = asked(size, batch, torch.float32)
    exact, folded = ours(load(nano, "exact"), *given), ours(load(nano, "folded"), *given)
    for made, wished in zip(folded, exact, strict=True):
        assert made.shape == wished.shape and apart(made, wished) < TOLERANCE


def test_folding_leaves_no_3d_convolution_and_a_third_of_the_weights(nano: Path) -> None:
    exact, folded = load(nano, "exact"), load(nano, "folded")
    assert not [name for name, module in folded.named_modules() if isinstance(module, nn.Conv3d)]
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in folded.parameters())
    # Bytes of whole storages: a tap that is a view would keep the other two.
    before, after = (
        sum(parameter.untyped_storage().nbytes() for parameter in vae.parameters()) for vae in (exact, folded)
    )
    assert after < 0.5 * before


@pytest.mark.parametrize("padding", [0, 1, (1, 0, 0), (1, 1, 0)])
@torch.no_grad()
def test_one_convolution_folds_whatever_its_padding(padding: Any) -> None:
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d

    torch.manual_seed(1)
    source = QwenImageCausalConv3d(3, 5, (3, 3, 3), padding=padding)
    frame = torch.randn(2, 3, 1, 8, 10)
    before = torch.zeros(2, 3, 2 if padding == 0 else 0, 8, 10)  # those that it does not pad itself
    wished = source(torch.cat([before, frame], dim=2))
    assert torch.allclose(single_images.FrameConv(source)(frame), wished, atol=1e-6)


def test_a_folded_vae_refuses_frames(nano: Path) -> None:
    with pytest.raises(ValueError, match="5 frames, expected one"):
        load(nano, "folded").encoder(torch.zeros(1, 3, 5, 16, 16))


@torch.no_grad()
def test_tiles_are_diffusers_own_and_show_where_they_are_joined(nano: Path) -> None:
    exact, tiled = load(nano, "exact"), load(nano, "tiled")
    assert tiled.use_tiling and tiled.tile_sample_min_height == 256
    tiled.tile_sample_min_height = tiled.tile_sample_min_width = 48  # small, to be quick
    tiled.tile_sample_stride_height = tiled.tile_sample_stride_width = 32
    given = asked((64, 48), 1, torch.float32)
    (encoded, decoded), (wished, unbound) = ours(tiled, *given), stock(tiled, *given)
    assert torch.equal(encoded, wished) and torch.equal(decoded, unbound.clamp(-1, 1))
    whole = ours(exact, *given)
    assert all(1e-3 < apart(*pair) < 0.5 for pair in zip((encoded, decoded), whole, strict=True))
    small = asked((48, 48), 1, torch.float32)  # one tile is the whole picture
    assert all(torch.equal(*pair) for pair in zip(ours(tiled, *small), ours(exact, *small), strict=True))


@pytest.mark.parametrize("mode", ["exact", "folded"])
def test_normalised_latents_and_pixels_by_the_family(nano: Path, mode: str) -> None:
    """What the family encodes and decodes, in each way, is what the published pipeline makes of it."""
    encoders = FAMILY.load_encoders(
        nano,
        text_device="cpu",
        text_dtype=torch.float32,
        vae_device="cpu",
        vae_dtype=torch.float32,
        text_encoder=False,
        vae_mode=mode,
    )
    reference, (pixels, latents) = load(nano, "exact"), asked((48, 64), 2, torch.float32)
    mean, std = (
        torch.tensor(values)[:, None, None]
        for values in (reference.config.latents_mean, reference.config.latents_std)
    )
    with torch.no_grad():
        encoded, decoded = stock(reference, pixels, latents * std + mean)
    assert apart(FAMILY.encode_images(encoders, pixels), (encoded - mean) / std) < TOLERANCE
    assert apart(FAMILY.decode(encoders.pipeline.vae, latents), decoded) < TOLERANCE


def test_pictures_are_painted_as_configured(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps of a fit, and in validation."""
    job, modes = lab.job({"cache.vae": "folded"}), []
    original = QwenImageEdit.load_vae

    def load_vae(*given: Any, **named: Any) -> Any:
        vae = original(*given, **named)
        modes.append(any(isinstance(module, single_images.FrameConv) for module in vae.modules()))
        return vae

    monkeypatch.setattr(QwenImageEdit, "load_vae", load_vae)
    samples._decoded(job, [torch.zeros(1, 16, 4, 4)])
    Painter(job.family, job.model, job.config, None)
    assert modes == [True, True]
