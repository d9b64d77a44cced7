import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gates import verdict as module
from gates.verdict import Check, EvidenceRef, Input, Verdict, decide


def check(id: str = "a", status: Any = "pass", **values: Any) -> Check:
    details: dict[str, Any] = {
        "phase": None, "title": "A title", "required": True, "needs": (), "expected": 1, "observed": 1,
        "unit": None, "evidence": (EvidenceRef(path="run.json", locator="/a"),), "message": "m", "remedy": "",
        "section": "7.1",
    }  # fmt: skip
    return Check(id=id, status=status, **{**details, **values})


def verdict(checks: list[Check] | None = None, **values: Any) -> Verdict:
    checks = [check()] if checks is None else checks
    decision = decide(checks)
    details: dict[str, Any] = {
        "gate": "07", "name": "training", "skill": "a-skill", "phase": None, "verdict": decision.verdict,
        "outcome": decision.outcome, "summary": decision.summary, "first_failure": decision.first_failure,
        "blocked_by": None, "next_command": "x", "device": None, "run": None, "checks": tuple(checks),
        "inputs": (Input(path="a", sha256="0" * 64, size=3),), "skip_reason": None,
        "judged_at": "2026-11-30T12:00:00.000Z", "tool": {"name": "gate", "version": "0.1.0"},
    }  # fmt: skip
    return Verdict(**{**details, **values})


RULES: dict[str, tuple[list[Check], dict[str, Any], tuple[str, str, str | None], int]] = {
    "all pass": ([check(), check("b")], {}, ("PASS", "passed", None), 0),
    "an advisory failed": ([check(), check("b", "fail", required=False)], {}, ("PASS", "passed", None), 0),
    "an advisory errored": ([check(), check("b", "error", required=False)], {}, ("PASS", "passed", None), 0),
    "a required failed": ([check(), check("b", "fail")], {}, ("FAIL", "failed", "b"), 1),
    "failed and errored": ([check("a", "error"), check("b", "fail")], {}, ("FAIL", "failed", "b"), 1),
    "a required errored": ([check(), check("b", "error")], {}, ("FAIL", "error", "b"), 3),
    "no checks": ([], {}, ("FAIL", "error", None), 3),
    "all skipped as permitted": ([check("a", "skip", excused=True)], {}, ("FAIL", "error", None), 3),
    "only an advisory ran": (
        [check("a", "skip", excused=True), check("b", required=False)],
        {},
        ("FAIL", "error", None),
        3,
    ),
    "only notes": ([check("a", "info")], {}, ("FAIL", "error", None), 3),
    "a permitted skip": ([check(), check("b", "skip", excused=True)], {}, ("PASS", "passed", None), 0),
    "a skip not permitted": ([check(), check("b", "skip")], {}, ("FAIL", "error", "b"), 3),
    "a skip by need": ([check("a", "fail"), check("b", "skip")], {}, ("FAIL", "failed", "a"), 1),
    "an advisory skip": ([check(), check("b", "skip", required=False)], {}, ("PASS", "passed", None), 0),
    "blocked": ([check("a", "skip")], {"blocked_by": "04"}, ("FAIL", "blocked", None), 1),
    "running": ([check(), check("b", "skip")], {"waiting": "wait"}, ("FAIL", "blocked", None), 1),
    "running and failed": (
        [check("a", "fail"), check("b", "skip")],
        {"waiting": "wait"},
        ("FAIL", "failed", "a"),
        1,
    ),
    "a deliberate skip": ([check()], {"skip_reason": "fits as it is"}, ("PASS", "skipped", None), 0),
    "a deliberate skip that failed": (
        [check("a", "fail")],
        {"skip_reason": "x"},
        ("FAIL", "failed", "a"),
        1,
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_decide(name: str) -> None:
    checks, options, expected, code = RULES[name]
    decision = decide(checks, **options)
    assert (decision.verdict, decision.outcome, decision.first_failure) == expected
    assert decision.summary
    assert module.EXIT[decision.outcome] == code


def test_round_trip_and_validity() -> None:
    original = verdict([check(), check("b", "fail", required=False, observed=math.nan)])
    document = json.loads(module.render(original.to_json()))
    module.validate(document)
    assert Verdict.from_json(document).to_json() == document
    assert document["checks"][1]["observed"] == "nan"
    assert document["counts"] == {"pass": 1, "fail": 1, "skip": 0, "error": 0, "info": 0}


LIES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "PASS with a failed required check": lambda d: d["checks"][0].update(status="fail"),
    "PASS with an errored required check": lambda d: d["checks"].append(check("b", "error").to_json()),
    "PASS without checks": lambda d: d.update(checks=[]),
    "PASS in which nothing passed": lambda d: d["checks"][0].update(status="skip"),
    "PASS that failed": lambda d: d.update(outcome="failed"),
    "FAIL that passed": lambda d: d.update(verdict="FAIL"),
    "failed without a failed check": lambda d: d.update(verdict="FAIL", outcome="failed"),
    "PASS with a first failure": lambda d: d.update(first_failure="a"),
    "skipped without a reason": lambda d: d.update(gate="06", outcome="skipped"),
    "skipped, and not gate 06": lambda d: d.update(outcome="skipped", skip_reason="x"),
    "a third verdict": lambda d: d.update(verdict="WARN"),
    "the same check twice": lambda d: d["checks"].append(copy.deepcopy(d["checks"][0])),
    "an unknown key": lambda d: d.update(score=1),
    "no digest": lambda d: d.pop("judgement_digest"),
    "a gate that isn't": lambda d: d.update(gate="09"),
    "a time that isn't": lambda d: d.update(judged_at="today"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_verdict_that_contradicts_itself_is_refused(name: str) -> None:
    document = verdict().to_json()
    module.validate(document)
    LIES[name](document)
    with pytest.raises(ValueError, match="not a verdict"):
        module.validate(document)


def test_the_same_check_in_two_phases_is_no_repetition() -> None:
    module.validate(verdict([check(phase="smoke"), check(phase="full")]).to_json())


def test_judgement_digest_leaves_out_times_and_tool() -> None:
    one = verdict()
    later = replace(one, judged_at="2027-01-01T00:00:00Z", tool={"name": "gate", "version": "9"}, run="v7")
    assert one.judgement_digest == later.judgement_digest
    for other in (
        replace(one, gate="04"),
        replace(one, phase="full"),
        replace(one, inputs=()),
        replace(one, checks=(check(observed=2),)),
    ):
        assert one.judgement_digest != other.judgement_digest


def test_write_is_whole_valid_and_by_name(tmp_path: Path) -> None:
    path = module.write(verdict([check(phase="full")], phase="full"), tmp_path / "verdicts")
    assert path.name == "07-full.json" and [item.name for item in path.parent.iterdir()] == [path.name]
    data = path.read_bytes()
    assert b"\r" not in data and data.endswith(b"}\n")
    keys = list(json.loads(data))
    assert keys == sorted(keys)


def test_an_invalid_verdict_leaves_the_old_record(tmp_path: Path) -> None:
    path = module.write(verdict(), tmp_path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="not a verdict"):
        module.write(verdict(verdict="FAIL"), tmp_path)
    assert path.read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_strictly_makes_advice_count_and_leaves_notes() -> None:
    checks = module.strictly(
        [check(), check("b", "fail", required=False), check("c", "info", required=False)]
    )
    assert [item.required for item in checks] == [True, True, False]
    assert decide(checks).outcome == "failed"


def test_plain() -> None:
    value = {"a": (1, {2, 1}), "b": math.inf, 3: None}
    assert module.plain(value) == {"a": [1, [1, 2]], "b": "inf", "3": None}
