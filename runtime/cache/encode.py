"""From pictures and prompts to the tensors that a denoiser is given."""

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from PIL import Image

from runtime import device
from runtime.cache.key import Picture, Wanted
from runtime.config.model import Config
from runtime.data import images

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.families.base import Encoders, Family, PromptAsk

Component = Literal["text_encoder", "vae"]
BOTH: tuple[Component, ...] = get_args(Component)
SHOWN = 60  # characters of what was cut from a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Tensors of one entry in host memory: latents [C, h, w] of target and controls, mask [h, w], embeddings [L, D]."""

    tensors: "dict[str, Tensor]" = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What was cut or is doubtful."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """What the encoders are given of one sample: its files opened, upright, cut and resized."""

    asks: "Mapping[str, PromptAsk]"
    """By the name of their embeddings."""
    pixels: "Mapping[str, Tensor]"
    """[3, H, W] in -1..1, by the name of their latents."""
    mask: "Tensor | None"


def load(
    family: "Family",
    model: Path,
    config: Config,
    made: Mapping[str, Path] | None = None,
    *,
    only: Component | None = None,
) -> "Encoders":
    """The frozen models for a resolved config, each on its device in its precision; never the denoiser.

    `made`: by component, what step 06 made and the config asks for. `only`: this one alone. Raises UserError for
    a device that is absent, also that of the other: better now than after hours of the first.
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
        text_encoder=only in (None, "text_encoder"),
        vae=only in (None, "vae"),
        vae_mode=config.cache.vae,
    )


def unload(encoders: "Encoders", where: device.Device) -> None:
    """Nothing of the models is left on their device, also where the caller still holds `encoders`."""
    encoders.pipeline.register_modules(**dict.fromkeys(BOTH))
    device.free_cached(where)


def one_after_other(
    family: "Family", model: Path, config: Config, made: Mapping[str, Path], want: Wanted
) -> Encoded:
    """All of one sample, by encoders of which never two are in memory; a VAE is loaded only for pictures."""
    whole = Encoded()
    for component in BOTH:
        if component == "vae" and want.target is None and not want.controls:
            continue
        encoders = load(family, model, config, made, only=component)
        found = encode(family, encoders, config, [want])[0]
        unload(encoders, device.pick(getattr(config.cache.devices, component)))
        whole.tensors.update(found.tensors)
        whole.notes.extend(found.notes)
    return whole


def encode(
    family: "Family",
    encoders: "Encoders",
    config: Config,
    wants: Sequence[Wanted],
    reads: Sequence[Read] | None = None,
) -> list[Encoded]:
    """One for each of `wants`, with what the loaded encoders make, asked for as many at once as the config says.

    In fp32 each tensor equals that of its sample alone to 1e-5, the norm of the difference over the norm.
    `reads`: what `read` gave for each, where that was done before.
    """
    if reads is None:
        reads = [read(config, want, loaded(encoders)) for want in wants]
    found = [Encoded() for _ in wants]
    _images(family, encoders, config, [one.pixels for one in reads], found)
    _prompts(family, encoders, config, [one.asks for one in reads], found)
    for one, encoded in zip(reads, found, strict=True):
        if one.mask is not None:
            encoded.tensors["mask"] = one.mask
    return found


def loaded(encoders: "Encoders") -> list[Component]:
    return [name for name in BOTH if getattr(encoders.pipeline, name) is not None]


def read(config: Config, want: Wanted, parts: Collection[Component] = BOTH) -> Read:
    """Work of the host alone, for the encoders in `parts`. Raises DataError for a file that can't be read."""
    background = config.data.processor.background
    controls = [fitted(picture, background) for picture in want.controls]
    for_vae = "vae" in parts
    shown = {f"control_{index}": picture for index, picture in enumerate(controls)} if for_vae else {}
    if for_vae and want.target is not None:
        shown["target"] = fitted(want.target, background)
    return Read(
        asks=_asks(config, want, controls) if "text_encoder" in parts else {},
        pixels={name: pixels(picture) for name, picture in shown.items()},
        mask=mask_weights(want.mask) if for_vae and want.mask is not None else None,
    )


def _asks(config: Config, want: Wanted, controls: Sequence[Image.Image]) -> "dict[str, PromptAsk]":
    from runtime.families.base import PromptAsk

    area = config.data.processor.vl_pixels
    assert area is not None  # resolved
    seen = tuple(_for_text_encoder(control, area) for control in controls)
    return {name: PromptAsk(prompt=text, images=seen) for name, text in texts(want.document).items()}


def _at_once(config: Config) -> int:
    assert config.cache.batch_size != "auto"  # resolved
    return config.cache.batch_size


def _images(
    family: "Family",
    encoders: "Encoders",
    config: Config,
    pictures: "Sequence[Mapping[str, Tensor]]",
    found: Sequence[Encoded],
) -> None:
    import torch

    by_size: dict[tuple[int, ...], list[tuple[int, str]]] = defaultdict(list)
    for index, named in enumerate(pictures):
        for name, picture in named.items():
            by_size[tuple(picture.shape)].append((index, name))
    at_once = _at_once(config)
    for places in by_size.values():
        for start in range(0, len(places), at_once):
            chunk = places[start : start + at_once]
            batch = torch.stack([pictures[index][name] for index, name in chunk])
            latents = family.encode_images(encoders, batch).cpu()
            for (index, name), one in zip(chunk, latents, strict=True):
                found[index].tensors[name] = one


def _prompts(
    family: "Family",
    encoders: "Encoders",
    config: Config,
    asked: "Sequence[Mapping[str, PromptAsk]]",
    found: Sequence[Encoded],
) -> None:
    asks = [(index, name, ask) for index, named in enumerate(asked) for name, ask in named.items()]
    at_once, limit = _at_once(config), config.data.max_prompt_tokens
    for start in range(0, len(asks), at_once):
        chunk = asks[start : start + at_once]
        encoded = family.encode_prompts(encoders, [ask for _, _, ask in chunk], max_tokens=limit)
        for (index, name, _), one in zip(chunk, encoded, strict=True):
            found[index].tensors[name] = one.embeds.cpu()
            if one.cut:
                found[index].notes.append(_cut(name, one.cut, limit))


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
