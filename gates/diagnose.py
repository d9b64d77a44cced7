"""`gate diagnose LOG`: which known fault a log shows. Not a verdict: it judges nothing and writes nothing."""

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.evidence import EvidenceError
from gates.faults import library, logs, runs
from gates.faults.library import Match
from gates.faults.logs import SPOKEN, Log

LAST = 8
NOTHING_DIED = (
    "read the last lines above: the first error among them is the cause",
    "finetune adapt tries each kernel in a process of its own; finetune plan says whether memory suffices",
    "finetune fit --resume latest goes on from the last checkpoint",
    "report it with the log's last 100 lines",
)
NOTHING_ASKED = (
    "if the process is gone: gate diagnose LOG --exit-code N, with the number that it ended with, or 1",
    "if it still runs, nothing is wrong that the log shows: finetune monitor",
)
NOTHING_WRONG = ("nothing: it ended as it should, or is at work; gate next",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    read: tuple[str, ...]
    told: str
    log: Log
    matches: tuple[Match, ...]

    @property
    def exit_code(self) -> int:
        return 0 if self.matches else 1

    @property
    def advice(self) -> tuple[str, ...]:
        """Where nothing is known."""
        if self.matches:
            return ()
        if self.log.died or not (self.log.silent or self.log.stage == "done"):
            return NOTHING_DIED
        ended_well = self.log.stage == "done" or self.log.died is False or self.log.ended is False
        return NOTHING_WRONG if ended_well else NOTHING_ASKED


def diagnose(path: Path, *, exit_code: int | None = None) -> Diagnosis:
    """Of a log, or of a run's directory. Raises EvidenceError where there is nothing to read."""
    try:
        found = _found(path, exit_code)
    except OSError as error:
        raise EvidenceError(path.name, f"can't be read ({error.strerror or error})") from error
    return Diagnosis(read=found.read, told=found.told, log=found.log, matches=tuple(library.name(found.log)))


def _found(path: Path, exit_code: int | None) -> runs.Found:
    if not path.is_dir():
        job = runs.read_job(path, exit_code=exit_code)
        if job is not None:
            return job
        return runs.Found(log=logs.read(path, exit_code=exit_code), read=(path.name,), told="")
    if runs.is_run(path):
        return runs.read(path, exit_code=exit_code)
    found = runs.read_foreign(path, exit_code=exit_code)
    if found is None:
        raise EvidenceError(path.name, "has neither a run.json nor a log: name the log itself")
    return found


# ---- telling


def to_json(found: Diagnosis) -> dict[str, Any]:
    return {
        "schema": "diagnosis/1",
        "read": list(found.read),
        "told": found.told,
        "exit_code": found.log.exit_code,
        "stops": found.log.stage,
        "faults": [_fault(match) for match in found.matches],
        "last_lines": [] if found.matches else [str(line) for line in found.log.lines[-LAST:]],
        "advice": list(found.advice),
    }


def _fault(match: Match) -> dict[str, Any]:
    fault = match.fault
    return {
        "id": fault.id,
        "title": fault.title,
        "where": match.line.where if match.line else None,
        "line": match.line.text if match.line else None,
        "note": match.note,
        "cause": fault.cause,
        "mend": list(fault.mend),
        "sources": list(fault.sources),
    }


def render(found: Diagnosis) -> str:
    head = [f"read {', '.join(found.read)}", *([found.told] if found.told else [])]
    if not found.matches:
        return "\n".join([*head, *_nothing(found)]) + "\n"
    return "\n\n".join(["\n".join(head), *(_told(match) for match in found.matches)]) + "\n"


def _nothing(found: Diagnosis) -> list[str]:
    return [
        f"nothing known; the log stops {SPOKEN[found.log.stage]}. Its last lines:",
        *(f"  {line}"[:200] for line in found.log.lines[-LAST:]),
        *(f"do: {line}" for line in found.advice),
    ]


def _told(match: Match) -> str:
    fault = match.fault
    rows = [
        ("seen", str(match.line) if match.line else ""),
        ("and", match.note),
        ("cause", fault.cause),
        *(("do", line) for line in fault.mend),
        ("from", "; ".join(fault.sources)),
    ]
    return "\n".join([f"{fault.id}: {fault.title}", *(_row(*row) for row in rows if row[1])])


def _row(name: str, text: str) -> str:
    return textwrap.fill(
        text[:600],
        width=100,
        initial_indent=f"  {name:<6} ",
        subsequent_indent=" " * 9,
        break_on_hyphens=False,
    )
