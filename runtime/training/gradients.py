"""Forward and backward of a micro-batch: as it is, or replayed from a recording.

A small step spends most of its time launching kernels; recorded once for its shapes and replayed, it does not.
Recordings share one pool of memory. Each holds the kernels of a step besides, so their number has a limit: shapes
beyond it, or seen only once, are computed as they are.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from runtime import device
from runtime.device import Device
from runtime.training.batches import MicroBatch
from runtime.training.objective import Draw, FlowMatching, Predict, Predictor, Question

REPLAY_ERROR = 1e-2  # relative; of two runs of one step in bf16 whose sums are taken in another order
REFUSALS = 3  # shapes that could not be recorded, after which none is tried any more
RECORDINGS = 16  # shapes of a run; the bucket and the length of the text make a shape


class Gradients:
    """Adds the gradients of a micro-batch to those of the adapter's parameters."""

    def __init__(
        self,
        objective: FlowMatching,
        predict: Predictor,
        base: Predict,
        parameters: list[nn.Parameter],
        *,
        recorded: bool,
    ) -> None:
        self.objective, self.predict, self.base, self.parameters = objective, predict, base, parameters
        self.recorder = Recorder(self._backward, parameters, predict.where, RECORDINGS) if recorded else None

    def __call__(self, batch: MicroBatch, draw: Draw, count: int) -> Tensor:
        """The loss of each sample, fp32 [B], detached; `count` samples share the step's mean."""
        if self.recorder is None:
            losses = self.objective.step_losses(self.predict, self.base, batch, draw)
            return _backward(losses, count)
        question = self.predict.bring(self.objective.question(self.base, batch, draw))
        return self.recorder(question, count)

    def _backward(self, question: Question, count: int) -> Tensor:
        return _backward(self.objective.judge(question, self.predict.brought(question)), count)

    @property
    def recorded(self) -> int:
        """Shapes that are replayed."""
        return len(self.recorder.recordings) if self.recorder is not None else 0

    @property
    def fault(self) -> str:
        """Why steps are not replayed although that was asked for."""
        return self.recorder.fault if self.recorder is not None else ""

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradients must stay where they are between steps, set to zero: a recording adds to them by address.

        Weights that have none, since nobody reads what they make, get none so either.
        """
        return self.recorder is not None


def _backward(losses: Tensor, count: int) -> Tensor:
    """The mean is over the samples of the step, however they fall into micro-batches."""
    if not losses.requires_grad:
        raise DisconnectedError
    torch.autograd.backward(losses.sum() / count)
    return losses.detach()


class DisconnectedError(Exception):
    """The loss depends on nothing that is trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    question: Question
    """Whose tensors the recording reads."""
    replay: Callable[[], Tensor]

    def __call__(self, question: Question) -> Tensor:
        for ours, given in zip(self.question.tensors(), question.tensors(), strict=True):
            ours.copy_(given)
        return self.replay().clone()


class Recorder:
    """Replays `compute` for shapes that come again, where the first replay gives the gradients of the computation."""

    def __init__(
        self,
        compute: Callable[[Question, int], Tensor],
        parameters: list[nn.Parameter],
        where: Device,
        limit: int,
    ) -> None:
        self.compute, self.parameters, self.where, self.limit = compute, parameters, where, limit
        self.recordings: dict[Any, Recording] = {}
        self.seen: set[Any] = set()
        self.refused: set[Any] = set()
        self.pool = device.Recordings()
        self.fault = ""
        """Why a shape is computed each time; the last of such reasons."""

    def __call__(self, question: Question, count: int) -> Tensor:
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in question.tensors())
        key = (shapes, question.weights is None, count)
        if key in self.recordings:
            return self.recordings[key](question)
        # A padded batch: diffusers asks for its lengths in the middle of the forward, which no recording can.
        if key not in self.seen or question.conditioning.mask is not None or self._full(key):
            self.seen.add(key)
            return self.compute(question, count)  # lets libraries and compilers choose their kernels
        return self._record(key, question, count)

    def _full(self, key: Any) -> bool:
        if key not in self.refused and len(self.refused) < REFUSALS and len(self.recordings) >= self.limit:
            self.fault = f"{self.limit} shapes are recorded, others are computed each time"
            return True
        return key in self.refused or len(self.refused) >= REFUSALS

    def _record(self, key: Any, question: Question, count: int) -> Tensor:
        """The losses of `question`, computed; the first replay has to give the same gradients.

        Computed first: what that took is given back when recording begins, so the two never hold memory together.
        """
        before = self._gradients()
        losses = self.compute(question, count)
        computed = self._gradients()
        self._set(before)
        recording, fault = self._attempt(question, count)
        if recording is not None:
            fault = _difference(self._gradients(), computed)
        self._set(computed)
        if recording is None:
            device.free_cached(self.where)  # of an attempt that may have run out of it
        if fault:
            self.fault = fault
            self.refused.add(key)
        elif recording is not None and _finite(computed):
            self.recordings[key] = recording
        return losses

    def _attempt(self, question: Question, count: int) -> tuple[Recording | None, str]:
        """Recorded and replayed once; or why that was not possible, with nothing of it left in memory."""
        try:
            ours = question.map(torch.clone)
            replay = self.pool.record(lambda: self.compute(ours, count))
            recording = Recording(question=ours, replay=replay)
            recording(question)
        except RuntimeError as error:
            return None, (str(error).strip() or "no reason given").splitlines()[0]
        return recording, ""

    def _gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.parameters if p.grad is not None]

    def _set(self, gradients: list[Tensor]) -> None:
        there = [p.grad for p in self.parameters if p.grad is not None]
        for ours, given in zip(there, gradients, strict=True):
            ours.copy_(given)


def _finite(gradients: list[Tensor]) -> bool:
    """Whether they tell anything; a step that is not finite is tried again another time."""
    return all(bool(gradient.isfinite().all()) for gradient in gradients)


def _difference(replayed: list[Tensor], computed: list[Tensor]) -> str:
    """ "" where they are the same but for rounding, or where the computed ones are not finite."""
    if not _finite(computed):
        return ""
    away = torch.stack([(a - b).norm() for a, b in zip(replayed, computed, strict=True)]).norm()
    error = float(away / torch.stack([b.norm() for b in computed]).norm().clamp_min(1e-30))
    return "" if error <= REPLAY_ERROR else f"a replay gave other gradients, {error:.2g} away"
