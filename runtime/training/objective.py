"""What is learned: the velocity that carries noise to the target.

An objective is given ways to predict, with the adapter and without, and returns one loss per sample; it
draws its own sigmas and noise, as pure functions of (seed, step, slot).
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from runtime.device import Device
from runtime.families.base import Conditioning, Family
from runtime.training import draws
from runtime.training.batches import MicroBatch
from runtime.training.sigmas import Sigmas

Predict = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(noisy [B, C, h, w], sigma [B], conditioning) to velocity [B, C, h, w]."""


def predictor(family: Family, denoiser: nn.Module, where: Device, dtype: torch.dtype) -> Predict:
    """How a fit asks `denoiser`, computing in `dtype` on the device; inputs may lie on the CPU in fp32.

    There is no autocast: base and inputs have one dtype and the adapter follows it (`runtime.training.layers`),
    so nothing is copied into another. On one H200 autocast kept 1 GiB more for an NF4 step of 384 x 672.
    Sigma stays fp32 until it is embedded: rounded to bf16, 0.999 and 1 would be the same.
    """

    def predict(noisy: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return family.predict(
            denoiser,
            noisy.to(where.type, dtype),
            sigma.to(where.type),
            conditioning.to(where.type, dtype),
        )

    return predict


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """`sigmas` fp32 [B]; `noise` fp32 [B, C, h, w]."""

    sigmas: Tensor
    noise: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatching:
    """x_t = (1 - s) x0 + s e, and the denoiser predicts e - x0."""

    family: Family
    seed: int
    sigmas: Sigmas = field(default_factory=Sigmas)
    weighting: str = "none"
    mask_floor: float = 0.0
    """Weight of latents where a mask is black; white has 1."""
    prior_weight: float = 1.0
    """Weight of samples that hold the base's behaviour."""

    def draw(self, batch: MicroBatch, step: int, first_slot: int) -> Draw:
        """Sigma and noise of each sample; `first_slot` counts the samples of the step before this batch."""
        shape = batch.target.shape[1:]
        shift = self.family.shift(shape[-2] * shape[-1] // 4)
        slots = range(first_slot, first_slot + len(batch.ids))
        sigmas = [self.sigmas.draw(self.seed, step, slot, family_shift=shift) for slot in slots]
        noise = [draws.noise(shape, self.seed, step, slot) for slot in slots]
        return Draw(sigmas=torch.tensor(sigmas), noise=torch.stack(noise))

    def step_losses(self, predict: Predict, base: Predict, batch: MicroBatch, draw: Draw) -> Tensor:
        """What a step descends on: a loss of each sample, weighed as configured, fp32 [B].

        `base` predicts without the adapter: what samples of a regularisation set are held to, at the same
        sigma and noise (prior preservation). Their pictures count only as what is made noisy.
        """
        noisy, velocity = _noisy(batch.target, draw), draw.noise - batch.target
        if batch.regularisation:
            with torch.no_grad():
                velocity = base(noisy, draw.sigmas, batch.conditioning).float().detach()
        predicted = predict(noisy, draw.sigmas, batch.conditioning).float()
        error = (predicted - velocity.to(predicted.device)).square()
        losses = _masked_mean(error, batch.mask, self.mask_floor)
        if batch.regularisation:
            losses = losses * self.prior_weight
        return losses * _weights(self.weighting, draw.sigmas).to(losses.device)

    def losses(self, predict: Predict, target: Tensor, conditioning: Conditioning, draw: Draw) -> Tensor:
        """Mean squared error of each sample, unweighted, fp32 [B], on the device of the prediction.

        The noisy target is made on the CPU in fp32, so every device is asked the same question.
        """
        predicted = predict(_noisy(target, draw), draw.sigmas, conditioning).float()
        return (predicted - (draw.noise - target).to(predicted.device)).square().mean(dim=(1, 2, 3))


def _noisy(target: Tensor, draw: Draw) -> Tensor:
    sigma = draw.sigmas[:, None, None, None]
    return (1 - sigma) * target + sigma * draw.noise


def _masked_mean(error: Tensor, mask: Tensor | None, floor: float) -> Tensor:
    """Of each sample [B]; with a mask [B, 1, h, w] normalised by its mean weight: a small one counts as much."""
    if mask is None:
        return error.mean(dim=(1, 2, 3))
    weights = (floor + (1 - floor) * mask).to(error.device)
    return (error * weights).mean(dim=(1, 2, 3)) / weights.mean(dim=(1, 2, 3))


def _weights(scheme: str, sigmas: Tensor) -> Tensor:
    """Of each sample [B], by SD3's schemes."""
    if scheme == "none":
        return torch.ones_like(sigmas)
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    return compute_loss_weighting_for_sd3(scheme, sigmas)  # type: ignore[no-any-return]
