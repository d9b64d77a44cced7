"""Verdicts as annotations of a GitHub workflow, and the table of its step summary."""

from collections.abc import Sequence

from gates.reports.text import line, mark
from gates.verdict import Check, Verdict

MOST = 10  # annotations of a kind that a step may show


def render(verdicts: Sequence[Verdict]) -> str:
    errors = [_annotation("error", verdict, check) for verdict in verdicts for check in _acting(verdict)]
    warnings = [
        _annotation("warning", verdict, check)
        for verdict in verdicts
        for check in verdict.checks
        if mark(check) == "WARN"
    ]
    # The verdict itself must be among the ten.
    ends = [
        _command("notice" if verdict.passes else "error", f"gate {verdict.label}", line(verdict))
        for verdict in verdicts
    ]
    room = max(0, MOST - sum(not verdict.passes for verdict in verdicts))
    return "\n".join([*errors[:room], *warnings[:MOST], *ends]) + "\n"


def _acting(verdict: Verdict) -> list[Check]:
    return [check for check in verdict.checks if check.required and check.status in ("fail", "error")]


def _annotation(kind: str, verdict: Verdict, check: Check) -> str:
    text = f"{check.message or check.title}" + (f"\ndo: {check.remedy}" if check.remedy else "")
    return _command(kind, f"gate {verdict.label} {check.id}", text)


def _command(kind: str, title: str, text: str) -> str:
    safe = _escape(title).replace(":", "%3A").replace(",", "%2C")
    return f"::{kind} title={safe}::{_escape(text)}"


def _escape(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def summary(verdicts: Sequence[Verdict]) -> str:
    """Markdown for $GITHUB_STEP_SUMMARY."""
    rows = ["| gate | check | status | what |", "|---|---|---|---|"]
    for verdict in verdicts:
        rows.append(f"| **{verdict.label}** | | **{verdict.verdict}** | {_cell(verdict.summary)} |")
        rows += [
            f"| {verdict.label} | {check.id} | {mark(check)} | {_cell(check.message)} |"
            for check in verdict.checks
            if check.status != "pass"
        ]
    return "\n".join(rows) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
