import math
from typing import Any

import pytest

from gates.checks import Checks, Finding, failed, listing, passed, shared, skipped, verdict_of
from gates.evidence import EvidenceError, MissingEvidenceError
from gates.verdict import decide

DETAILS: dict[str, Any] = {"title": "T", "section": "1", "remedy": "mend it", "why": "because"}


def _run(measure: Any, **details: Any) -> Any:
    checks: Checks[Any] = Checks("full")
    checks.check("a", **{**DETAILS, **details})(measure)
    return checks.run(None)[0]


def _raise(error: Exception) -> Any:
    def measure(e: Any) -> Finding:
        raise error

    return measure


def test_a_pass_has_no_remedy_and_a_fail_has_the_checks_own() -> None:
    assert _run(lambda e: passed("fine")).remedy == ""
    assert _run(lambda e: failed("bad")).remedy == "mend it"
    assert _run(lambda e: failed("bad", remedy="this")).remedy == "this"
    assert _run(lambda e: passed(title="Other")).title == "Other"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ZeroDivisionError("by zero"), "error", "ZeroDivisionError: by zero"),
        (KeyError("x"), "error", "KeyError: 'x'"),
        (AssertionError(), "error", "AssertionError: "),
        (EvidenceError("a.json", "is no JSON"), "error", "a.json: is no JSON"),
        (MissingEvidenceError("a.json", "is missing"), "fail", "a.json: is missing"),
    ],
)
def test_an_exception_never_passes(error: Exception, status: str, message: str) -> None:
    check = _run(_raise(error))
    assert (check.status, check.message) == (status, message)
    assert decide([check]).verdict == "FAIL"


def test_a_keyboard_interrupt_is_not_swallowed() -> None:
    with pytest.raises(KeyboardInterrupt):
        _run(_raise(KeyboardInterrupt()))  # type: ignore[arg-type]


def test_missing_evidence_names_its_own_remedy() -> None:
    assert _run(_raise(MissingEvidenceError("a", "is missing", remedy="make a"))).remedy == "make a"


def test_only_a_check_that_may_skip_skips() -> None:
    check = _run(lambda e: skipped("no need"))
    assert check.status == "error" and "may not" in check.message
    check = _run(lambda e: skipped("no need"), may_skip="short run")
    assert check.status == "skip" and check.excused
    check = _run(lambda e: skipped("no need"), required=False)
    assert check.status == "skip"


def test_needs_that_did_not_pass_make_a_skip_that_says_so() -> None:
    checks: Checks[Any] = Checks()
    checks.check("a", **DETAILS)(lambda e: failed("bad"))
    checks.check("b", **DETAILS, needs=("a",), may_skip="never")(lambda e: passed())
    checks.check("c", **DETAILS, needs=("b",))(lambda e: passed())
    checks.check("d", **DETAILS)(lambda e: passed())
    done = checks.run(None)
    assert [check.status for check in done] == ["fail", "skip", "skip", "pass"]
    assert done[1].message == "not judged: it needs a, which did not pass" and not done[1].excused
    assert decide(done).outcome == "failed"


def test_an_advisory_need_that_failed_still_keeps_the_gate_from_passing() -> None:
    checks: Checks[Any] = Checks()
    checks.check("a", **DETAILS, required=False)(lambda e: failed("bad"))
    checks.check("b", **DETAILS, needs=("a",))(lambda e: passed())
    checks.check("c", **DETAILS)(lambda e: passed())
    assert decide(checks.run(None)).verdict == "FAIL"


@pytest.mark.parametrize("needs", [("later",), ("a",)])
def test_needs_stand_above_and_ids_are_unique(needs: tuple[str, ...]) -> None:
    checks: Checks[Any] = Checks()
    checks.check("a", **DETAILS)(lambda e: passed())
    with pytest.raises(ValueError, match="check a"):
        checks.check("a", **DETAILS, needs=needs)


def test_waiting_skips_all_and_excuses_none() -> None:
    checks: Checks[Any] = Checks()
    checks.check("a", **DETAILS, may_skip="x")(_raise(ValueError()))
    (done,) = checks.run(None, waiting="still running")
    assert (done.status, done.message, done.excused) == ("skip", "still running", False)


def test_shared_registers_in_each_phase_with_its_remedy() -> None:
    one: Checks[Any] = Checks("smoke")
    two: Checks[Any] = Checks("full")
    details = {name: text for name, text in DETAILS.items() if name != "remedy"}
    shared({one: "do one", two: "do two"}, "a", **details)(lambda e: failed("bad"))
    assert [c.run(None)[0].remedy for c in (one, two)] == ["do one", "do two"]


def test_nan_compares_to_a_fail() -> None:
    seen = math.nan
    for ok in (seen <= 1.0, seen > 1.0):
        assert verdict_of(ok, "x").status == "fail"


def test_listing() -> None:
    assert listing([]) == "" and listing(["a", "b"]) == "a; b"
    assert listing(list("abcde"), 2) == "a; b and 3 more"
