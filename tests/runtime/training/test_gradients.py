"""The recorder of steps on a machine that has none: a replay does the work anew, on the tensors of the recording."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime import device
from runtime.families.base import Conditioning
from runtime.training import gradients
from runtime.training.gradients import Recorder
from runtime.training.objective import Question


def question(length: int, value: float, *, padded: bool = False) -> Question:
    return Question(
        noisy=torch.full((1, length), value),
        sigmas=torch.tensor([0.5]),
        conditioning=Conditioning(
            embeds=torch.ones(1, length, 2),
            mask=torch.ones(1, length, dtype=torch.bool) if padded else None,
            controls=(),
        ),
        velocity=torch.zeros(1, length),
        weights=None,
        scale=torch.ones(1),
    )


class Machine:
    """Two weights, of which one gets gradients; `record` is what a backend does, right unless a test says otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit: int = 8) -> None:
        self.used, self.idle = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
        self.computed = self.recorded = 0
        self.fault: Callable[[Callable[[], Tensor]], Callable[[], Tensor]] | None = None
        monkeypatch.setattr(device, "Recordings", lambda: self)
        self.recorder = Recorder(self.compute, [self.used, self.idle], device.pick("cpu"), limit)

    def compute(self, asked: Question, count: int) -> Tensor:
        self.computed += 1
        losses = (self.used * asked.noisy * asked.conditioning.embeds[..., 0]).sum(dim=1)
        torch.autograd.backward(losses.sum() / count)
        return losses.detach()

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        if self.fault is not None:
            return self.fault(work)
        return work

    def step(self, asked: Question, count: int = 1) -> tuple[float, float]:
        """Loss, and the gradient that the step added."""
        before = 0.0 if self.used.grad is None else float(self.used.grad)
        loss = float(self.recorder(asked, count)[0])
        assert self.used.grad is not None
        return loss, float(self.used.grad) - before


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_each_step_gives_its_own_loss_and_gradient_replayed_or_not(machine: Machine) -> None:
    for turn, value in enumerate((1.0, 2.0, 3.0, 4.0)):
        for length in (3, 5):
            for count in (1, 2):
                expected = (value * length, value * length / count)
                assert machine.step(question(length, value), count) == pytest.approx(expected), turn
    assert machine.recorded == len(machine.recorder.recordings) == 4
    assert machine.recorder.fault == ""


def test_a_weight_that_nobody_reads_gets_no_gradient(machine: Machine) -> None:
    """With one of zeros AdamW would let it decay, and a replayed run would not be the computed one."""
    for value in (1.0, 2.0, 3.0):
        machine.step(question(3, value))
    assert machine.idle.grad is None and machine.recorder.recordings


def test_padded_batches_are_never_recorded(machine: Machine) -> None:
    for value in (1.0, 2.0, 3.0):
        assert machine.step(question(3, value, padded=True)) == (3 * value, 3 * value)
    assert machine.recorded == 0 and machine.recorder.fault == ""


def test_shapes_beyond_the_limit_are_computed_and_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, limit=1)
    for value in (1.0, 2.0, 3.0):
        for length in (2, 3):
            assert machine.step(question(length, value)) == (value * length, value * length)
    assert machine.recorded == 1
    assert machine.recorder.fault == "1 shapes are recorded, others are computed each time"


def raising(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    raise RuntimeError("operation not permitted when stream is capturing\nmore")


def forgetting(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: torch.zeros(1)


def halfway(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A replay that adds its gradients and then fails."""

    def replay() -> Tensor:
        work()
        raise RuntimeError("launch failed")

    return replay


@pytest.mark.parametrize(
    ("fault", "told"),
    [(raising, "not permitted"), (forgetting, "other gradients"), (halfway, "launch failed")],
)
def test_a_backend_that_fails_costs_nothing_but_time(machine: Machine, fault: Any, told: str) -> None:
    machine.fault = fault
    for turn in range(3):
        for length in (2, 3, 4, 5):
            value = turn + 1.0
            assert machine.step(question(length, value)) == (value * length, value * length)
    assert machine.recorded == gradients.REFUSALS, "after so many shapes no further one is tried"
    assert told in machine.recorder.fault and "\n" not in machine.recorder.fault
    assert not machine.recorder.recordings


def test_what_is_recorded_was_computed_before(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording gives back what was free of the computation's memory; the other way round both are held."""
    events: list[str] = []

    def noted(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        events.append("recorded")
        return work

    compute = machine.compute
    machine.recorder.compute = lambda asked, count: (events.append("computed"), compute(asked, count))[1]
    machine.fault = noted
    for value in (1.0, 2.0, 3.0):
        assert machine.step(question(3, value)) == (3 * value, 3 * value)
    # The last of the second step is its replay, which is all that the third one does.
    assert events == ["computed", "computed", "recorded", "computed", "computed"]


def test_what_a_failed_attempt_held_is_gone_before_the_next_step_is_computed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt that ran out of memory must not take the computation with it."""
    held: list[weakref.ref[Tensor]] = []
    alive: list[bool] = []

    def out_of_memory(work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        kept = torch.ones(4)
        held.append(weakref.ref(kept))
        raise torch.OutOfMemoryError(f"no room beside {kept.sum()}")

    compute = machine.compute

    def watched(asked: Question, count: int) -> Tensor:
        gc.collect()
        alive.append(any(reference() is not None for reference in held))
        return compute(asked, count)

    machine.recorder.compute = watched
    machine.fault = out_of_memory
    for value in (1.0, 2.0, 3.0):
        machine.step(question(3, value))
    assert len(held) == 1 and alive == [False] * 3, "the third is computed after the attempt"


def test_a_step_that_is_not_finite_proves_nothing(machine: Machine) -> None:
    machine.step(question(3, 1.0))
    machine.step(question(3, float("nan")))
    assert machine.recorder.fault == "" and not machine.recorder.recordings
    assert machine.used.grad is not None
    machine.used.grad.zero_()
    assert machine.step(question(3, 2.0)) == (6.0, 6.0)
    assert len(machine.recorder.recordings) == 1
