"""How far NF4 moves the denoiser's answer on one fixed input, where there is room to load the plain one too."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from runtime import device
from runtime.families.base import Conditioning, Family
from runtime.files import GIB
from runtime.memory import architecture, budget

LATENT, TEXT_TOKENS, SIGMA, SEED = (
    16,
    24,
    0.5,
    6,
)  # a 128-pixel target with one control: small, and all blocks
SHARE = 0.5  # of the budget that the plain denoiser may take


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputError:
    value: float | None
    """||NF4 - plain|| / ||plain||; None where it was not measured."""
    reason: str


def measure(family: Family, model: Path, made: Path, kind: str) -> OutputError:
    """The two are loaded one after the other, on the device `kind`."""
    chosen = device.pick(kind)
    dtype = device.compute_dtype(chosen, "auto")
    found = budget.find(chosen.type)
    needed = architecture.read(model).denoiser.parameters * dtype.itemsize / GIB
    if needed > SHARE * found.gib:
        reason = (
            f"not measured: the plain denoiser takes {needed:.1f} GiB, {SHARE:.0%} of {found.gib:.1f} may be"
        )
        return OutputError(value=None, reason=reason)
    answers = []
    for folder in (None, made):
        denoiser = family.load_denoiser(
            model, device=chosen.type, dtype=dtype, quantize="nf4" if folder else "none", made=folder
        )
        answers.append(_ask(family, denoiser, chosen.type, dtype))
        del denoiser
        device.free_cached(chosen)
    plain, packed = answers
    error = float((packed - plain).norm() / plain.norm().clamp_min(1e-12))
    return OutputError(
        value=error, reason=f"one input of {LATENT} x {LATENT} latents on {chosen.type}, {dtype}"
    )


@torch.no_grad()
def _ask(family: Family, denoiser: Any, kind: str, dtype: torch.dtype) -> Tensor:
    draw = torch.Generator().manual_seed(SEED)
    shape = (1, family.facts.latent_channels, LATENT, LATENT)
    told = Conditioning(
        embeds=torch.randn(1, TEXT_TOKENS, denoiser.config.joint_attention_dim, generator=draw),
        mask=None,
        controls=(torch.randn(shape, generator=draw),),
    )
    noisy = torch.randn(shape, generator=draw).to(kind, dtype)
    answer = family.predict(denoiser, noisy, torch.tensor([SIGMA], device=kind), told.to(kind, dtype))
    return answer.float().cpu()
