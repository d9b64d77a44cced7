"""Gate 03: healthy environments pass, and each planted fault turns its check and no other."""

from typing import Any

import pytest

from gates.selftest.faults import environment
from gates.selftest.faults.environment import FAILED, NAME, _package, _set, _target, _torch, _tritons
from gates.selftest.faults.row import each

FAULTS = {fault.what: fault for fault in environment.FAULTS}


BUILD, TRITON, NF4, IMPORTS = (
    "torch-build-matches-device", "at-most-one-triton", "quantizer-backend", "imports-clean"
)  # fmt: skip

# device of the target, what is spoiled, the checks that fail


@pytest.mark.parametrize("device", ["cpu", "xpu", "cuda"])
def test_healthy(device: str, make: Any, judge: Any) -> None:
    verdict = judge(make(device), "03")
    assert verdict.passes and verdict.counts["pass"] == 7 and verdict.device == device


def _check(verdict: Any, name: str) -> Any:
    return next(check for check in verdict.checks if check.id == name)


REMEDIES = {
    "a CPU build for XPU": (
        BUILD,
        "pip uninstall -y torch, then pip install torch==2.13.0 --index-url XPU_INDEX_URL (",
    ),
    "an XPU build that sees nothing": (BUILD, "install the device's newest driver"),
    "two tritons": (
        TRITON,
        "pip uninstall -y triton triton-xpu, then pip uninstall -y torch, then pip install",
    ),
    "triton-windows beside XPU": (TRITON, "pip uninstall -y triton-windows"),
    "bitsandbytes before XPU": (NF4, 'pip install "bitsandbytes>=0.48.2"'),
    "a foreign package gates": (IMPORTS, "pip uninstall -y other-thing"),
    "IPEX of another torch": ("ipex-not-mixed", "pip uninstall -y intel-extension-for-pytorch"),
    "diffusers too new": ("packages-present", 'pip install -e ".[train]"'),
    "another interpreter": ("python-version", "finetune probe --environment, with"),
}


@pytest.mark.parametrize("fault", REMEDIES)
def test_remedies(fault: str, make: Any, judge: Any) -> None:
    name, start = REMEDIES[fault]
    made = make(FAULTS[fault].shape)
    FAULTS[fault].spoil(made)
    check = _check(judge(made, "03"), name)
    assert check.status == "fail" and check.remedy.startswith(start)


MESSAGES = {
    "a CPU build for XPU": (BUILD, "torch 2.13.0+cpu is built for cpu, the device is xpu"),
    "a driver that hangs": (BUILD, "torch hung: in import torch: no answer within 180 s"),
    "triton-windows beside XPU": (TRITON, "triton-windows 3.7.0; torch is built for xpu, which goes with"),
    "diffusers too new": ("packages-present", "diffusers 0.43.0 is not >=0.42,<0.43"),
    "bitsandbytes that dies": (NF4, "NF4 on cpu failed: killed by SIGABRT"),
    "runtime shadowed": (IMPORTS, "`runtime` is another package: site-packages/runtime/__init__.py"),
}


@pytest.mark.parametrize("fault", MESSAGES)
def test_messages(fault: str, make: Any, judge: Any) -> None:
    name, text = MESSAGES[fault]
    made = make(FAULTS[fault].shape)
    FAULTS[fault].spoil(made)
    assert text in _check(judge(made, "03"), name).message


def test_a_source_build_has_no_suffix(make: Any, judge: Any) -> None:
    made = make("xpu")
    each(_set(torch={"version": "2.14.0a0"}), _package("torch", version="2.14.0a0"))(made)
    verdict = judge(made, "03")
    assert verdict.passes and _check(verdict, BUILD).observed["build"] == "xpu"


@pytest.mark.parametrize("version", ["2.13.0+cpu", "2.13.0", "2.13.0+xpu", "2.13.0+cu128"])
def test_any_build_trains_on_a_cpu(version: str, made: Any, judge: Any) -> None:
    _torch(version)(made)
    assert judge(made, "03").passes


def test_no_triton_at_all_is_fine(make: Any, judge: Any) -> None:
    made = make("xpu")
    _tritons()(made)
    check = _check(judge(made, "03"), TRITON)
    assert (check.status, check.message) == ("pass", "none")


def test_a_device_that_can_only_use_nf4_passes_and_is_told(make: Any, judge: Any) -> None:
    """Dequantizing is SYCL and works; quantizing is Triton, which lacks a compiler."""
    made = make("xpu")
    reason = "in quantize_4bit on xpu: RuntimeError: no compiler"
    _set(quantizer={**FAILED, "reason": reason, "quantize_error": None})(made)
    check = _check(judge(made, "03"), NF4)
    assert check.status == "pass" and check.message.endswith("no compiler: quantize on the CPU")


@pytest.mark.parametrize("device", ["cpu", "xpu", "cuda"])
def test_auto(device: str, make: Any, judge: Any) -> None:
    made = make(device)
    _target(device="auto")(made)
    verdict = judge(made, "03")
    assert verdict.passes and verdict.device == device


@pytest.mark.parametrize(("device", "name"), [("xpu", "Arc(TM) 140V"), ("cuda", "NVIDIA H200")])
def test_auto_does_not_fall_back_to_the_cpu_beside_a_gpu(
    device: str, name: str, make: Any, judge: Any, assert_turned: Any
) -> None:
    made = make(device)
    each(_target(device="auto"), _torch("2.13.0+cpu"))(made)
    _set(device="cpu", quantizer={"device": "cpu"})(made)
    verdict = judge(made, "03")
    assert_turned(verdict, fail={BUILD})
    check = _check(verdict, BUILD)
    assert "auto would train on the CPU beside" in check.message and name in check.message
    assert check.remedy.endswith("or finetune init --device cpu")


def test_auto_without_the_host_is_not_judged(made: Any, judge: Any, assert_turned: Any) -> None:
    _target(device="auto")(made)
    made.evidence("01-host").unlink()
    assert_turned(judge(made, "03"), fail={BUILD})


def test_ipex_of_the_same_torch_may_stay(make: Any, judge: Any) -> None:
    made = make("xpu")
    same = {"status": "ok", "seconds": 1.0, "exit": 0, "reason": "", "version": "2.13.10+xpu"}
    _set(ipex=same)(made)
    assert judge(made, "03").passes


def test_a_number_that_is_none_is_an_error(made: Any, judge: Any) -> None:
    path = made.evidence(NAME)
    text = path.read_text(encoding="utf-8").replace('"dequantize_error": 0.0916', '"dequantize_error": NaN')
    path.write_text(text, encoding="utf-8", newline="\n")
    assert judge(made, "03").outcome == "error"
