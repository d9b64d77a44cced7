"""A healthy run of qflux passes with its core judged, and each planted fault turns its check."""

import json
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from gates.qflux.checks import FULL, SMOKE
from gates.qflux.verdict import judge
from gates.verdict import validate

Spoil = Callable[[Any], Any]
CORE = [
    "stopped-at-max-steps", "checkpoint-written", "loss-finite", "loss-fell", "adapter-only", "adapter-learned",
]  # fmt: skip
UNKNOWN = {
    "cache-complete", "cache-matches-config", "cache-distinct", "cache-roundtrip", "run-matches-inputs",
    "environment-as-judged", "smoke-passed-as-configured", "memory-stable", "xpu-alloc",
}  # fmt: skip


def _losses(change: Callable[[list[float]], list[float]]) -> Spoil:
    def spoil(run: Any) -> None:
        from_conftest = _curve(run)
        run.events(change(from_conftest))

    return spoil


def _curve(run: Any) -> list[float]:
    from gates.qflux.run import read

    return [loss for _, loss in read(run.root).curve.get()]


def _flat(losses: list[float]) -> list[float]:
    """The same noise without its fall: the second half's, twice."""
    return losses[150:] * 2


def _nan(losses: list[float]) -> list[float]:
    return [*losses[:100], float("nan"), *losses[101:]]


