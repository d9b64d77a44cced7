"""From pictures and a prompt to the tensors that a denoiser is given."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from runtime import device
from runtime.config.model import Config
from runtime.data import images
from runtime.errors import DataError
from runtime.families.base import Encoders, Family

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What to encode. `empty` adds the embeddings of no prompt, `negative` those of another one."""

    prompt: str
    controls: tuple[Path, ...]
    target: Path | None = None
    empty: bool = False
    negative: str | None = None


def refuse_control_count(family: Family, name: str, count: int) -> None:
    """Raises DataError where the family takes fewer or more controls than `count`."""
    if not family.min_controls <= count <= family.max_controls:
        raise DataError(
            f"{name} has {count} controls; family {family.name} takes {family.min_controls} to {family.max_controls}",
            remedy="take the extra control images away, or use a base of family qwen-image-edit-plus",
        )


def load(family: Family, model: Path, config: Config, made: Mapping[str, Path] | None = None) -> Encoders:
    """The frozen models for a resolved config, each on its device; never the denoiser.

    `made`: by component, what step 06 made and the config asks for.
    """
    devices = config.cache.devices
    dtype = device.compute_dtype(device.pick(devices.text_encoder), config.train.mixed_precision)
    return family.load_encoders(
        model,
        text_device=devices.text_encoder,
        vae_device=devices.vae,
        dtype=dtype,
        made_text_encoder=(made or {}).get("text_encoder"),
    )


def encode(family: Family, encoders: Encoders, config: Config, ask: Ask) -> "dict[str, Tensor]":
    """The tensors of one entry: latents [C, h, w] of target and controls, embeddings [L, D]."""
    processor = config.data.processor
    assert processor.controls_size is not None and processor.vl_pixels is not None  # resolved
    controls = [fitted(path, processor.controls_size) for path in ask.controls]
    tensors = {
        f"control_{index}": family.encode_image(encoders, pixels(image))
        for index, image in enumerate(controls)
    }
    if ask.target is not None:
        target = fitted(ask.target, processor.target_size)
        tensors["target"] = family.encode_image(encoders, pixels(target))
    seen = [_for_text_encoder(image, processor.vl_pixels) for image in controls]
    tensors["prompt_embeds"] = family.encode_prompt(encoders, ask.prompt, seen)
    if ask.empty:
        tensors["empty_embeds"] = family.encode_prompt(encoders, "", seen)
    if ask.negative is not None:
        tensors["negative_embeds"] = family.encode_prompt(encoders, ask.negative, seen)
    return tensors


def fitted(path: Path, size: tuple[int, int]) -> Image.Image:
    """The picture at `path`, upright, covering `size` (height, width)."""
    return images.fit_cover(images.load(path), size)


def pixels(image: Image.Image) -> "Tensor":
    """[3, H, W] fp32 in -1..1."""
    import torch

    return torch.from_numpy(images.to_array(image))


def _for_text_encoder(image: Image.Image, area: int) -> Image.Image:
    """Shrunk to `area` pixels where it has more; enlarging would only add tokens, not detail."""
    width, height = image.size
    if width * height <= area:
        return image
    scale = math.sqrt(area / (width * height))
    return image.resize((round(width * scale), round(height * scale)), Image.Resampling.LANCZOS)
