"""How far NF4 moves the denoiser's answers to a few fixed inputs, with one block of it in memory at a time.

The plain denoiser answers, then the packed one, all inputs as one batch; each block gets its weights when its turn
comes and gives them back after. So it is measured wherever one block fits, at the price of reading the weights once
more.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime import device, files, shards
from runtime.device import Device
from runtime.errors import UserError
from runtime.families.base import Conditioning, Family
from runtime.memory import loading
from runtime.memory.loading import Folder, Placement
from runtime.progress import Progress
from runtime.quantize import made

LATENT, TEXT_TOKENS, SEED = 16, 24, 6  # a 128-pixel target with one control: small, and all blocks
SIGMAS = (0.1, 0.5, 0.9)  # nearly clean, half, nearly noise


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputError:
    value: float | None
    """||NF4 - plain|| / ||plain|| of the input that it moves most; None where it was not measured."""
    reason: str


def measure(family: Family, plain: Path, packed: Path, kind: str, progress: Progress) -> OutputError:
    """Of the denoisers in two component folders, on the device `kind`."""
    if made.is_packed(plain):
        return OutputError(value=None, reason="not measured: the base's own denoiser is NF4")
    try:
        shards.find(plain)
    except UserError:
        return OutputError(value=None, reason="not measured: the base's denoiser is not here any more")
    chosen = device.pick(kind)
    dtype = device.compute_dtype(chosen, "auto")
    exact = answer(family, plain, chosen, dtype, progress)
    moved = answer(family, packed, chosen, dtype, progress)
    gaps, norms = (moved - exact).flatten(1).norm(dim=1), exact.flatten(1).norm(dim=1)
    errors = (gaps / norms.clamp_min(1e-12)).tolist()
    for error, norm, sigma in zip(errors, norms.tolist(), SIGMAS, strict=True):
        if not math.isfinite(error):
            whose = packed if math.isfinite(norm) else plain
            raise UserError(
                f"the denoiser in {whose} answers NaN or infinity at sigma {sigma}: weights of it are damaged",
                remedy=f"remove {packed}, then finetune quantize" if whose == packed else shards.FETCH,
            )
    each = ", ".join(f"{error:.2%} at sigma {sigma}" for sigma, error in zip(SIGMAS, errors, strict=True))
    reason = f"{each}; inputs of {LATENT} x {LATENT} latents on {chosen.type}, {dtype}, block by block"
    return OutputError(value=max(errors), reason=reason)


def answer(family: Family, folder: Path, where: Device, dtype: torch.dtype, progress: Progress) -> Tensor:
    """What the denoiser in `folder`, plain or packed, says to the fixed inputs: [B, C, h, w] in fp32 on the CPU."""
    placement = Placement(device=where.type, dtype=dtype)
    denoiser = loading.empty(_class_of(folder), folder)
    inside = f"{family.facts.blocks}."
    _give(denoiser, folder, placement, lambda name: not name.startswith(inside))
    blocks: Any = denoiser.get_submodule(family.facts.blocks)
    progress.start(f"output of {'NF4' if made.is_packed(folder) else 'the plain denoiser'}", len(blocks))
    for index, block in enumerate(blocks):
        block.register_forward_pre_hook(_filled(denoiser, folder, placement, f"{inside}{index}."))
        block.register_forward_hook(_emptied(blocks, index, progress))
    try:
        return _ask(family, denoiser.requires_grad_(False).eval(), where.type, dtype)
    finally:
        progress.stop()
        device.free_cached(where)


def _class_of(folder: Path) -> Any:
    import diffusers

    return getattr(diffusers, files.read_json(folder / "config.json")["_class_name"])


def _give(model: nn.Module, folder: Path, placement: Placement, wanted: Callable[[str], bool]) -> None:
    for piece in Folder(folder).pieces(wanted):
        placement.put(model, piece)


def _filled(model: nn.Module, folder: Path, placement: Placement, prefix: str) -> Callable[..., None]:
    return lambda block, given: _give(model, folder, placement, lambda name: name.startswith(prefix))


def _emptied(blocks: nn.ModuleList, index: int, progress: Progress) -> Callable[..., None]:
    def forget(block: nn.Module, given: Any, answer: Any) -> None:
        blocks[index] = nn.Identity()
        progress.update(index + 1)

    return forget


@torch.no_grad()
def _ask(family: Family, denoiser: Any, kind: str, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(SEED)
    shape = (len(SIGMAS), family.facts.latent_channels, LATENT, LATENT)
    told = Conditioning(
        embeds=torch.randn(len(SIGMAS), TEXT_TOKENS, denoiser.config.joint_attention_dim, generator=draw),
        mask=None,
        controls=(torch.randn(shape, generator=draw),),
    )
    noisy = torch.randn(shape, generator=draw).to(kind, dtype)
    found = family.predict(denoiser, noisy, torch.tensor(SIGMAS, device=kind), told.to(kind, dtype))
    return found.float().cpu()
