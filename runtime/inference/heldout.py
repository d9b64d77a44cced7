"""The flow loss of base and adapter on held-out samples, at the same sigmas and noises.

One number a draw and variant, so that a judge can pair them: what differs is the adapter alone.
"""

import math
from typing import Any

import torch
from torch import Tensor

from runtime.families import base
from runtime.inference.painter import Painter
from runtime.training import draws
from runtime.training.objective import Draw, FlowMatching

DRAWS = (
    32  # a sample; with four held-out samples 128 pairs, whose mean differs by a few per cent of their spread
)


def sigmas() -> list[float]:
    """Of the draws of each sample."""
    return [(index + 0.5) / DRAWS for index in range(DRAWS)]


@torch.no_grad()
def losses(painter: Painter, name: str, tensors: dict[str, Tensor], *, seed: int) -> list[dict[str, Any]]:
    """`DRAWS` lines {sigma, noise, base, adapter}; sigmas are spread evenly over 0..1."""
    objective = FlowMatching(family=painter.family, seed=seed)
    target = tensors["target"].float()[None]
    conditioning = base.conditioning_of(tensors)
    lines = []
    for index, sigma in enumerate(sigmas()):
        label = draws.seed_of("held-out", seed, name, index) % 2**53
        draw = Draw(sigmas=torch.tensor([sigma]), noise=draws.noise(target.shape, label))
        line: dict[str, Any] = {"sigma": sigma, "noise": label}
        for variant in ("base", "adapter"):
            with painter.variant(variant):
                loss = float(objective.losses(painter.predict, target, conditioning, draw)[0])
                line[variant] = loss if math.isfinite(loss) else None
        lines.append(line)
    return lines
