"""How much a sample asks for: pixels, tokens, bytes of its cache entry; and which sample asks for the most."""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil
from typing import Any

from runtime.config.model import Config
from runtime.data import buckets, order
from runtime.data.manifest import Manifest
from runtime.data.sample import Size
from runtime.planning.architecture import Architecture
from runtime.planning.estimate import Work

TEMPLATE_TOKENS = (
    8  # of a prompt's template beside caption and pictures, after the dropped prefix: 5 and some
)
PICTURE_TOKENS = 8  # around each picture: two marks and, where there are several, `Picture 1: `
BYTES_PER_TOKEN = 3  # of a caption in UTF-8; a careful guess, English has 4 to 5
LATENT_BYTES = 4  # of a number in the cache, at most
EMBEDDING_BYTES = {"fp32": 4, "bf16": 2}


def largest(config: Config, listed: Manifest, base: Architecture) -> Work:
    """The most that one micro-batch asks for, held-out samples included; the largest picture of all."""
    settings = listed.settings
    sizings = {
        name: buckets.sizing(config.data.processor, kept, base.size_multiple)
        for name, kept in settings.items()
    }
    works = []
    for sample in listed.samples:
        placed = order.places(sample, sizings[sample.source])
        controls = [control.size for control in placed.controls]
        texts = (sample.prompt, *sample.alternatives)
        works.append(
            Work(
                target_pixels=_area(placed.size),
                control_pixels=max(map(_area, controls), default=0),
                text_tokens=text_tokens(config, base, texts, controls),
                image_tokens=sum(_tokens(size, base) for size in (placed.size, *controls)),
                batch_size=settings[sample.source].batch_size or config.data.batch_size,
            )
        )
    most = max(works, key=lambda work: work.tokens)
    painted = list(_painted(config, base))
    return Work(
        target_pixels=max(work.target_pixels for work in works),
        control_pixels=max(work.control_pixels for work in works),
        text_tokens=most.text_tokens,
        image_tokens=most.image_tokens,
        batch_size=most.batch_size,
        entry_bytes=float(sum(_entry_numbers(work, base) for work in works) * LATENT_BYTES),
        painted_pixels=max((pixels for pixels, _ in painted), default=0),
        painted_tokens=max((tokens for _, tokens in painted), default=0),
    )


def _entry_numbers(work: Work, base: Architecture) -> int:
    channels = base.family.latent_channels * base.denoiser.patch**2
    return channels * work.image_tokens + base.text_encoder.hidden * work.text_tokens


def _painted(config: Config, base: Architecture) -> Iterator[tuple[int, int]]:
    """Pixels and tokens of each prompt with a size of its own, its controls as large as configured or as it is."""
    for asked in config.validation.samples:
        if asked.size is not None:
            controls = [config.data.processor.controls_size or asked.size] * len(asked.images)
            tokens = sum(_tokens(size, base) for size in (asked.size, *controls))
            yield _area(asked.size), text_tokens(config, base, [asked.prompt], controls) + tokens


def text_tokens(config: Config, base: Architecture, texts: Sequence[str], controls: Sequence[Size]) -> int:
    """Of the longest text with the pictures that are seen beside it."""
    vl_pixels = config.data.processor.vl_pixels or base.family.vl_pixels
    prompt = max(len(text.encode("utf-8")) for text in texts)
    words = min(ceil(prompt / BYTES_PER_TOKEN), config.data.max_prompt_tokens)
    seen = sum(ceil(min(_area(size), vl_pixels) / base.text_encoder.token_side**2) for size in controls)
    return TEMPLATE_TOKENS + words + seen + PICTURE_TOKENS * len(controls)


def entry_bytes(document: Mapping[str, Any], config: Config, base: Architecture) -> int:
    """About the size of the cache entry with this key document."""
    sizes = document["sizes"]
    controls = [tuple(size) for size in sizes["controls"]]
    pictures = controls + ([tuple(sizes["target"])] if document["target"] is not None else [])
    latents = sum(_area(size) for size in pictures) // base.vae.scale**2 * base.family.latent_channels
    texts = [document["prompt"], *document["alternatives"]]
    texts += [""] if document["empty_prompt"] else []
    texts += [document["negative_prompt"]] if document["negative_prompt"] is not None else []
    tokens = sum(text_tokens(config, base, [text], controls) for text in texts)
    width = {
        name: EMBEDDING_BYTES.get(getattr(config.cache.dtypes, name), 4) for name in ("vae", "text_encoder")
    }
    return latents * width["vae"] + tokens * base.text_encoder.hidden * width["text_encoder"]


def _area(size: Size) -> int:
    return size[0] * size[1]


def _tokens(size: Size, base: Architecture) -> int:
    return ceil(size[0] / base.size_multiple) * ceil(size[1] / base.size_multiple)
