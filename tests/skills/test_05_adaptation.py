"""Gate 05: healthy probes and steps pass on every device, and each planted fault turns its check and no other."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from gates.selftest.faults import adaptation
from gates.selftest.faults.adaptation import FELL_BACK, IN_FP32, _broken, _config, _inputs, _seen, _step
from gates.selftest.faults.row import each

FAULTS = {fault.what: fault for fault in adaptation.FAULTS}

Spoil = Callable[[Any], Any]


@pytest.mark.parametrize("device", ["cpu", "xpu", "cuda"])
def test_healthy(device: str, make: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(make(device), "05")
    assert_turned(verdict)
    assert verdict.passes and verdict.counts["pass"] == 5 and verdict.device == device


@pytest.mark.parametrize("status", ["failed", "timeout", "absent"])
@pytest.mark.parametrize("name", ["adam8bit-step", "nf4-layer", "compile"])
def test_a_fallback_with_its_reason_is_a_pass(
    name: str, status: str, make: Any, judge: Any, assert_turned: Any
) -> None:
    made = make("xpu")
    _broken(name, status, FELL_BACK[name])(made)
    assert_turned(judge(made, "05"))


def test_fp32_where_bf16_is_broken(make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    _broken("bf16-kernel", choices=FELL_BACK["bf16-kernel"])(made)
    IN_FP32(made)
    assert_turned(judge(made, "05"))


def test_one_sample_where_masks_are_broken(make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    _broken("masked-sdpa", choices={"data.batch_size": 1})(made)
    for which in (0, 1):
        _step(which, masked=False, samples=1)(made)
    assert_turned(judge(made, "05"))


def test_8_bit_state_as_configured(make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    path = "bitsandbytes.optim.AdamW8bit"
    each(
        _config("optimizer", class_path=path),
        _inputs(**{"optimizer.class_path": path}),
        *(_step(which, optimizer=path) for which in (0, 1)),
        *(_seen("dtypes", which, optimizer_state=["float32", "uint8"]) for which in (0, 1)),
    )(made)
    assert_turned(judge(made, "05"))


def test_an_optimizer_without_state(make: Any, judge: Any, assert_turned: Any) -> None:
    made = make("xpu")
    for which in (0, 1):
        _seen("devices", which, optimizer_state=[])(made)
        _seen("dtypes", which, optimizer_state=[])(made)
    assert_turned(judge(made, "05"))


def test_a_cpu_says_that_it_is_its_own_reference(made: Any, judge: Any) -> None:
    check = next(c for c in judge(made, "05").checks if c.id == "step-parity")
    assert check.message == "the CPU in fp32 is the reference itself: it repeats"


def test_a_number_that_json_does_not_have_never_passes(make: Any, judge: Any) -> None:
    made = make("xpu")
    _step(gradient_error=math.nan)(made)
    assert judge(made, "05").outcome == "error"


REMEDIES = {
    "config asks for broken nf4": (
        "set model.quantize: auto in config.yaml, then finetune plan, then finetune adapt"
    ),
    "a batch that needs the broken mask": (
        "set data.batch_size: 1 in config.yaml, then finetune plan, then finetune adapt"
    ),
    "the plan counts on broken nf4": "finetune plan",
    "never run": "finetune adapt",
    "another torch since": "finetune adapt",
}


@pytest.mark.parametrize("fault", REMEDIES)
def test_remedies(fault: str, make: Any, judge: Any) -> None:
    made = make("xpu")
    FAULTS[fault].spoil(made)
    verdict = judge(made, "05")
    assert verdict.next_command == REMEDIES[fault]
    if "broken" in fault:
        assert "killed by SIGABRT" in next(c for c in verdict.checks if c.status == "fail").message


@pytest.mark.parametrize(
    ("environment_at", "remedy"),
    [
        ("2026-11-29T12:00:00.000Z", "finetune probe --environment"),
        ("2026-12-01T12:00:00.000Z", "finetune adapt"),
    ],
)
def test_of_two_measurements_that_differ_the_older_is_made_again(
    environment_at: str, remedy: str, made: Any, judge: Any
) -> None:
    """Else the probes would be asked for again and again, and find the same again and again."""

    def change(document: Any) -> None:
        document["measured_at"] = environment_at
        torch = next(item for item in document["data"]["packages"] if item["name"] == "torch")
        torch["version"] = "2.12.0"

    made.edit(made.evidence("03-environment"), change)
    verdict = judge(made, "05")
    assert (verdict.first_failure, verdict.next_command) == ("probes-complete", remedy)
