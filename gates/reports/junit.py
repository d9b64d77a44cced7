"""Verdicts as JUnit XML: a suite per verdict, a case per check. Every CI shows it."""

import re
from collections.abc import Sequence
from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from gates.reports.text import line
from gates.verdict import Check, Verdict

# what XML 1.0 can't hold
_ILLEGAL = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render(verdicts: Sequence[Verdict]) -> str:
    root = Element("testsuites", name="gate")
    for verdict in verdicts:
        _suite(root, verdict)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _suite(root: Element, verdict: Verdict) -> None:
    cases = [*verdict.checks]
    failures = sum(check.status == "fail" and check.required for check in cases)
    suite = SubElement(
        root,
        "testsuite",
        name=f"gate {verdict.label}",
        tests=str(len(cases) + 1),
        failures=str(failures + (verdict.exit_code == 1)),
        errors=str(sum(check.status == "error" for check in cases) + (verdict.exit_code == 3)),
        skipped=str(sum(check.status == "skip" for check in cases)),
        timestamp=verdict.judged_at,
    )
    for check in cases:
        _case(suite, verdict, check)
    _verdict_case(suite, verdict)


def _case(suite: Element, verdict: Verdict, check: Check) -> None:
    name = f"{check.phase}/{check.id}" if check.phase else check.id
    case = SubElement(suite, "testcase", classname=f"gate.{verdict.gate}", name=name)
    text = _clean("\n".join(part for part in (check.message, _do(check.remedy)) if part))
    kinds = {"fail": "failure", "error": "error", "skip": "skipped"}
    if check.status in kinds and (check.required or check.status != "fail"):
        SubElement(case, kinds[check.status], message=_clean(check.message)).text = text
    elif text:
        SubElement(case, "system-out").text = text


def _verdict_case(suite: Element, verdict: Verdict) -> None:
    """A blocked gate has no failed check, yet its suite must not look green."""
    case = SubElement(suite, "testcase", classname=f"gate.{verdict.gate}", name="verdict")
    if not verdict.passes:
        kind = "error" if verdict.outcome == "error" else "failure"
        SubElement(case, kind, message=_clean(line(verdict))).text = _do(verdict.next_command)


def _do(remedy: str) -> str:
    return f"do: {remedy}" if remedy else ""


def _clean(text: str) -> str:
    return _ILLEGAL.sub("?", text)
