"""A probe that aborts, hangs or fails is a finding of its own, and costs the others nothing."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from runtime.adaptation import probes
from runtime.adaptation.probes import Finding
from runtime.probes import child
from runtime.probes.child import Outcome

OK = {"status": "ok", "seconds": 0.1, "reason": "", "error": 0.0, "tolerance": 0.1, "facts": {}}
FAILED = {**OK, "status": "failed", "reason": "RuntimeError: no kernel", "error": None}

# A child whose probes do what a device may do to it.
PLANTED = """
import os, runpy, sys, time
from runtime.adaptation import kernels
from runtime.adaptation.kernels import Measured

def raises(*arguments):
    raise RuntimeError("no kernel\\nand a long story")

kernels.KERNELS.update({
    "bf16-kernel": lambda *arguments: Measured(error=0.5, tolerance=0.03),
    "adam8bit-step": lambda *arguments: os.abort(),
    "nf4-layer": raises,
    "masked-sdpa": lambda *arguments: Measured(error=float("nan"), tolerance=0.03),
    "attention-backends": lambda *arguments: time.sleep(600),
    "compile": lambda device, dtype, say: Measured(error=0.0, tolerance=0.1, facts={"dtype": str(dtype)}),
})
runpy.run_path(sys.argv.pop(1), run_name="__main__")
"""


@pytest.fixture
def planted(tmp_path: Path) -> Any:
    script = tmp_path / "planted.py"
    script.write_text(PLANTED, encoding="utf-8", newline="\n")

    def ask(path: Path, *arguments: str, limit_s: float) -> Outcome:
        return child.ask(script, str(path), *arguments, limit_s=limit_s)

    return ask


def test_every_kind_of_end_is_a_finding(planted: Any) -> None:
    names = [name for name in probes.NAMES if name != "attention-backends"]
    found = probes.probe(names, "cpu", "bfloat16", ask=planted)
    assert list(found) == names
    assert {name: finding.status for name, finding in found.items()} == {
        **dict.fromkeys(names, "failed"), "compile": "ok",
    }  # fmt: skip
    assert found["bf16-kernel"].error == 0.5 and "error against the CPU is 0.5" in found["bf16-kernel"].reason
    assert found["adam8bit-step"].reason.startswith("in adam8bit-step: ")
    assert (
        "Fatal Python error: Aborted" in found["adam8bit-step"].reason
        or "abort" in found["adam8bit-step"].reason
    )
    assert found["nf4-layer"].reason == "RuntimeError: no kernel"
    assert found["masked-sdpa"].error is None and "no finite number" in found["masked-sdpa"].reason
    # bf16 does not work, so what came after it was probed in fp32.
    assert found["compile"].facts == {"dtype": "torch.float32"}


def test_a_hang_is_a_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "hangs.py"
    said = """print('@{"started": true}\\n@{"stage": "a, the kernel"}', flush=True)"""
    script.write_text(f"import time\n{said}\ntime.sleep(600)\n", encoding="utf-8", newline="\n")
    monkeypatch.setattr(probes, "START_S", 2.0)

    def ask(path: Path, *arguments: str, limit_s: float) -> Outcome:
        return child.ask(script, *arguments, limit_s=limit_s)

    finding = probes.probe(["a"], "cpu", "float32", ask=ask)["a"]
    assert (finding.status, finding.reason) == ("timeout", "in a, the kernel: no answer within 3 s")
    assert finding.seconds >= 2.9


class Script:
    """A child that gives these outcomes in turn."""

    def __init__(self, *outcomes: Outcome) -> None:
        self.outcomes = list(outcomes)
        self.asked: list[Sequence[str]] = []

    def __call__(self, path: Path, device: str, dtype: str, *names: str, limit_s: float) -> Outcome:
        self.asked.append((dtype, *names))
        return self.outcomes.pop(0)


def outcome(status: Any = "ok", reason: str = "", seconds: float = 5.0, **answer: Any) -> Outcome:
    exit_code = 0 if status == "ok" else None
    return Outcome(
        status=status, seconds=seconds, exit=exit_code, reason=reason, answer={"started": True, **answer}
    )


def test_a_healthy_device_needs_one_start() -> None:
    script = Script(outcome(**dict.fromkeys(probes.NAMES, OK)))
    found = probes.probe(probes.NAMES, "xpu", "bfloat16", ask=script)
    assert all(finding.ok for finding in found.values())
    assert script.asked == [("bfloat16", *probes.NAMES)]


def test_after_a_failure_the_rest_go_to_a_fresh_child() -> None:
    script = Script(outcome(a=OK, b=FAILED), outcome(c=OK))
    found = probes.probe(["a", "b", "c"], "cpu", "float32", ask=script)
    assert [finding.status for finding in found.values()] == ["ok", "failed", "ok"]
    assert [names for _, *names in script.asked] == [["a", "b", "c"], ["c"]]


def test_an_abort_costs_one_probe() -> None:
    script = Script(outcome("failed", "in b: killed by SIGABRT", a=OK), outcome(c=OK))
    found = probes.probe(["a", "b", "c"], "cpu", "float32", ask=script)
    assert found["b"] == Finding(name="b", status="failed", seconds=4.9, reason="in b: killed by SIGABRT")
    assert found["c"].ok


def test_without_torch_nobody_asks_again() -> None:
    died = Outcome(status="failed", seconds=1.0, exit=1, reason="in import torch: ImportError", answer={})
    script = Script(died)
    found = probes.probe(["a", "b"], "cpu", "float32", ask=script)
    assert {finding.reason for finding in found.values()} == {"in import torch: ImportError"}
    assert len(script.asked) == 1


def test_a_child_that_says_nothing_ends_all_the_same() -> None:
    script = Script(outcome(), outcome(b=OK))
    found = probes.probe(["a", "b"], "cpu", "float32", ask=script)
    assert (found["a"].status, found["a"].reason, found["b"].status) == ("failed", "no answer", "ok")


@pytest.fixture(autouse=True)
def _short_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LIMITS_S", {**probes.LIMITS_S, "a": 1.0, "b": 1.0, "c": 1.0})
