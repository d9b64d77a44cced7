"""From noise to a picture with the family's own schedule, at the size that training used.

diffusers' edit pipelines always resize the control to a megapixel, so they can't show what a
run at another size learned. Noise is a function of (seed, sample), so base and adapter start
from the same and one sample can't shift the noise of the next.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from runtime.config.model import Validation, ValidationSample
from runtime.families import base
from runtime.families.base import Conditioning, Family
from runtime.training import draws
from runtime.training.objective import Predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is painted, beside the tensors that it is painted from."""

    name: str
    size: tuple[int, int]
    """Height and width in pixels."""
    seed: int
    steps: int
    guidance: float


def task_of(
    validation: Validation, name: str, size: tuple[int, int], asked: ValidationSample | None = None
) -> Task:
    """As configured; `asked`, a prompt's own word, goes before."""
    seed = asked.seed if asked is not None else None
    steps = asked.num_inference_steps if asked is not None else None
    return Task(
        name=name,
        size=size,
        seed=validation.seed if seed is None else seed,
        steps=validation.num_inference_steps if steps is None else steps,
        guidance=validation.guidance_scale,
    )


def sigmas(family: Family, model: Path, task: Task) -> list[float]:
    """What painting will ask for, in fp32."""
    scheduler = family.scheduler(model, task.size[0] // 16 * (task.size[1] // 16), task.steps)
    return [float(_sigma(scheduler, timestep)) for timestep in scheduler.timesteps]


def _sigma(scheduler: Any, timestep: Tensor) -> Tensor:
    """fp32 [1]"""
    sigma: Tensor = timestep / scheduler.config.num_train_timesteps
    return sigma.reshape(1).float()


def paint(
    family: Family, predict: Predict, model: Path, task: Task, tensors: Mapping[str, Tensor]
) -> tuple[Tensor, str]:
    """`sample` for the conditioning in a cache entry's tensors."""
    held = dict(tensors)
    return sample(
        family,
        predict,
        model,
        (family.facts.latent_channels, task.size[0] // 8, task.size[1] // 8),
        base.conditioning_of(held),
        steps=task.steps,
        seed=task.seed,
        name=task.name,
        negative=base.conditioning_of(held, "negative_embeds") if "negative_embeds" in held else None,
        guidance=task.guidance,
    )


@torch.no_grad()
def sample(
    family: Family,
    predict: Predict,
    model: Path,
    shape: Sequence[int],
    conditioning: Conditioning,
    *,
    steps: int,
    seed: int,
    name: str,
    negative: Conditioning | None = None,
    guidance: float = 1.0,
) -> tuple[Tensor, str]:
    """Normalised latents [1, *shape] fp32 on the CPU, and the digest of the noise that they began as.

    `negative` and `guidance` above 1 turn true CFG on.
    """
    scheduler = family.scheduler(model, shape[-2] * shape[-1] // 4, steps)
    latents = draws.noise((1, *shape), "sample", seed, name)
    started_from = hashlib.sha256(latents.numpy().tobytes()).hexdigest()
    for timestep in scheduler.timesteps:
        sigma = _sigma(scheduler, timestep)
        velocity = predict(latents, sigma, conditioning).float().cpu()
        if negative is not None and guidance > 1:
            velocity = _guide(velocity, predict(latents, sigma, negative).float().cpu(), guidance)
        latents = scheduler.step(velocity, timestep, latents, return_dict=False)[0]
    return latents, started_from


def _guide(velocity: Tensor, negative: Tensor, scale: float) -> Tensor:
    """True CFG as the published pipeline does it: each token keeps the norm of the conditional one.

    A token is a 2x2 patch of all channels; [1, C, h, w].
    """
    guided = negative + scale * (velocity - negative)
    return guided * (_token_norm(velocity) / _token_norm(guided).clamp_min(1e-12))


def _token_norm(latents: Tensor) -> Tensor:
    squares = latents.square().sum(dim=1, keepdim=True)
    patches = torch.nn.functional.avg_pool2d(squares, 2) * 4
    return torch.nn.functional.interpolate(patches, scale_factor=2, mode="nearest").sqrt()


def to_image(pixels: Tensor) -> Image.Image:
    """[3, H, W] in -1..1 to a picture."""
    array = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte()
    return Image.fromarray(array.permute(1, 2, 0).cpu().numpy())
