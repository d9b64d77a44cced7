import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from typing import Any

from gates.reports import github, junit, text
from gates.verdict import Check, Verdict, decide


def _check(id: str, status: Any, **values: Any) -> Check:
    details: dict[str, Any] = {
        "phase": None, "title": "A title", "required": True, "needs": (), "expected": 0, "observed": 2,
        "unit": "faults", "evidence": (), "message": "m", "remedy": "do this" if status == "fail" else "",
        "section": "7.1",
    }  # fmt: skip
    return Check(id=id, status=status, **{**details, **values})


def _verdict(*checks: Check) -> Verdict:
    decision = decide(checks)
    return Verdict(
        gate="02", name="dataset", skill="s", phase=None, verdict=decision.verdict, outcome=decision.outcome,
        summary=decision.summary, first_failure=decision.first_failure, blocked_by=None, next_command="next",
        device=None, run=None, checks=checks, inputs=(), skip_reason=None, judged_at="2026-11-30T12:00:00Z",
        tool={"name": "gate", "version": "1"},
    )  # fmt: skip


NASTY = '50% of <a> & "b"\r\nnext, line: \x1b[0m \x00 | ü'


def test_text() -> None:
    verdict = _verdict(_check("good", "pass"), _check("bad", "fail"), _check("meh", "fail", required=False))
    assert text.render([verdict]).splitlines() == [
        "gate 02  dataset",
        "  good " + "." * 65 + " PASS",
        "  bad " + "." * 66 + " FAIL",
        "        what      A title",
        "        saw       2 faults",
        "        expected  0 faults",
        "        namely    m",
        "        do        do this",
        "  meh " + "." * 66 + " WARN",
        "        what      A title",
        "        saw       2 faults",
        "        expected  0 faults",
        "        namely    m",
        "        do        do this",
        "gate 02: FAIL (failed): bad, 1 of 2 required checks failed; next: next",
    ]


def test_table_is_aligned() -> None:
    lines = text.table([("a", "verdict", "z"), ("bb", "PASS", "y")]).splitlines()
    assert lines == ["a   verdict  z", "bb  PASS     y"]


def test_junit_survives_what_xml_cannot_hold() -> None:
    verdict = _verdict(_check("a", "fail", message=NASTY), _check("b", "error"), _check("c", "skip"))
    root = ElementTree.fromstring(junit.render([verdict]).encode("utf-8"))
    suite = root[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors"), suite.get("skipped")) == (
        "4", "2", "1", "1",
    )  # fmt: skip
    failure = suite[0].find("failure")
    assert failure is not None and "50% of <a>" in str(failure.get("message"))


def test_junit_counts_what_it_lists() -> None:
    advisory = _check("meh", "fail", required=False)
    root = ElementTree.fromstring(junit.render([_verdict(_check("a", "pass"), advisory)]).encode())
    assert (root[0].get("failures"), len(root.findall(".//failure"))) == ("0", 0)


def test_github_escapes_and_keeps_the_verdict_among_ten() -> None:
    checks = [_check(f"c{i}", "fail", message=NASTY) for i in range(15)]
    lines = github.render([_verdict(*checks)]).splitlines()
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == len(lines) == 10 and "gate 02: FAIL" in lines[-1]
    assert "50%25 of" in lines[0] and "%0D%0Anext" in lines[0]
    assert "\\|" in github.summary([replace(_verdict(*checks), summary="x")])
