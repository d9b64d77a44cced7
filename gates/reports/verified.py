"""What `gate verify` found, for people and for programs."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from gates.chain import tool
from gates.verify import Finding, Verified, exit_code

AROUND_MAX = 3  # lines on what stands around the checks: summary, counts and the like follow from them
CHECKS_MAX = 8  # lines of one verdict: a blocked gate has them all contradicted alike
WORDS = {0: "confirmed", 1: "contradicted", 3: "unverifiable"}


def render(found: Sequence[Verified]) -> str:
    """A line for each verdict, with those checks that were not confirmed; the one line that says it all last."""
    return "\n".join([*(line for item in found for line in _lines(item)), last_line(found)]) + "\n"


def _lines(item: Verified) -> Iterator[str]:
    counts = ", ".join(f"{count} {state}" for state, count in item.counts.items() if count)
    yield f"{item.label:<8} {item.verdict or '-':<4} {item.state}" + (f" ({counts})" if counts else "")
    open_checks = [f for f in item.findings if f.id and f.state != "confirmed"]
    around = [f for f in item.findings if not f.id]
    for findings, most in ((open_checks, CHECKS_MAX), (around, AROUND_MAX)):
        yield from (f"  {_told(finding)}" for finding in findings[:most])
        if len(findings) > most:
            yield f"  and {len(findings) - most} more"


def _told(finding: Finding) -> str:
    name = " ".join(part for part in (finding.phase, finding.id) if part) if finding.id else "the verdict"
    word = "allowed" if finding.allowed else finding.state
    return f"{name}: {word}: {finding.message}"


def last_line(found: Sequence[Verified]) -> str:
    code = exit_code(found)
    if not found:
        return "gate verify: unverifiable, there is no stored verdict; next: gate check all"
    states = Counter[str](item.state for item in found)
    told = ", ".join(f"{states[word]} {word}" for word in WORDS.values() if states[word])
    absent = sorted({name for item in found for f in item.findings if not f.allowed for name in f.rests_on})
    allowed = sorted({name for item in found for f in item.findings if f.allowed for name in f.rests_on})
    line = f"gate verify: {WORDS[code]}; of {len(found)} verdicts {told}"
    line += f"; resting on recorded digests: {', '.join(allowed)}" if allowed else ""
    line += f"; absent: {', '.join(absent)}" if absent else ""
    others = sorted({item.judged_by for item in found if item.judged_by} - {tool()["version"]})
    line += f"; judged by version {', '.join(others)}, verified by {tool()['version']}" if others else ""
    return line + (f"; next: {_next(code, absent)}" if code else "")


def _next(code: int, absent: Sequence[str]) -> str:
    allowable = [name for name in absent if name in ("weights", "dataset", "cache")]
    if code == 3 and allowable == list(absent):
        return f"add --allow-absent {','.join(allowable)}, or verify where they are"
    return "gate check all"


def to_json(found: Sequence[Verified]) -> dict[str, Any]:
    return {
        "state": WORDS[exit_code(found)],
        "summary": last_line(found),
        "verdicts": [
            {
                "label": item.label,
                "verdict": item.verdict,
                "state": item.state,
                "counts": item.counts,
                "judged_by": item.judged_by,
                "findings": [_finding(finding) for finding in item.findings],
            }
            for item in found
        ],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    names = ("id", "phase", "state", "message", "allowed")
    return {**{name: getattr(finding, name) for name in names}, "rests_on": list(finding.rests_on)}
