"""A verdict for people: one dotted line per check, detail only where something is to be done."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gates.verdict import Check, Verdict

WIDTH = 78
_COLOURS = {"PASS": "green", "FAIL": "red", "ERROR": "red", "WARN": "yellow", "SKIP": "cyan", "INFO": "cyan"}
Style = Callable[[str, str], str]


def plain(text: str, colour: str) -> str:
    return text


def coloured(text: str, colour: str) -> str:
    import click

    return click.style(text, fg=colour, bold=colour != "cyan")


def render(verdicts: Sequence[Verdict], *, style: Style = plain) -> str:
    """The report of each verdict; the one-line verdict of the last stands last."""
    return "\n".join("\n".join(_report(verdict, style)) for verdict in verdicts)


def _report(verdict: Verdict, style: Style) -> Iterator[str]:
    yield f"gate {verdict.label}  {verdict.name}" + (f"  {verdict.run}" if verdict.run else "")
    if verdict.outcome == "blocked" and all(check.status == "skip" for check in verdict.checks):
        yield f"  {verdict.summary}"
    else:
        yield from _checks(verdict.checks, style)
    yield line(verdict, style)


def _checks(checks: Sequence[Check], style: Style) -> Iterator[str]:
    phase = None
    for check in checks:
        if check.phase != phase:
            phase = check.phase
            yield f"  {phase}"
        word = mark(check)
        name = f"    {check.id} " if check.phase else f"  {check.id} "
        yield name + "." * max(2, WIDTH - len(name) - 6) + " " + style(word, _COLOURS[word])
        if word != "PASS":
            yield from _detail(check)


def mark(check: Check) -> str:
    if check.status == "fail" and not check.required:
        return "WARN"
    return check.status.upper()


def _detail(check: Check) -> Iterator[str]:
    rows = [("", check.message)]
    if check.status == "fail":
        unit = f" {check.unit}" if check.unit else ""
        rows = [
            ("what", check.title),
            ("saw", _value(check.observed) + unit),
            ("expected", _value(check.expected) + unit),
            ("namely", check.message),
        ]
    rows += [("do", check.remedy)]
    for name, text in rows:
        if text.strip() and text.strip() != check.unit:
            yield f"        {name:<9} {text}" if name else f"        {text}"


def _value(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def line(verdict: Verdict, style: Style = plain) -> str:
    """The one line that says it all."""
    word = style(verdict.verdict, _COLOURS[verdict.verdict])
    why = "" if verdict.outcome == "passed" else f" ({verdict.outcome})"
    first = f": {first_failure(verdict)}" if verdict.first_failure else ""
    device = f" [device {verdict.device}]" if verdict.device else ""
    return (
        f"gate {verdict.label}: {word}{why}{first}, {verdict.summary}{device}; next: {verdict.next_command}"
    )


def first_failure(verdict: Verdict) -> str:
    """With its phase where the verdict is on all phases: some ids stand in two."""
    check = verdict.first_check
    phase = f"{check.phase} " if check and check.phase and not verdict.phase else ""
    return phase + (verdict.first_failure or "-")


def table(rows: Sequence[Sequence[str]], style: Style = plain) -> str:
    """Columns as wide as they need to be, the last one unpadded; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        cells = [style(cell, _COLOURS[cell.strip()]) if cell.strip() in _COLOURS else cell for cell in cells]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
