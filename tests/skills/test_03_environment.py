"""Gate 03: healthy environments pass, and each planted fault turns its check and no other."""

from collections.abc import Callable
from typing import Any

import pytest

NAME = "03-environment"
NOTHING = {"available": False, "devices": []}
FAILED = {"status": "failed", "exit": 1}
HUNG = {"status": "timeout", "exit": None, "reason": "in import torch: no answer within 180 s"}


def _data(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    return lambda made: made.edit(made.evidence(NAME), lambda document: change(document["data"]))


def _set(**values: Any) -> Callable[[Any], None]:
    """Values of the evidence's data; a dictionary is merged into the one that is there."""

    def change(data: dict[str, Any]) -> None:
        for key, value in values.items():
            merged = isinstance(value, dict) and isinstance(data[key], dict)
            data[key] = {**data[key], **value} if merged else value

    return _data(change)


def _package(name: str, **values: Any) -> Callable[[Any], None]:
    return _data(lambda data: next(item for item in data["packages"] if item["name"] == name).update(values))


def _torch(version: str, **values: Any) -> Callable[[Any], None]:
    """Another build of torch, of which no source says what it is built for but its version."""
    built = {"xpu": None, "cuda": None, "hip": None}
    return _set(
        torch={"version": version, "built": built, "xpu": NOTHING, "cuda": NOTHING, **values}, tritons=[]
    )


def _tritons(*names: str) -> Callable[[Any], None]:
    return _set(tritons=[{"name": name, "version": "3.7.0"} for name in names])


def _target(**values: Any) -> Callable[[Any], None]:
    return lambda made: made.edit(".gates/target.json", lambda document: document.update(values))


def _both(*changes: Callable[[Any], None]) -> Callable[[Any], None]:
    def spoil(made: Any) -> None:
        for change in changes:
            change(made)

    return spoil


def _owner(kind: str, name: str) -> Callable[[Any], None]:
    return _data(lambda data: data["names"][kind].append({"name": name, "distribution": "other-thing"}))


def _module(name: str, reason: str) -> Callable[[Any], None]:
    return _data(lambda data: data["imports"]["modules"].update({name: reason}))


BUILD, TRITON, NF4, IMPORTS = (
    "torch-build-matches-device", "at-most-one-triton", "quantizer-backend", "imports-clean"
)  # fmt: skip
UNREAD = {"python-version", "packages-present", BUILD, TRITON, "ipex-not-mixed"}

# device of the target, what is spoiled, the checks that fail
FAULTS: dict[str, tuple[str, Callable[[Any], Any], set[str]]] = {
    "not probed": ("cpu", lambda m: m.evidence(NAME).unlink(), UNREAD),
    "a probe that did not end": (
        "cpu", lambda m: m.edit(m.evidence(NAME), lambda d: d.update(complete=False, data={})), UNREAD
    ),
    "another interpreter": ("cpu", _set(python={"minor": "3.12", "version": "3.12.1"}), {"python-version"}),
    "target of another interpreter": ("cpu", _target(python="3.13"), {"python-version"}),
    "peft absent": ("cpu", _package("peft", version=None), {"packages-present"}),
    "peft not looked for": (
        "cpu", _data(lambda d: d.update(packages=[i for i in d["packages"] if i["name"] != "peft"])),
        {"packages-present"},
    ),
    "diffusers too new": ("cpu", _package("diffusers", version="0.43.0"), {"packages-present"}),
    "transformers too old": ("cpu", _package("transformers", version="4.57.1"), {"packages-present"}),
    "torch of the days before 2.9": ("cpu", _package("torch", version="2.8.0+xpu"), {"packages-present"}),
    "a version that is none": ("cpu", _package("peft", version="unknown"), {"packages-present"}),
    "torch absent": (
        "cpu",
        _both(
            _package("torch", version=None),
            _set(torch={"version": None, "status": "absent", "reason": "torch is not installed"}),
        ),
        {"packages-present", BUILD},
    ),
    "a CPU build for XPU": ("xpu", _torch("2.13.0+cpu"), {BUILD}),
    "a build without suffix for XPU": ("xpu", _torch("2.13.0"), {BUILD}),
    "a CUDA build for XPU": ("xpu", _torch("2.13.0+cu128"), {BUILD}),
    "an XPU build that sees nothing": ("xpu", _torch("2.13.0+xpu"), {BUILD}),
    "an XPU build for CUDA": ("cuda", _torch("2.13.0+xpu"), {BUILD}),
    "a CPU build for CUDA": ("cuda", _torch("2.13.0+cpu"), {BUILD}),
    "a driver that ends the process": (
        "xpu",
        _set(torch={**FAILED, "reason": "in torch.xpu.get_device_properties: killed by SIGSEGV", "xpu": NOTHING}),
        {BUILD},
    ),
    "a driver that hangs": ("xpu", _set(torch=HUNG), {BUILD}),
    "two tritons": ("xpu", _tritons("triton", "triton-xpu"), {TRITON}),
    "two of the right kind": ("xpu", _tritons("pytorch-triton-xpu", "triton-xpu"), {TRITON}),
    "triton-windows beside XPU": ("xpu", _tritons("triton-windows"), {TRITON}),
    "triton-xpu beside CUDA": ("cuda", _tritons("triton-xpu"), {TRITON}),
    "two beside a CPU build": ("cpu", _tritons("triton", "triton-windows"), {TRITON}),
    "bitsandbytes before XPU": (
        "xpu", _package("bitsandbytes", version="0.48.1", bounds=">=0.45"), {NF4}
    ),
    "bitsandbytes that dies": (
        "cpu", _set(quantizer={**FAILED, "reason": "killed by SIGABRT", "dequantize_error": None}), {NF4}
    ),
    "bitsandbytes that hangs": ("xpu", _set(quantizer={**HUNG, "dequantize_error": None}), {NF4}),
    "a wrong kernel": ("xpu", _set(quantizer={"dequantize_error": 1.4}), {NF4}),
    "tried on another device": ("xpu", _set(quantizer={"device": "cpu"}), {NF4}),
    "a DLL is missing": ("cpu", _module("diffusers", "OSError: [WinError 126]"), {IMPORTS}),
    "an import that ends the process": (
        "cpu", _set(imports={**FAILED, "reason": "in import bitsandbytes.nn: exit 127"}), {IMPORTS}
    ),
    "imports that hang": ("cpu", _set(imports=HUNG), {IMPORTS}),
    "an import that was left out": (
        "cpu", _data(lambda d: d["imports"]["modules"].pop("accelerate") or None), {IMPORTS}
    ),
    "a foreign package gates": ("cpu", _owner("distributions", "gates"), {IMPORTS}),
    "a foreign package finetune": ("cpu", _owner("distributions", "finetune"), {IMPORTS}),
    "a foreign command gate": ("cpu", _owner("scripts", "gate"), {IMPORTS}),
    "runtime shadowed": (
        "cpu",
        _data(lambda d: d["names"]["packages"][1].update(ours=False, where="site-packages/runtime/__init__.py")),
        {IMPORTS},
    ),
    "names not looked at": ("cpu", _set(names={**FAILED, "reason": "exit 1"}), {IMPORTS}),
    "IPEX of another torch": ("xpu", _set(ipex={"status": "ok", "seconds": 1.0, "exit": 0, "reason": "",
        "version": "2.8.0"}), {"ipex-not-mixed"}),
    "IPEX that ends the process": (
        "xpu",
        _set(ipex={**FAILED, "seconds": 1.0, "exit": 127, "reason": "exit 127", "version": "2.13.0"}),
        {"ipex-not-mixed"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_its_check(fault: str, make: Any, judge: Any, assert_turned: Any) -> None:
    device, spoil, expected = FAULTS[fault]
    made = make(device)
    spoil(made)
    assert_turned(judge(made, "03"), fail=expected)


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
    made = make(FAULTS[fault][0])
    FAULTS[fault][1](made)
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
    made = make(FAULTS[fault][0])
    FAULTS[fault][1](made)
    assert text in _check(judge(made, "03"), name).message


def test_a_source_build_has_no_suffix(make: Any, judge: Any) -> None:
    made = make("xpu")
    _both(_set(torch={"version": "2.14.0a0"}), _package("torch", version="2.14.0a0"))(made)
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
    _both(_target(device="auto"), _torch("2.13.0+cpu"))(made)
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
