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
from runtime.training.batches import MicroBatch
from runtime.training.objective import Draw, FlowMatching, Predict, Predictor, Question

REPLAY_ERROR = 1e-2  # relative; of two runs of one step in bf16 whose sums are taken in another order
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
        self.recorder = Recorder(self._backward, parameters, RECORDINGS) if recorded else None

    def __call__(self, batch: MicroBatch, draw: Draw, count: int) -> Tensor:
        """The loss of each sample, fp32 [B], detached; `count` samples share the step's mean."""
        if self.recorder is None:
            losses = self.objective.step_losses(self.predict, self.base, batch, draw)
            return _backward(losses, count)
        question = self.predict.bring(self.objective.question(self.base, batch, draw))
        self._make_room()
        return self.recorder(question, count)

    def _backward(self, question: Question, count: int) -> Tensor:
        return _backward(self.objective.judge(question, self.predict.brought(question)), count)

    def _make_room(self) -> None:
        """Gradients that stay where they are: a recording adds to them by address."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

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
        """Whether the tensors of the gradients must be kept between steps, and set to zero."""
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
    """Replays `compute` for shapes that come again, if the first replay gives the gradients of the computation."""

    def __init__(
        self, compute: Callable[[Question, int], Tensor], parameters: list[nn.Parameter], limit: int
    ) -> None:
        self.compute, self.parameters, self.limit = compute, parameters, limit
        self.recordings: dict[Any, Recording] = {}
        self.seen: set[Any] = set()
        self.pool = device.Recordings()
        self.fault = ""
        """Why nothing is recorded any more."""

    def __call__(self, question: Question, count: int) -> Tensor:
        shapes = tuple((tuple(tensor.shape), tensor.dtype) for tensor in question.tensors())
        key = (shapes, question.conditioning.mask is None, question.weights is None, count)
        if key in self.recordings:
            return self.recordings[key](question)
        if self.fault or key not in self.seen or len(self.recordings) >= self.limit:
            self.seen.add(key)
            return self.compute(question, count)  # lets libraries and compilers choose their kernels
        return self._record(key, question, count)

    def _record(self, key: Any, question: Question, count: int) -> Tensor:
        """The losses of `question`; a backend that can't record, or replays wrongly, is left alone from then on."""
        first = not self.recordings
        before = self._gradients() if first else []
        ours = question.map(torch.clone)
        try:
            recording = Recording(question=ours, replay=self.pool.record(lambda: self.compute(ours, count)))
            losses = recording(question)
        except RuntimeError as error:
            self.fault = str(error).strip().splitlines()[0]
            return self.compute(question, count)
        if first:
            replayed = self._gradients()
            self._set(before)
            losses = self.compute(question, count)
            self.fault = self._compare(replayed)
        if not self.fault:
            self.recordings[key] = recording
        return losses

    def _gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.parameters if p.grad is not None]

    def _set(self, gradients: list[Tensor]) -> None:
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(gradient)

    def _compare(self, replayed: list[Tensor]) -> str:
        """ "" where `replayed` are the gradients of now but for rounding."""
        computed = self._gradients()
        away = torch.stack([(a - b).norm() for a, b in zip(replayed, computed, strict=True)]).norm()
        error = float(away / torch.stack([b.norm() for b in computed]).norm().clamp_min(1e-30))
        return "" if error <= REPLAY_ERROR else f"a replay gave other gradients, {error:.2g} away"
