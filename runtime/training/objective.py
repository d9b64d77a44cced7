"""What is learned: the velocity that carries noise to the target.

An objective is given a way to predict and returns one loss per sample; it draws its own
sigmas and noise, as pure functions of (seed, step, slot).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime import device
from runtime.device import Device
from runtime.families.base import Conditioning, Family
from runtime.training import draws
from runtime.training.batches import MicroBatch

Predict = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(noisy [B, C, h, w], sigma [B], conditioning) to velocity [B, C, h, w]."""


def predictor(family: Family, denoiser: nn.Module, where: Device, dtype: torch.dtype) -> Predict:
    """How a fit asks `denoiser`, computing in `dtype` on the device; inputs may lie on the CPU in fp32."""

    def predict(noisy: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        with device.autocast(where, dtype):
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
    sampling: str
    seed: int

    def draw(self, batch: MicroBatch, step: int, first_slot: int) -> Draw:
        """Sigma and noise of each sample; `first_slot` counts the samples of the step before this batch."""
        shape = batch.target.shape[1:]
        shift = self.family.shift(shape[-2] * shape[-1] // 4)
        slots = range(first_slot, first_slot + len(batch.ids))
        sigmas = [draws.sigma(self.sampling, shift, self.seed, step, slot) for slot in slots]
        noise = [draws.noise(shape, self.seed, step, slot) for slot in slots]
        return Draw(sigmas=torch.tensor(sigmas), noise=torch.stack(noise))

    def losses(self, predict: Predict, target: Tensor, conditioning: Conditioning, draw: Draw) -> Tensor:
        """Mean squared error of each sample, fp32 [B], on the device of the prediction.

        The noisy target is made on the CPU in fp32, so every device is asked the same question.
        """
        sigma = draw.sigmas[:, None, None, None]
        noisy = (1 - sigma) * target + sigma * draw.noise
        velocity = predict(noisy, draw.sigmas, conditioning).float()
        return (velocity - (draw.noise - target).to(velocity.device)).square().mean(dim=(1, 2, 3))
