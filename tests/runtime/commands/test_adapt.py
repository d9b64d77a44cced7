"""finetune adapt: evidence from the first moment, complete at its end."""

import json
from typing import Any

import pytest
from click.testing import CliRunner

from runtime.adaptation import measure
from runtime.commands.adapt import command
from runtime.errors import UserError

DATA = {
    "device": {"type": "cpu", "name": "cpu", "driver": None},
    "probes": [
        {
            "name": "compile", "status": "timeout", "seconds": 120.0, "reason": "no answer", "error": None,
            "tolerance": None, "facts": {}, "fallback": {"settings": {}, "instead": "eager"},
        }
    ],
    "choices": {"train.mixed_precision": {"value": "no", "reason": "slow", "probe": "bf16-kernel"}},
    "step_parity": [
        {"what": "embedded base", "masked": True, "checkpointing": True, "optimizer": "torch.optim.AdamW",
         "status": "failed", "reason": "killed", "seconds": None, "samples": None, "compute": None,
         "loss_device": None, "loss_reference": None, "loss_error": None, "gradient_norm": None,
         "gradient_error": 0.01, "update_norm": None, "update_error": None, "devices": {}, "dtypes": {},
         "memory": {}}
    ],
    "versions": {"torch": "2.13.0"},
}  # fmt: skip


def invoke(lab: Any, *arguments: str) -> Any:
    return CliRunner().invoke(command, ["--workspace", str(lab.root), *arguments])


def evidence(lab: Any) -> Any:
    return json.loads(lab.workspace.evidence_path("05-adaptation").read_text(encoding="utf-8"))


def test_what_it_writes_and_shows(lab: Any, monkeypatch: pytest.MonkeyPatch, conforms: Any) -> None:
    lab.configure({"train.mixed_precision": "bf16"})
    monkeypatch.setattr(measure, "measure", lambda config, report: DATA)
    shown = invoke(lab)
    assert shown.exit_code == 0, shown.output
    for text in (
        "compile",
        "timeout",
        "no answer",
        "train.mixed_precision",
        "1.0e-02",
        "next: gate check 05",
    ):
        assert text in shown.output
    document = evidence(lab)
    conforms(document, "evidence")
    assert document["complete"] and document["data"] == DATA
    assert document["inputs"]["config"] == {
        "hardware.device": "cpu",
        "optimizer.class_path": "auto",
        "train.gradient_checkpointing": True,
        "train.mixed_precision": "bf16",
    }


def test_json(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.configure()
    monkeypatch.setattr(measure, "measure", lambda config, report: DATA)
    assert json.loads(invoke(lab, "--json").stdout) == DATA


def test_a_failure_leaves_no_yesterdays_evidence(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.configure()
    monkeypatch.setattr(measure, "measure", lambda config, report: DATA)
    invoke(lab)

    def fail(config: Any, report: Any) -> Any:
        raise UserError("device xpu is not there", remedy="gate check 03")

    monkeypatch.setattr(measure, "measure", fail)
    shown = invoke(lab)
    assert shown.exit_code == 1 and "error: device xpu is not there\nnext: gate check 03" in shown.output
    assert not evidence(lab)["complete"]
