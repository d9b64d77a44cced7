"""Faults of gate 03: the packages."""

from collections.abc import Callable
from typing import Any

from gates.selftest.faults.row import Fault, Spoil, each, fault

NAME = "03-environment"
NOTHING = {"available": False, "devices": []}
FAILED = {"status": "failed", "exit": 1}
HUNG = {"status": "timeout", "exit": None, "reason": "in import torch: no answer within 180 s"}


def _data(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit(made.evidence(NAME), lambda document: change(document["data"]))


def _set(**values: Any) -> Spoil:
    """Values of the evidence's data; a dictionary is merged into the one that is there."""

    def change(data: dict[str, Any]) -> None:
        for key, value in values.items():
            merged = isinstance(value, dict) and isinstance(data[key], dict)
            data[key] = {**data[key], **value} if merged else value

    return _data(change)


def _package(name: str, **values: Any) -> Spoil:
    return _data(lambda data: next(item for item in data["packages"] if item["name"] == name).update(values))


def _torch(version: str, **values: Any) -> Spoil:
    """Another build of torch, of which no source says what it is built for but its version."""
    built = {"xpu": None, "cuda": None, "hip": None}
    return _set(
        torch={"version": version, "built": built, "xpu": NOTHING, "cuda": NOTHING, **values}, tritons=[]
    )


def _tritons(*names: str) -> Spoil:
    return _set(tritons=[{"name": name, "version": "3.7.0"} for name in names])


def _target(**values: Any) -> Spoil:
    return lambda made: made.edit(".gates/target.json", lambda document: document.update(values))


def _owner(kind: str, name: str) -> Spoil:
    return _data(lambda data: data["names"][kind].append({"name": name, "distribution": "other-thing"}))


def _module(name: str, reason: str) -> Spoil:
    return _data(lambda data: data["imports"]["modules"].update({name: reason}))


BUILD, TRITON, NF4, IMPORTS = (
    "torch-build-matches-device", "at-most-one-triton", "quantizer-backend", "imports-clean"
)  # fmt: skip
UNREAD = {"python-version", "packages-present", BUILD, TRITON, "ipex-not-mixed"}

FAULTS: tuple[Fault, ...] = (
    fault("not probed", UNREAD, lambda m: m.evidence(NAME).unlink()),
    fault(
        "a probe that did not end",
        UNREAD,
        lambda m: m.edit(m.evidence(NAME), lambda d: d.update(complete=False, data={})),
    ),
    fault("another interpreter", {"python-version"}, _set(python={"minor": "3.12", "version": "3.12.1"})),
    fault("target of another interpreter", {"python-version"}, _target(python="3.13")),
    fault("peft absent", {"packages-present"}, _package("peft", version=None)),
    fault(
        "peft not looked for",
        {"packages-present"},
        _data(lambda d: d.update(packages=[i for i in d["packages"] if i["name"] != "peft"])),
    ),
    fault("diffusers too new", {"packages-present"}, _package("diffusers", version="0.43.0")),
    fault("transformers too old", {"packages-present"}, _package("transformers", version="4.57.1")),
    fault("torch of the days before 2.9", {"packages-present"}, _package("torch", version="2.8.0+xpu")),
    fault("a version that is none", {"packages-present"}, _package("peft", version="unknown")),
    fault(
        "torch absent",
        {"packages-present", BUILD},
        each(
            _package("torch", version=None),
            _set(torch={"version": None, "status": "absent", "reason": "torch is not installed"}),
        ),
    ),
    fault("a CPU build for XPU", {BUILD}, _torch("2.13.0+cpu"), shape="xpu"),
    fault("a build without suffix for XPU", {BUILD}, _torch("2.13.0"), shape="xpu"),
    fault("a CUDA build for XPU", {BUILD}, _torch("2.13.0+cu128"), shape="xpu"),
    fault("an XPU build that sees nothing", {BUILD}, _torch("2.13.0+xpu"), shape="xpu"),
    fault("an XPU build for CUDA", {BUILD}, _torch("2.13.0+xpu"), shape="cuda"),
    fault("a CPU build for CUDA", {BUILD}, _torch("2.13.0+cpu"), shape="cuda"),
    fault(
        "a driver that ends the process",
        {BUILD},
        _set(
            torch={
                **FAILED,
                "reason": "in torch.xpu.get_device_properties: killed by SIGSEGV",
                "xpu": NOTHING,
            }
        ),
        shape="xpu",
    ),
    fault("a driver that hangs", {BUILD}, _set(torch=HUNG), shape="xpu"),
    fault("two tritons", {TRITON}, _tritons("triton", "triton-xpu"), shape="xpu"),
    fault("two of the right kind", {TRITON}, _tritons("pytorch-triton-xpu", "triton-xpu"), shape="xpu"),
    fault("triton-windows beside XPU", {TRITON}, _tritons("triton-windows"), shape="xpu"),
    fault("triton-xpu beside CUDA", {TRITON}, _tritons("triton-xpu"), shape="cuda"),
    fault("two beside a CPU build", {TRITON}, _tritons("triton", "triton-windows")),
    fault(
        "bitsandbytes before XPU",
        {NF4},
        _package("bitsandbytes", version="0.48.1", bounds=">=0.45"),
        shape="xpu",
    ),
    fault(
        "bitsandbytes that dies",
        {NF4},
        _set(quantizer={**FAILED, "reason": "killed by SIGABRT", "dequantize_error": None}),
    ),
    fault("bitsandbytes that hangs", {NF4}, _set(quantizer={**HUNG, "dequantize_error": None}), shape="xpu"),
    fault("a wrong kernel", {NF4}, _set(quantizer={"dequantize_error": 1.4}), shape="xpu"),
    fault("tried on another device", {NF4}, _set(quantizer={"device": "cpu"}), shape="xpu"),
    fault("a DLL is missing", {IMPORTS}, _module("diffusers", "OSError: [WinError 126]")),
    fault(
        "an import that ends the process",
        {IMPORTS},
        _set(imports={**FAILED, "reason": "in import bitsandbytes.nn: exit 127"}),
    ),
    fault("imports that hang", {IMPORTS}, _set(imports=HUNG)),
    fault(
        "an import that was left out",
        {IMPORTS},
        _data(lambda d: d["imports"]["modules"].pop("accelerate") or None),
    ),
    fault("a foreign package gates", {IMPORTS}, _owner("distributions", "gates")),
    fault("a foreign package finetune", {IMPORTS}, _owner("distributions", "finetune")),
    fault("a foreign command gate", {IMPORTS}, _owner("scripts", "gate")),
    fault(
        "runtime shadowed",
        {IMPORTS},
        _data(
            lambda d: d["names"]["packages"][1].update(ours=False, where="site-packages/runtime/__init__.py")
        ),
    ),
    fault("names not looked at", {IMPORTS}, _set(names={**FAILED, "reason": "exit 1"})),
    fault(
        "IPEX of another torch",
        {"ipex-not-mixed"},
        _set(ipex={"status": "ok", "seconds": 1.0, "exit": 0, "reason": "", "version": "2.8.0"}),
        shape="xpu",
    ),
    fault(
        "IPEX that ends the process",
        {"ipex-not-mixed"},
        _set(ipex={**FAILED, "seconds": 1.0, "exit": 127, "reason": "exit 127", "version": "2.13.0"}),
        shape="xpu",
    ),
)
