"""From pictures and prompts to the tensors that a denoiser is given."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from runtime import device
from runtime.cache.key import Picture, Wanted
from runtime.config.model import Config
from runtime.data import images

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.families.base import Encoders, Family

SHOWN = 60  # characters of what was cut from a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """The tensors of one entry: latents [C, h, w] of target and controls, mask [h, w], embeddings [L, D]."""

    tensors: "dict[str, Tensor]" = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was cut or is doubtful."""


def load(family: "Family", model: Path, config: Config, made: Mapping[str, Path] | None = None) -> "Encoders":
    """The frozen models for a resolved config, each on its device in its precision; never the denoiser.

    `made`: by component, what step 06 made and the config asks for. Raises UserError for a device that is absent.
    """
    devices, dtypes = config.cache.devices, config.cache.dtypes
    for name in {devices.text_encoder, devices.vae}:
        device.pick(name)
    return family.load_encoders(
        model,
        text_device=devices.text_encoder,
        vae_device=devices.vae,
        text_dtype=device.dtype_of(dtypes.text_encoder),
        vae_dtype=device.dtype_of(dtypes.vae),
        made_text_encoder=(made or {}).get("text_encoder"),
    )


def encode(family: "Family", encoders: "Encoders", config: Config, wants: Sequence[Wanted]) -> list[Encoded]:
    """One for each of `wants`, encoders asked for as many at once as the config says.

    In fp32 each tensor equals that of its sample alone to 1e-5, the norm of the difference over the norm.
    """
    found = [Encoded() for _ in wants]
    background = config.data.processor.background
    pictures = [_pictures(want, background) for want in wants]
    _images(family, encoders, config.cache.batch_size, pictures, found)
    _prompts(family, encoders, config, wants, pictures, found)
    for want, one in zip(wants, found, strict=True):
        if want.mask is not None:
            one.tensors["mask"] = mask_weights(want.mask)
    return found


def _pictures(want: Wanted, background: tuple[int, int, int]) -> dict[str, Image.Image]:
    """Upright and at their final sizes, by the name of their latents."""
    named = {f"control_{index}": picture for index, picture in enumerate(want.controls)}
    if want.target is not None:
        named["target"] = want.target
    return {name: fitted(picture, background) for name, picture in named.items()}


def _images(
    family: "Family",
    encoders: "Encoders",
    at_once: int,
    pictures: Sequence[Mapping[str, Image.Image]],
    found: Sequence[Encoded],
) -> None:
    import torch

    by_size: dict[tuple[int, int], list[tuple[int, str]]] = defaultdict(list)
    for index, named in enumerate(pictures):
        for name, image in named.items():
            by_size[image.size].append((index, name))
    for places in by_size.values():
        for start in range(0, len(places), at_once):
            chunk = places[start : start + at_once]
            batch = torch.stack([pixels(pictures[index][name]) for index, name in chunk])
            latents = family.encode_images(encoders, batch)
            for (index, name), one in zip(chunk, latents, strict=True):
                found[index].tensors[name] = one


def _prompts(
    family: "Family",
    encoders: "Encoders",
    config: Config,
    wants: Sequence[Wanted],
    pictures: Sequence[Mapping[str, Image.Image]],
    found: Sequence[Encoded],
) -> None:
    from runtime.families.base import PromptAsk

    area, at_once = config.data.processor.vl_pixels, config.cache.batch_size
    assert area is not None  # resolved
    asks: list[tuple[int, str, PromptAsk]] = []
    for index, (want, named) in enumerate(zip(wants, pictures, strict=True)):
        seen = tuple(_for_text_encoder(named[f"control_{i}"], area) for i in range(len(want.controls)))
        for name, text in texts(want.document).items():
            asks.append((index, name, PromptAsk(prompt=text, images=seen)))
    for start in range(0, len(asks), at_once):
        chunk = asks[start : start + at_once]
        encoded = family.encode_prompts(
            encoders, [ask for _, _, ask in chunk], max_tokens=config.data.max_prompt_tokens
        )
        for (index, name, _), one in zip(chunk, encoded, strict=True):
            found[index].tensors[name] = one.embeds
            if one.cut:
                found[index].notes.append(_cut(name, one.cut, config.data.max_prompt_tokens))


def _cut(name: str, cut: str, limit: int) -> str:
    return f"{name}: longer than {limit} tokens, cut off: {_shown(cut)!r}"


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


def texts(document: Mapping[str, object]) -> dict[str, str]:
    """By tensor name, the prompts that an entry of this key document embeds."""
    found = {"prompt_embeds": str(document["prompt"])}
    alternatives = document["alternatives"]
    assert isinstance(alternatives, list)
    found.update({f"prompt_embeds_{number}": text for number, text in enumerate(alternatives, 1)})
    if document["empty_prompt"]:
        found["empty_embeds"] = ""
    if document["negative_prompt"] is not None:
        found["negative_embeds"] = str(document["negative_prompt"])
    return found


def fitted(picture: Picture, background: tuple[int, int, int]) -> Image.Image:
    """The picture, upright, cut and resized to its place."""
    return images.fit(images.load(picture.path, background=background), picture.placed)


def pixels(image: Image.Image) -> "Tensor":
    """[3, H, W] fp32 in -1..1."""
    import torch

    return torch.from_numpy(images.to_array(image))


def mask_weights(mask: Picture) -> "Tensor":
    """[H/8, W/8] fp32 in 0..1: how much each latent counts; white is 1. Pixels are averaged, not sampled."""
    import numpy as np
    import torch

    height, width = mask.placed.size
    grey = images.load(mask.path, background=(0, 0, 0)).convert("L")
    small = grey.resize((width // 8, height // 8), Image.Resampling.BOX, box=mask.placed.box)
    return torch.from_numpy(np.asarray(small, dtype=np.float32) / np.float32(255))


def _for_text_encoder(image: Image.Image, area: int) -> Image.Image:
    """Shrunk to `area` pixels where it has more; enlarging would only add tokens, not detail."""
    width, height = image.size
    if width * height <= area:
        return image
    scale = math.sqrt(area / (width * height))
    return image.resize(
        (max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.LANCZOS
    )
