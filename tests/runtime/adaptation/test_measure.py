"""The whole of step 05, with children that answer at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.adaptation import measure, parity, probes
from runtime.adaptation.probes import Finding
from runtime.config.model import Config
from runtime.errors import UserError
from runtime.probes.child import Outcome

NONE = {"available": False, "devices": []}
ARC = {
    "name": "Intel Arc B580",
    "total_gib": 12.0,
    "driver": "1.6.33",
    "integrated": False,
    "device_id": "e20b",
}
OK = {"status": "ok", "seconds": 0.1, "reason": "", "error": 0.0, "tolerance": 0.1, "facts": {}}


def facts(**changed: Any) -> dict[str, Any]:
    return {"status": "ok", "reason": "", "version": "2.13.0", "xpu": NONE, "cuda": NONE, **changed}


XPU = facts(xpu={"available": True, "devices": [ARC]})


def config(**changed: Any) -> Config:
    document: dict[str, Any] = {"model": {"pretrained_model_name_or_path": "x"}, "train": {"num_epochs": 1}}
    for key, value in changed.items():
        section, _, leaf = key.partition("__")
        document.setdefault(section, {})[leaf] = value
    return Config.model_validate(document)


@pytest.mark.parametrize(
    ("requested", "seen", "expected"),
    [
        ("auto", facts(), ("cpu", "cpu", None)),
        ("cpu", XPU, ("cpu", "cpu", None)),
        ("auto", XPU, ("xpu", "Intel Arc B580", "1.6.33")),
        ("xpu", XPU, ("xpu", "Intel Arc B580", "1.6.33")),
    ],
)
def test_find_device(requested: str, seen: dict[str, Any], expected: tuple[Any, ...]) -> None:
    found = measure.find_device(requested, seen)
    assert (found["type"], found["name"], found["driver"]) == expected


@pytest.mark.parametrize(
    ("requested", "seen", "match"),
    [
        ("xpu", facts(), "device xpu is not there: torch 2.13.0 sees no accelerator"),
        ("cuda", XPU, "device cuda is not there: torch 2.13.0 sees xpu"),
        ("xpu", facts(status="failed", reason="killed by SIGSEGV"), "killed by SIGSEGV"),
        ("cpu", facts(status="absent"), "torch is not installed"),
    ],
)
def test_a_device_that_is_not_there(requested: str, seen: dict[str, Any], match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        measure.find_device(requested, seen)
    assert caught.value.remedy


class Machine:
    """Answers for both children, and remembers what it was asked."""

    def __init__(self, *broken: str) -> None:
        self.broken, self.dtypes, self.steps = broken, set[str](), []  # type: ignore[var-annotated]

    def __call__(self, path: Path, *arguments: str, limit_s: float) -> Outcome:
        if path == parity.CHILD:
            orders = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
            self.steps += [setup for setup, _ in orders]
            return Outcome(status="failed", seconds=1.0, exit=-6, reason="killed by SIGABRT")
        _, dtype, *names = arguments
        self.dtypes.add(dtype)
        told = {name: {**OK, "error": 0.004} for name in names}
        for name in names:
            if name in self.broken:
                told[name] |= {"status": "failed", "reason": "no kernel", "error": None}
        return Outcome(status="ok", seconds=1.0, exit=0, reason="", answer={"started": True, **told})


def run(machine: Machine, asked: Config, monkeypatch: pytest.MonkeyPatch, seen: Any = XPU) -> dict[str, Any]:
    monkeypatch.setattr(measure.torch_facts, "collect", lambda: seen)
    return measure.measure(asked, lambda line: None, ask=machine)


@pytest.mark.parametrize(
    ("asked", "seen", "broken", "dtype", "step"),
    [
        ({}, XPU, (), "bfloat16", ("xpu", "bf16", "torch.optim.AdamW", True)),
        ({}, facts(), (), "float32", ("cpu", "no", "torch.optim.AdamW", True)),
        ({}, XPU, ("masked-sdpa",), "bfloat16", ("xpu", "bf16", "torch.optim.AdamW", False)),
        (
            {"train__gradient_checkpointing": "auto"},
            XPU,
            (),
            "bfloat16",
            ("xpu", "bf16", "torch.optim.AdamW", True),
        ),
        ({"train__mixed_precision": "no"}, XPU, (), "float32", ("xpu", "no", "torch.optim.AdamW", True)),
        (
            {"optimizer__class_path": "torch.optim.SGD", "train__gradient_checkpointing": False},
            XPU,
            ("bf16-kernel",),
            "bfloat16",
            ("xpu", "no", "torch.optim.SGD", True),
        ),
    ],
)
def test_the_step_is_taken_as_the_fit_would(
    asked: dict[str, Any],
    seen: Any,
    broken: tuple[str, ...],
    dtype: str,
    step: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, wanted = Machine(*broken), config(**asked)
    run(machine, wanted, monkeypatch, seen)
    assert dtype in machine.dtypes
    mode = wanted.train.gradient_checkpointing
    mode = True if mode == "auto" else mode  # what takes least memory
    taken = [
        (s["device"], s["precision"], s["optimizer"], s["masked"])
        for s in machine.steps
        if s["device"] == step[0] and s["checkpointing"] == mode
    ]
    assert step in taken


def test_the_evidence_conforms(monkeypatch: pytest.MonkeyPatch, conforms: Any, lab: Any) -> None:
    data = run(Machine("nf4-layer", "compile"), config(), monkeypatch)
    assert {probe["name"] for probe in data["probes"]} == set(probes.NAMES)
    broken = {p["name"]: p["fallback"] for p in data["probes"] if p["status"] != "ok"}
    assert broken["nf4-layer"]["settings"]["model.quantize"] == "none"
    assert (
        broken["compile"]["settings"] == {"train.compile": False} and "eager" in broken["compile"]["instead"]
    )
    assert {step["reason"] for step in data["step_parity"]} == {
        "the step ended: killed by SIGABRT; the CPU's step ended: killed by SIGABRT"
    }
    recording = lab.workspace.begin_evidence(measure.EVIDENCE, "finetune adapt")
    recording.write(inputs={"config": measure.inputs(config())}, data=data)
    conforms(
        json.loads(lab.workspace.evidence_path(measure.EVIDENCE).read_text(encoding="utf-8")), "evidence"
    )


def test_a_device_that_compiling_may_hang_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, ...]] = []

    def probe(names: Any, device: str, dtype: str, *, ask: Any) -> dict[str, Finding]:
        import time

        if list(names) == ["compile"]:
            time.sleep(0.2)
        order.append(tuple(names))
        return {name: Finding(name=name, status="ok", seconds=0.1, reason="", error=0.0) for name in names}

    monkeypatch.setattr(probes, "probe", probe)
    run(Machine(), config(), monkeypatch)
    assert order[0] == ("compile",)
    order.clear()
    run(Machine(), config(), monkeypatch, facts())
    assert order[-1] == ("compile",)
