"""What a model family must offer so that the trainer, which knows none by name, can use it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """What a denoiser is told besides the noisy target. Opaque outside of families.

    `embeds` [B, L, D]; `mask` bool [B, L], or None when no row is padded (on one H200 a mask of all
    true cost 16 % of a 1024 px step: it forces attention off the fast path); `controls`, normalised latents
    [B, C, h, w] each.
    """

    embeds: Tensor
    mask: Tensor | None
    controls: tuple[Tensor, ...]

    def to(self, device: str, dtype: torch.dtype) -> "Conditioning":
        return replace(
            self,
            embeds=self.embeds.to(device, dtype),
            mask=None if self.mask is None else self.mask.to(device),
            controls=tuple(control.to(device, dtype) for control in self.controls),
        )


def collate(items: Sequence[Conditioning]) -> Conditioning:
    """One batch of conditionings whose controls agree in number and shape."""
    lengths = [item.embeds.shape[1] for item in items]
    longest = max(lengths)
    embeds = torch.cat(
        [nn.functional.pad(item.embeds, (0, 0, 0, longest - item.embeds.shape[1])) for item in items]
    )
    mask = None
    if min(lengths) != longest:
        mask = torch.arange(longest)[None] < torch.tensor(lengths)[:, None]
    controls = tuple(torch.cat(tensors) for tensors in zip(*(i.controls for i in items), strict=True))
    return Conditioning(embeds=embeds, mask=mask, controls=controls)


def conditioning_of(tensors: dict[str, Tensor], embeds: str = "prompt_embeds") -> Conditioning:
    """A batch of one from a cache entry; `embeds` picks prompt_embeds, empty_embeds, negative_embeds."""
    names = sorted((n for n in tensors if n.startswith("control_")), key=lambda n: int(n[8:]))
    return Conditioning(
        embeds=tensors[embeds][None], mask=None, controls=tuple(tensors[n][None] for n in names)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """The frozen models of the cache phase. `pipeline` ties them together, without a denoiser."""

    pipeline: Any
    text_device: str
    vae_device: str


class Family(Protocol):
    name: str
    template_version: str
    latent_channels: int
    size_multiple: int
    vl_pixels: int
    dropped_tokens: int
    min_controls: int
    max_controls: int
    blocks: str

    def load_encoders(
        self,
        model: Path,
        *,
        text_device: str,
        vae_device: str,
        dtype: torch.dtype,
        made_text_encoder: Path | None = None,
    ) -> Encoders:
        """Tokenizer, processor, text encoder and VAE of a diffusers-style folder. Never the denoiser.

        `made_text_encoder`: the folder of an NF4 text encoder that is taken instead of the model's own.
        """

    def load_vae(self, model: Path, *, device: str, dtype: torch.dtype) -> Any:
        """The VAE alone, for decoding."""

    def load_denoiser(
        self, model: Path, *, device: str, dtype: torch.dtype, quantize: str, made: Path | None = None
    ) -> nn.Module:
        """The denoiser, frozen; `quantize` is `none` or `nf4`.

        `made`: what step 06 made of it; without, NF4 is made while loading, the same bits.
        """

    def encode_prompt(self, encoders: Encoders, prompt: str, controls: Sequence[Image.Image]) -> Tensor:
        """Embeddings [L, D] of a prompt seen together with its controls."""

    def encode_image(self, encoders: Encoders, pixels: Tensor) -> Tensor:
        """Normalised latents [C, H/8, W/8] of pixels [3, H, W] in -1..1."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The predicted velocity (noise - target) [B, C, h, w] at `sigma` [B] in 0..1."""

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in -1..1 of normalised latents [B, C, h, w]."""

    def tokens(self, target: Sequence[int], conditioning: Conditioning) -> int:
        """How many tokens one sample of latent shape `target` costs: text, target and controls."""

    def shift(self, tokens: int) -> float:
        """The factor by which the family's own schedule shifts sigma for `tokens` of the target."""

    def scheduler(self, model: Path, tokens: int, steps: int) -> Any:
        """The sampling schedule of the published model for a target of `tokens`, timesteps set."""
