"""Peaks of text encoder and VAE at the published shape beside the plan's; for `memory_plan.py --encoders`.

Without an accelerator those of the base in `root`, at a small size: tensors are counted in place of an allocator.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from live import Live
from torch import Tensor
from vae import _random
from what_fits import PUBLISHED

from runtime import device as devices
from runtime.config.model import VaeMode
from runtime.device import Device
from runtime.files import GIB
from runtime.memory import vae as single_images
from runtime.planning import activations, architecture
from runtime.planning.estimate import Settings

PROMPT = 64  # tokens beside those of the pictures
SIDES = (512, 1024, 2048)
MODES: tuple[VaeMode, ...] = ("exact", "folded", "tiled")
ASKED = ((1, 384, 672), (1, 1008, 1008), (4, 384, 672))  # batch, height, width of the picture that it sees
SMALL_SIDES = (64, 384)  # the larger is more than one tile
SMALL_ASKED = ((1, 112, 140), (1, 224, 280), (2, 112, 140))


def encoders(root: Path, where: Device) -> Iterator[dict[str, Any]]:
    """A line for each VAE mode, direction and size, and for each prompt; `root` holds the base's config.json files."""
    yield from _pictures(root, where)
    yield from _texts(root, where)


def _settings(where: Device, **changes: Any) -> Settings:
    return Settings(
        device=where.type,
        quantize="none",
        precision="bf16",
        checkpointing=True,
        adapter_parameters=0,
        optimizer="torch.optim.AdamW",
        text_encoder_device=where.type,
        vae_device=where.type,
        **changes,
    )


def _peak(where: Device, work: Any, known: Iterable[Tensor]) -> float:
    """GiB above what is there before, of which `known` is all that `work` sees."""
    if not where.is_accelerator:
        with Live(known) as live, torch.no_grad():
            work()
        return float(live.peak / GIB)
    devices.free_cached(where)
    resident = devices.memory(where).alloc_gib
    devices.reset_peak(where)
    with torch.no_grad():
        work()
    devices.synchronize(where)
    return devices.memory(where).peak_gib - resident


def _line(case: str, peak: float, plan: float) -> dict[str, Any]:
    return {
        "case": case,
        "over_resident_gib": round(peak, 6),
        "plan_gib": round(plan, 6),
        "ratio": round(plan / peak, 3),
    }


def _pictures(root: Path, where: Device) -> Iterator[dict[str, Any]]:
    document = json.loads((root / "vae" / "config.json").read_text(encoding="utf-8"))
    shape = {name: value for name, value in document.items() if not name.startswith("_")}
    for mode in MODES:
        vae = _random(shape, where, torch.bfloat16)
        single_images.arrange(vae, mode)
        for side in SIDES if where.is_accelerator else SMALL_SIDES:
            yield from _picture(root, where, vae, mode, side)


def _picture(root: Path, where: Device, vae: Any, mode: VaeMode, side: int) -> Iterator[dict[str, Any]]:
    base, settings = architecture.read(root), _settings(where, vae=mode)
    pixels = torch.rand((1, 3, side, side), device=where.type, dtype=torch.bfloat16)
    latents = torch.randn((1, 16, side // 8, side // 8), device=where.type, dtype=torch.bfloat16)
    known = [pixels, latents, *vae.parameters(), *vae.buffers()]
    peak = _peak(where, lambda: single_images.encode(vae, pixels), known)
    plan = activations.encode_bytes(base, settings, side * side, 2) / GIB
    yield _line(f"vae {mode}, encode {side}", peak, plan)
    peak = _peak(where, lambda: single_images.decode(vae, latents), known)
    plan = activations.decode_bytes(base, settings, side * side, 2) / GIB
    yield _line(f"vae {mode}, decode {side}", peak, plan)


def _texts(root: Path, where: Device) -> Iterator[dict[str, Any]]:
    encoder = _text_encoder(root, where)
    base = architecture.read(root)
    for batch, height, width in ASKED if where.is_accelerator else SMALL_ASKED:
        given = _prompts(encoder.config.image_token_id, where, batch, height, width)
        known = [*given.values(), *encoder.parameters(), *encoder.buffers()]
        peak = _peak(where, lambda given=given: encoder.model(**given, use_cache=False), known)
        tokens = given["input_ids"].shape[1]
        plan = activations.text_encoder_bytes(base, _settings(where, encoded_at_once=batch), tokens, 2) / GIB
        yield _line(f"text encoder, batch {batch}, {height}x{width}, {tokens} tokens", peak, plan)


def _text_encoder(root: Path, where: Device) -> Any:
    """Qwen2.5-VL-7B in bf16 with random weights, on the device; on the CPU that of `root`."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    own = root / "text_encoder"
    config = _published() if where.is_accelerator else Qwen2_5_VLConfig.from_pretrained(own)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(where.type):
            return Qwen2_5_VLForConditionalGeneration(config).requires_grad_(False).eval()
    finally:
        torch.set_default_dtype(before)


def _published() -> Any:
    from transformers import Qwen2_5_VLConfig

    text = {k: v for k, v in PUBLISHED["text_encoder"].items() if k != "vision_config"}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    vision = {**PUBLISHED["text_encoder"]["vision_config"], "out_hidden_size": text["hidden_size"]}
    return Qwen2_5_VLConfig(text_config={**text, "rope_parameters": rope}, vision_config=vision)


def _prompts(image_token: int, where: Device, batch: int, height: int, width: int) -> dict[str, Any]:
    """What the processor gives for `batch` prompts with a picture each."""
    rows, columns = height // 28 * 2, width // 28 * 2  # patches
    grid = torch.tensor([[1, rows, columns]] * batch, device=where.type)
    seen = rows * columns // 4
    ids = torch.full((batch, PROMPT + seen), 1000, device=where.type)
    ids[:, 8 : 8 + seen] = image_token
    patches = torch.randn((batch * rows * columns, 3 * 2 * 14 * 14), device=where.type, dtype=torch.bfloat16)
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": patches,
        "image_grid_thw": grid,
        "mm_token_type_ids": (ids == image_token).int(),
    }
