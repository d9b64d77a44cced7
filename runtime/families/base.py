"""What a model family must offer so that the trainer, which knows none by name, can use it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor, nn

from runtime.config.model import VaeMode
from runtime.families.facts import Facts
from runtime.memory.modulation import Request


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
        return self.map(lambda tensor: tensor.to(device, dtype if tensor.is_floating_point() else None))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Conditioning":
        """The same of changed tensors."""
        return replace(
            self,
            embeds=change(self.embeds),
            mask=None if self.mask is None else change(self.mask),
            controls=tuple(change(control) for control in self.controls),
        )


def collate(items: Sequence[Conditioning]) -> Conditioning:
    """One batch of conditionings. Raises ValueError unless their controls agree in number and shapes."""
    _refuse_mixed_controls(items)
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


def _refuse_mixed_controls(items: Sequence[Conditioning]) -> None:
    """The denoiser takes one list of shapes for a whole batch: a sample of its own needs its own batch."""
    counts = [len(item.controls) for item in items]
    if len(set(counts)) > 1:
        raise ValueError(f"samples with {counts} controls are in one batch, expected one number for all")
    for index, tensors in enumerate(zip(*(item.controls for item in items), strict=True)):
        shapes = [tuple(tensor.shape[1:]) for tensor in tensors]
        if len(set(shapes)) > 1:
            raise ValueError(f"control {index} has shapes {shapes} in one batch, expected one for all")


def conditioning_of(tensors: dict[str, Tensor], embeds: str = "prompt_embeds") -> Conditioning:
    """A batch of one from a cache entry; `embeds` picks prompt_embeds, empty_embeds, negative_embeds."""
    names = sorted((n for n in tensors if n.startswith("control_")), key=lambda n: int(n[8:]))
    return Conditioning(
        embeds=tensors[embeds][None], mask=None, controls=tuple(tensors[n][None] for n in names)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptAsk:
    """A prompt and the pictures that the text encoder sees with it, in order; none for text alone."""

    prompt: str
    images: tuple[Image.Image, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """`embeds` [L, D], never padded; `cut` is the end of the prompt that the encoder did not see."""

    embeds: Tensor
    cut: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoders:
    """The frozen models of the cache phase. `pipeline` ties them together, without a denoiser.

    A model that was not loaded is None in it; dropping the last reference frees the others.
    """

    pipeline: Any
    text_device: str
    vae_device: str


class Family(Protocol):
    facts: Facts

    def load_encoders(
        self,
        model: Path,
        *,
        text_device: str,
        text_dtype: torch.dtype,
        vae_device: str,
        vae_dtype: torch.dtype,
        made_text_encoder: Path | None = None,
        text_encoder: bool = True,
        vae: bool = True,
        vae_mode: VaeMode = "exact",
    ) -> Encoders:
        """Tokenizer, processor and text encoder, and the VAE, of a diffusers-style folder. Never the denoiser.

        `made_text_encoder`: the folder of an NF4 text encoder that is taken instead of the model's own.
        `text_encoder`, `vae`: false leaves one out, so that the two need not be in memory together.
        """

    def load_vae(self, model: Path, *, device: str, dtype: torch.dtype, mode: VaeMode = "exact") -> Any:
        """The VAE alone, for decoding; `mode` is that of `cache.vae`."""

    def load_denoiser(
        self,
        model: Path,
        *,
        device: str,
        dtype: torch.dtype,
        quantize: str,
        made: Path | None = None,
        weight: Path | None = None,
        table: Request | None = None,
        streamed: int = 0,
        keep: tuple[str, ...] = (),
    ) -> nn.Module:
        """The denoiser, frozen; `quantize` is `none` or `nf4`.

        `made`: what step 06 made of it; without, NF4 is made while loading, the same bits.
        `keep`: patterns of linears that then stay plain; what is packed already is taken as it is.
        `weight`: a checkpoint that is loaded instead of the model's own; it goes before `made`.
        `table`: which sigmas will be asked for; the modulation then is a table of these and no weights of it are kept.
        `streamed`: so many blocks stay in host memory, those that `runtime.memory.offload` streams.
        """

    def encode_prompts(self, encoders: Encoders, asks: Sequence[PromptAsk], max_tokens: int) -> list[Encoded]:
        """Embeddings of each prompt seen together with its images, from one forward of the text encoder.

        A prompt of more than `max_tokens` tokens, template and images not counted, is cut there. Rows of
        unequal length are padded and masked: each equals what it gets alone to 1e-5 relative in fp32, the
        norm of the difference over the norm. Raises DataError for a prompt with a control token in it.
        """

    def encode_images(self, encoders: Encoders, pixels: Tensor) -> Tensor:
        """Normalised latents [B, C, H/8, W/8] of pixels [B, 3, H, W] in -1..1, from one forward of the VAE.

        Each equals what it gets alone to 1e-5 relative in fp32; with a VAE in `exact` mode a batch is bit for
        bit what the published pipeline makes of that batch. Raises ValueError for pixels of another
        shape or range: an encoder takes 0..1 without complaint and makes washed-out latents of it.
        """

    def make_compilable(self, denoiser: nn.Module) -> None:
        """Replace in place what a compiler does not take by what it does, equal to rounding."""

    def predict(
        self, denoiser: nn.Module, noisy: Tensor, sigma: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """The predicted velocity (noise - target) [B, C, h, w] at `sigma` [B] in 0..1."""

    def decode(self, vae: Any, latents: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] in -1..1 of normalised latents [B, C, h, w]."""

    def tokens(self, target: Sequence[int], conditioning: Conditioning) -> int:
        """Of a whole batch with targets of shape `target`: text without padding, targets and controls."""

    def shift(self, tokens: int) -> float:
        """The factor by which the family's own schedule shifts sigma for `tokens` of the target."""

    def scheduler(self, model: Path, tokens: int, steps: int) -> Any:
        """The sampling schedule of the published model for a target of `tokens`, timesteps set."""
