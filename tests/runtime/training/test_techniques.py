"""Techniques that save memory or time, in a fit: none may change what is learned."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from runtime import device
from runtime.errors import ConfigError
from runtime.memory import checkpointing
from runtime.progress import Progress
from runtime.training import gradients, loop

STEPS = {"train.max_train_steps": 4, "train.checkpointing_steps": 2, "train.probe_samples": 1}
TABLE = {**STEPS, "train.cached_modulation": True}


def trained(lab: Any, changes: dict[str, Any]) -> dict[str, Tensor]:
    return lab.adapter(lab.fit({**STEPS, **changes}).path)


LEARNED: dict[str, dict[str, Tensor]] = {}


def learned(lab: Any, changes: dict[str, Any]) -> dict[str, Tensor]:
    """As `trained`, by the determinism rule once for all tests: what others are held against."""
    key = json.dumps(changes, sort_keys=True)
    if key not in LEARNED:
        LEARNED[key] = trained(lab, changes)
    return LEARNED[key]


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    away = sum(float((one[name] - other[name]).double().square().sum()) for name in one)
    return (away / sum(float(tensor.double().square().sum()) for tensor in one.values())) ** 0.5


@pytest.mark.parametrize("mode", [False, 2, 3, "selective"])
@pytest.mark.parametrize("more", [{}, {"model.quantize": "nf4"}, {"model.lora.lora_dropout": 0.3}], ids=str)
def test_what_is_recomputed_changes_no_bit(lab: Any, mode: Any, more: dict[str, Any]) -> None:
    one = learned(lab, {**more, "train.gradient_checkpointing": True})
    two = trained(lab, {**more, "train.gradient_checkpointing": mode})
    assert all(torch.equal(one[name], two[name]) for name in one)


@pytest.mark.parametrize("mode, most", [(False, 0), (True, 2), (2, 1), ("selective", 2)])
def test_a_checkpoint_spans_what_the_mode_says(
    lab: Any, mode: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = checkpointing.checkpoint, []
    monkeypatch.setattr(checkpointing, "checkpoint", lambda *a, **n: (calls.append(n), original(*a, **n))[1])
    session = lab.launch({"train.gradient_checkpointing": mode})
    loop._gradients(session, 1, next(session.batches.windows(1, 1, 1)))
    assert len(calls) == most
    assert all(("context_fn" in named) == (mode == "selective") for named in calls)


@pytest.mark.parametrize(
    "more", [{"validation.sample_steps": 4}, {"model.quantize": "nf4"}], ids=["plain", "nf4"]
)
def test_a_fit_on_a_table_learns_the_same_but_for_rounding(lab: Any, more: dict[str, Any]) -> None:
    """All that asks the denoiser is in it: steps with accumulation, probes, pictures painted on the way."""
    asks = {**more, "train.gradient_accumulation_steps": 2}
    live = learned(lab, {k: v for k, v in asks.items() if not k.startswith("validation.")})
    table = trained(lab, {**asks, "train.cached_modulation": True})
    assert 0 < distance(live, table) < 1e-4
    other = learned(lab, {"train.gradient_accumulation_steps": 2, "train.seed": 5})
    assert distance(live, other) > 1e-2


def test_a_resumed_run_on_a_table_is_bit_equal(lab: Any) -> None:
    whole = trained(lab, TABLE)
    launched = lab.launch(TABLE)
    original, taken = loop._checkpoint, []

    def stop(session: Any, cursor: Any, *given: Any) -> None:
        original(session, cursor, *given)
        taken.append(cursor.step)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_checkpoint", stop)
        with pytest.raises(KeyboardInterrupt):
            loop.fit(launched, Progress(quiet=True))
    assert taken == [2]
    shutil.rmtree(lab.root / "models" / "modulation")  # made anew, the same bits
    resumed = lab.adapter(lab.fit(TABLE, resume="latest").path)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_no_weight_of_the_modulation_is_resident(lab: Any) -> None:
    sizes = [
        lab.launch({"train.cached_modulation": on}).run.document["trainable"]["base_gib"]
        for on in (False, True)
    ]
    assert sizes[1] < 0.72 * sizes[0]


@pytest.mark.parametrize("targets", ["all-linear", ["transformer_blocks.1.*"]])
def test_a_table_is_refused_where_the_adapter_moves_what_it_holds(lab: Any, targets: Any) -> None:
    with pytest.raises(ConfigError, match=r"train\.cached_modulation is true, but") as caught:
        lab.launch({"train.cached_modulation": True, "model.lora.target_modules": targets})
    assert "train.cached_modulation: auto" in caught.value.remedy
    assert lab.launch({"model.lora.target_modules": targets}).predict.table is None


class Tape:
    """Recordings on a machine that has none: a replay does the work anew, on the tensors of the recording."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.recorded += 1
        return work


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    made = Tape()
    monkeypatch.setattr(device, "Recordings", lambda: made)
    return made


@pytest.mark.parametrize("more", [{}, {"train.cached_modulation": True}, {"model.quantize": "nf4"}], ids=str)
def test_replayed_steps_learn_the_same_bits(lab: Any, tape: Tape, more: dict[str, Any]) -> None:
    """Prompts of several lengths, so several shapes; what is not copied into a recording would show."""
    asks = {**more, "train.max_train_steps": 5, "data.batch_size": 1, "train.gradient_accumulation_steps": 2}
    eager = learned(lab, {**asks, "train.graphs": False})
    assert tape.recorded == 0
    replayed = trained(lab, {**asks, "train.graphs": True})
    assert tape.recorded >= 2
    assert all(torch.equal(eager[name], replayed[name]) for name in eager)


def test_shapes_beyond_the_limit_are_computed_as_they_are(lab: Any, tape: Tape, monkeypatch: Any) -> None:
    asks = {"train.max_train_steps": 9, "data.batch_size": 1}
    eager = learned(lab, {**asks, "train.graphs": False})
    monkeypatch.setattr(gradients, "RECORDINGS", 1)
    replayed = trained(lab, {**asks, "train.graphs": True})
    assert tape.recorded == 1
    assert all(torch.equal(eager[name], replayed[name]) for name in eager)


@pytest.mark.parametrize("wrong", ["raises", "forgets"])
def test_a_device_that_replays_wrongly_is_left_alone(
    lab: Any, tape: Tape, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    asks = {"train.max_train_steps": 9, "data.batch_size": 1}
    eager = learned(lab, {**asks, "train.graphs": False})

    def record(self: Tape, work: Callable[[], Tensor]) -> Callable[[], Tensor]:
        if wrong == "raises":
            raise RuntimeError("operation not permitted when stream is capturing")
        losses = torch.zeros(1)
        return lambda: losses  # a graph that holds nothing

    monkeypatch.setattr(Tape, "record", record)
    run = lab.fit({**asks, "train.graphs": True})
    told = run.document["speed"]
    assert told["recorded"] == 0
    assert ("not permitted" if wrong == "raises" else "other gradients") in told["fault"]
    after = lab.adapter(run.path)
    assert all(torch.equal(eager[name], after[name]) for name in eager)


def test_other_linears_kept_plain_ask_for_another_table(lab: Any) -> None:
    """Kept modulations are exact ones: a table of packed ones would be stale."""
    for keep in ([], ["*_mod.1"]):
        lab.launch({**TABLE, "model.quantize": "nf4", "model.nf4_keep": keep})
    assert len(list((lab.root / "models" / "modulation").iterdir())) == 2
