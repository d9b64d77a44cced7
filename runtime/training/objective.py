"""What is learned: the velocity that carries noise to the target.

An objective is given ways to predict, with the adapter and without, and returns one loss per sample; it
draws its own sigmas and noise, as pure functions of (seed, step, slot).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from runtime.device import Device
from runtime.families.base import Conditioning, Family
from runtime.memory import modulation
from runtime.training import draws
from runtime.training.batches import MicroBatch
from runtime.training.sigmas import Sigmas

Predict = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(noisy [B, C, h, w], sigma [B], conditioning) to velocity [B, C, h, w]."""


class Predictor:
    """How a fit asks `denoiser`, computing in `dtype` on the device; inputs may lie on the CPU in fp32.

    There is no autocast: base and inputs have one dtype and the adapter follows it (`runtime.training.layers`),
    so nothing is copied into another. On one H200 autocast kept 1 GiB more for an NF4 step of 384 x 672.
    Sigma stays fp32 until it is embedded: rounded to bf16, 0.999 and 1 would be the same.
    """

    def __init__(self, family: Family, denoiser: nn.Module, where: Device, dtype: torch.dtype) -> None:
        self.family, self.denoiser, self.where, self.dtype = family, denoiser, where, dtype
        self.table = modulation.rows_of(denoiser)

    def __call__(self, noisy: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        if self.table is not None:
            self.table.placed = self.table.read(sigma)
        return self.family.predict(
            self.denoiser,
            noisy.to(self.where.type, self.dtype),
            sigma.to(self.where.type),
            conditioning.to(self.where.type, self.dtype),
        )

    def bring(self, question: "Question") -> "Question":
        """`question` on the device, with the rows of its sigmas where modulation is a table."""
        device, dtype = self.where.type, self.dtype
        moved = question.map(lambda tensor: tensor.to(device))
        return replace(
            moved,
            noisy=moved.noisy.to(dtype),
            conditioning=moved.conditioning.to(device, dtype),
            rows=None if self.table is None else self.table.read(question.sigmas),
        )

    def brought(self, question: "Question") -> Tensor:
        """The velocity for a question that was brought; nothing is copied from the host."""
        if self.table is not None:
            self.table.placed = question.rows
        return self.family.predict(self.denoiser, question.noisy, question.sigmas, question.conditioning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """`sigmas` fp32 [B]; `noise` fp32 [B, C, h, w]."""

    sigmas: Tensor
    noise: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What the denoiser is asked in a step, and by what its answer is judged.

    `noisy`, `velocity` [B, C, h, w]; `sigmas`, `scale` [B]; `weights` of latents [B, 1, h, w] or None; all fp32.
    """

    noisy: Tensor
    sigmas: Tensor
    conditioning: Conditioning
    velocity: Tensor
    weights: Tensor | None
    scale: Tensor
    rows: Tensor | None = None
    """What a table of modulations has for the sigmas."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Question":
        """The same of changed tensors."""
        mapped = {name: change(value) for name, value in self._own()}
        return replace(self, conditioning=self.conditioning.map(change), **mapped)

    def tensors(self) -> list[Tensor]:
        found: list[Tensor] = []
        self.map(lambda tensor: (found.append(tensor), tensor)[1])  # type: ignore[func-returns-value]
        return found

    def _own(self) -> Iterator[tuple[str, Tensor]]:
        for name in ("noisy", "sigmas", "velocity", "weights", "scale", "rows"):
            value = getattr(self, name)
            if value is not None:
                yield name, value


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
        sigmas = self.sigmas_of(shape, len(batch.ids), step, first_slot)
        slots = range(first_slot, first_slot + len(batch.ids))
        noise = [draws.noise(shape, self.seed, step, slot) for slot in slots]
        return Draw(sigmas=torch.tensor(sigmas), noise=torch.stack(noise))

    def sigmas_of(self, shape: Sequence[int], samples: int, step: int, first_slot: int) -> list[float]:
        """Of the samples of a micro-batch, from the shape [C, h, w] of their targets alone."""
        shift = self.family.shift(shape[-2] * shape[-1] // 4)
        slots = range(first_slot, first_slot + samples)
        return [self.sigmas.draw(self.seed, step, slot, family_shift=shift) for slot in slots]

    def step_losses(self, predict: Predict, base: Predict, batch: MicroBatch, draw: Draw) -> Tensor:
        """What a step descends on: a loss of each sample, weighed as configured, fp32 [B]."""
        question = self.question(base, batch, draw)
        return self.judge(question, predict(question.noisy, question.sigmas, question.conditioning))

    def question(self, base: Predict, batch: MicroBatch, draw: Draw) -> Question:
        """Made on the CPU in fp32, so every device is asked the same.

        `base` predicts without the adapter: what samples of a regularisation set are held to, at the same
        sigma and noise (prior preservation). Their pictures count only as what is made noisy.
        """
        noisy, velocity = _noisy(batch.target, draw), draw.noise - batch.target
        scale = _weights(self.weighting, draw.sigmas)
        if batch.regularisation:
            with torch.no_grad():
                velocity = base(noisy, draw.sigmas, batch.conditioning).float().detach()
            scale = scale * self.prior_weight
        weights = None if batch.mask is None else self.mask_floor + (1 - self.mask_floor) * batch.mask
        return Question(
            noisy=noisy,
            sigmas=draw.sigmas,
            conditioning=batch.conditioning,
            velocity=velocity,
            weights=weights,
            scale=scale,
        )

    def judge(self, question: Question, predicted: Tensor) -> Tensor:
        """The loss of each sample, fp32 [B], on the device of the prediction."""
        predicted = predicted.float()
        error = (predicted - question.velocity.to(predicted.device)).square()
        return _weighted_mean(error, question.weights) * question.scale.to(predicted.device)

    def losses(self, predict: Predict, target: Tensor, conditioning: Conditioning, draw: Draw) -> Tensor:
        """Mean squared error of each sample, unweighted, fp32 [B], on the device of the prediction.

        The noisy target is made on the CPU in fp32, so every device is asked the same question.
        """
        predicted = predict(_noisy(target, draw), draw.sigmas, conditioning).float()
        return (predicted - (draw.noise - target).to(predicted.device)).square().mean(dim=(1, 2, 3))


def _noisy(target: Tensor, draw: Draw) -> Tensor:
    sigma = draw.sigmas[:, None, None, None]
    return (1 - sigma) * target + sigma * draw.noise


def _weighted_mean(error: Tensor, weights: Tensor | None) -> Tensor:
    """Of each sample [B]; weights [B, 1, h, w] are normalised by their mean: a small mask counts as much."""
    if weights is None:
        return error.mean(dim=(1, 2, 3))
    weights = weights.to(error.device)
    return (error * weights).mean(dim=(1, 2, 3)) / weights.mean(dim=(1, 2, 3))


def _weights(scheme: str, sigmas: Tensor) -> Tensor:
    """Of each sample [B], by SD3's schemes."""
    if scheme == "none":
        return torch.ones_like(sigmas)
    from diffusers.training_utils import compute_loss_weighting_for_sd3

    return compute_loss_weighting_for_sd3(scheme, sigmas)  # type: ignore[no-any-return]