def _unguarded(run: Any) -> None:
    """300 steps were asked for, and 600 done: the epoch loop went on."""
    run.events(_curve(run) + _curve(run)[150:] * 2)
    for step in (400, 500, 600):
        run.checkpoint(step, epoch=step // 30)
    run.checkpoint(600, last=True, epoch=20)


def _no_checkpoint(run: Any) -> None:
    for path in run.root.glob("checkpoint-*"):
        shutil.rmtree(path)


def _truncate(run: Any) -> None:
    path = run.root / "checkpoint-0-300" / "pytorch_lora_weights.safetensors"
    path.write_bytes(path.read_bytes()[:-3])


def _state_of(step: int) -> Spoil:
    return lambda run: (run.root / "checkpoint-0-300/state.json").write_text(
        json.dumps({"global_step": step})
    )


BASE = {"transformer.transformer_blocks.0.attn.to_q.weight": np.ones((16, 16), np.float32)}


def _up(change: Callable[[Any], Any]) -> Spoil:
    return lambda run: run.adapter(lambda name, tensor: change(tensor) if ".lora_B" in name else tensor)


FAULTS: dict[str, tuple[Spoil, set[str]]] = {
    "one loss is NaN": (_losses(_nan), {"loss-finite"}),
    "one loss is infinite": (_losses(lambda x: [*x[:-1], float("inf")]), {"loss-finite"}),
    "a flat curve": (_losses(_flat), {"loss-fell"}),
    "a rising curve": (_losses(lambda x: x[::-1]), {"loss-fell"}),
    "only the last step is lucky": (_losses(lambda x: [*_flat(x)[:-1], 1e-4]), {"loss-fell"}),
    "it fell, and came back": (_losses(lambda x: x[:150] + x[:150][::-1]), {"loss-fell"}),
    "a loss of zero": (_losses(lambda x: [0.0, *x[1:]]), {"loss-fell"}),
    "max_train_steps was ignored": (_unguarded, {"stopped-at-max-steps"}),
    "it died at step 200": (
        lambda run: (run.events(_curve(run)[:200]), shutil.rmtree(run.root / "checkpoint-0-300"),
                     shutil.rmtree(run.root / "checkpoint-last-0-300-last")),
        {"stopped-at-max-steps", "checkpoint-written"},
    ),
    "a step is missing": (
        lambda run: (run.config(lambda c: c["train"].update(max_train_steps=301)), run.events(_curve(run), 1)),
        {"stopped-at-max-steps", "checkpoint-written"},
    ),
    "no checkpoint at all": (_no_checkpoint, {"stopped-at-max-steps", "checkpoint-written"}),
    "a checkpoint cut short": (_truncate, {"checkpoint-written"}),
    "state.json of another step": (_state_of(200), {"checkpoint-written"}),
    "state.json is absent": (
        lambda run: (run.root / "checkpoint-0-300/state.json").unlink(), {"checkpoint-written"},
    ),
    "no curve": (
        lambda run: next(run.root.glob("events*")).unlink(), {"loss-finite"},
    ),
    "base weights beside the adapter": (lambda run: run.add("checkpoint-0-300", BASE), {"adapter-only"}),
    "base weights in the state": (
        lambda run: run.add("checkpoint-last-*", BASE, "model.safetensors"), {"adapter-only"},
    ),
    "a merged model in the folder": (
        lambda run: (run.root / "checkpoint-0-300/diffusion_pytorch_model.safetensors").write_bytes(b"x"),
        {"adapter-only"},
    ),
    "another rank than configured": (
        lambda run: run.config(lambda c: c["model"]["lora"].update(r=16)), {"adapter-only"},
    ),
    "lora_B is zero": (_up(lambda tensor: tensor * 0), {"adapter-learned"}),
    "lora_B is rounding noise": (_up(lambda tensor: tensor * np.float32(1e-8)), {"adapter-learned"}),
    "a weight is NaN": (_up(lambda tensor: tensor * np.float32("nan")), {"adapter-learned"}),
    "nothing moved after the first checkpoint": (_up(lambda tensor: tensor * 0 + 1), {"adapter-learned"}),
    "no adapter's tensors": (
        lambda run: run.adapter(lambda name, tensor: None), {"checkpoint-written"},
    ),
}  # fmt: skip


def _turned(verdict: Any) -> set[str]:
    return {check.id for check in verdict.checks if check.status in ("fail", "error") and check.required}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_turns_its_check(name: str, qflux: Any) -> None:
    run = qflux()
    spoil, expected = FAULTS[name]
    spoil(run)
    verdict = judge(run.root)
    assert _turned(verdict) == expected, [(c.id, c.message) for c in verdict.checks]
    assert verdict.verdict == "FAIL" and verdict.outcome in ("failed", "error")
    assert all(check.remedy for check in verdict.checks if check.status in ("fail", "error"))
    validate(verdict.to_json())


def test_a_healthy_run_passes_by_its_core_and_says_what_it_can_not_know(qflux: Any) -> None:
    verdict = judge(qflux().root)
    validate(verdict.to_json())
    assert (verdict.verdict, verdict.outcome, verdict.phase, verdict.run) == ("PASS", "passed", "full", "v3")
    assert "qflux" in verdict.name and "qflux: core 6 of 6" in verdict.summary
    assert [c.id for c in verdict.checks if c.required and c.status == "pass"] == CORE
    skipped = {check.id: check.message for check in verdict.checks if check.status == "skip"}
    assert set(skipped) == UNKNOWN and all(id in verdict.summary for id in skipped)
    assert all(message.startswith("qflux records no ") for message in skipped.values())
    assert verdict.device is None and {item.path for item in verdict.inputs} > {"v3/train_config.yaml"}


def test_a_check_that_needs_another_does_not_pass_without_it(qflux: Any) -> None:
    run = qflux()
    _losses(_nan)(run)
    check = next(check for check in judge(run.root).checks if check.id == "loss-fell")
    assert (check.status, check.excused) == ("skip", False) and "needs loss-finite" in check.message


def test_a_smoke_fit(qflux: Any) -> None:
    run = qflux(steps=5)
    verdict = judge(run.root)
    assert (verdict.verdict, verdict.phase) == ("PASS", "smoke")
    assert [c.id for c in verdict.checks if c.required] == [
        "stopped-at-max-steps", "checkpoint-written", "loss-finite", "adapter-only",
    ]  # fmt: skip
    run.events([0.1] * 5 + [0.1] * 85)
    assert _turned(judge(run.root)) == {"stopped-at-max-steps"}


def test_too_short_a_run_can_not_show_a_fall(qflux: Any) -> None:
    run = qflux(steps=60)
    verdict = judge(run.root)
    assert _turned(verdict) == {"loss-fell"} and "too few steps" in verdict.first_check.message


def test_a_fall_lost_in_noise_fails_and_says_what_could_be_seen(qflux: Any) -> None:
    run = qflux()
    _losses(_flat)(run)
    check = next(check for check in judge(run.root).checks if check.id == "loss-fell")
    assert 0.4 < check.observed["detectable"] < 0.8
    assert f"show a fall of {check.observed['detectable']:.0%} or more" in check.message


def test_dora_magnitudes_are_of_the_adapter(qflux: Any) -> None:
    run = qflux()
    name = "transformer.transformer_blocks.0.attn.to_q.lora_magnitude_vector"
    run.add("*", {name: np.ones(16, np.float32)})
    assert judge(run.root).passes


def test_a_resumed_run_starts_where_the_other_ended(qflux: Any) -> None:
    run = qflux()
    run.config(lambda c: c.update(resume="C:\\out\\edit\\v2\\checkpoint-last-3-100-last"))
    shutil.rmtree(run.root / "checkpoint-0-100")
    run.events(_curve(run)[100:], first=100)
    verdict = judge(run.root)
    assert "stopped-at-max-steps" not in _turned(verdict)
    run.config(lambda c: c.update(resume="somewhere"))
    assert "stopped-at-max-steps" in _turned(judge(run.root))


def test_several_last_checkpoints_and_no_schedule_are_advisory_unless_strict(qflux: Any) -> None:
    run = qflux()
    run.checkpoint(300, last=True, epoch=9)
    shutil.rmtree(run.root / "checkpoint-0-200")
    verdict = judge(run.root)
    assert verdict.passes
    warned = {check.id for check in verdict.checks if check.status == "fail"}
    assert warned == {"one-last-checkpoint", "checkpoints-on-schedule"}
    assert _turned(judge(run.root, strict=True)) == warned


def test_a_required_device_can_not_be_shown(qflux: Any) -> None:
    verdict = judge(qflux().root, require_device="xpu")
    assert _turned(verdict) == {"xpu-alloc"} and verdict.exit_code == 1


@pytest.mark.parametrize("key", ["train", "model"])
def test_a_config_that_lacks_what_is_judged_is_an_error(key: str, qflux: Any) -> None:
    run = qflux()
    run.config(lambda c: c.pop(key) and None)
    verdict = judge(run.root)
    assert verdict.outcome == "error" and verdict.exit_code == 3
    assert "expected a whole number" in verdict.first_check.message


@pytest.mark.parametrize("name", ["train_config.yaml", "checkpoint-0-300/state.json"])
def test_garbage_never_crashes(name: str, qflux: Any) -> None:
    run = qflux()
    (run.root / name).write_bytes(b"\xff{[")
    verdict = judge(run.root)
    assert not verdict.passes
    assert not [check for check in verdict.checks if "Error:" in check.message]


def test_every_check_is_explained() -> None:
    for spec in (*FULL.specs, *SMOKE.specs):
        assert spec.measures and spec.why and spec.remedy and spec.title
