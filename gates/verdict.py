"""Verdict and Check: to and from JSON, and the only place that decides PASS."""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from gates.evidence import document_digest, legible

Status = Literal["pass", "fail", "skip", "error", "info"]
Outcome = Literal["passed", "skipped", "failed", "blocked", "error"]
STATUSES: tuple[Status, ...] = ("pass", "fail", "skip", "error", "info")
EXIT = {"passed": 0, "skipped": 0, "failed": 1, "blocked": 1, "error": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceRef:
    """Where a check looked: a file, and a place in it."""

    path: str
    sha256: str | None = None
    locator: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A file that the judgement rests on."""

    path: str
    sha256: str | None
    size: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    id: str
    phase: str | None
    title: str
    status: Status
    required: bool
    needs: tuple[str, ...]
    expected: Any
    observed: Any
    unit: str | None
    evidence: tuple[EvidenceRef, ...]
    message: str
    remedy: str
    section: str
    excused: bool = field(default=False, compare=False)
    """A skip under the condition coded beside the check. Not in the record: nobody re-decides from it."""

    def to_json(self) -> dict[str, Any]:
        document = {name.name: getattr(self, name.name) for name in fields(self) if name.name != "excused"}
        document["needs"] = list(self.needs)
        document["evidence"] = [_record(reference) for reference in self.evidence]
        document["expected"] = plain(self.expected)
        document["observed"] = plain(self.observed)
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Check":
        references = tuple(EvidenceRef(**reference) for reference in document["evidence"])
        return cls(**{**document, "needs": tuple(document["needs"]), "evidence": references})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    gate: str
    name: str
    skill: str
    phase: str | None
    verdict: Literal["PASS", "FAIL"]
    outcome: Outcome
    summary: str
    first_failure: str | None
    blocked_by: str | None
    next_command: str
    device: str | None
    run: str | None
    checks: tuple[Check, ...]
    inputs: tuple[Input, ...]
    skip_reason: str | None
    judged_at: str
    tool: Mapping[str, str]

    @property
    def passes(self) -> bool:
        return self.verdict == "PASS"

    @property
    def exit_code(self) -> int:
        return EXIT[self.outcome]

    @property
    def label(self) -> str:
        return f"{self.gate}-{self.phase}" if self.phase else self.gate

    @property
    def first_check(self) -> Check | None:
        """The check that `first_failure` names; in two phases the one that did not pass."""
        return first_of(self.checks, self.first_failure)

    @property
    def counts(self) -> dict[str, int]:
        seen = Counter(check.status for check in self.checks)
        return {status: seen[status] for status in STATUSES}

    @property
    def judgement_digest(self) -> str:
        """Equal for equal judgements: times, tool and wording around the checks are left out."""
        return document_digest(
            {
                "gate": self.gate,
                "phase": self.phase,
                "inputs": [_record(item) for item in self.inputs],
                "checks": [check.to_json() for check in self.checks],
            }
        )

    def to_json(self) -> dict[str, Any]:
        document = {name.name: getattr(self, name.name) for name in fields(self)}
        return {
            **document,
            "schema": "verdict/1",
            "tool": dict(self.tool),
            "counts": self.counts,
            "checks": [check.to_json() for check in self.checks],
            "inputs": [_record(item) for item in self.inputs],
            "judgement_digest": self.judgement_digest,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> "Verdict":
        known = {name.name for name in fields(cls)}
        values = {key: value for key, value in document.items() if key in known}
        values["checks"] = tuple(Check.from_json(check) for check in document["checks"])
        values["inputs"] = tuple(Input(**item) for item in document["inputs"])
        return cls(**values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    verdict: Literal["PASS", "FAIL"]
    outcome: Outcome
    summary: str
    first_failure: str | None


def decide(
    checks: Sequence[Check],
    *,
    blocked_by: str | None = None,
    waiting: str = "",
    skip_reason: str | None = None,
) -> Decision:
    """PASS only if every required check passed or skipped as permitted, and at least one ran.

    `blocked_by` names the gate before that does not pass; `waiting` says which run is still going.
    Failed and errored together are failed; a failed check is told rather than a run to wait for.
    """
    required = [check for check in checks if check.required]
    failed = [check.id for check in required if check.status == "fail"]
    errored = [check.id for check in required if check.status == "error"]
    unexcused = [check.id for check in required if check.status == "skip" and not check.excused]
    if blocked_by:
        return _fail("blocked", f"gate {blocked_by} does not pass", None)
    if failed:
        return _fail("failed", f"{len(failed)} of {len(required)} required checks failed", failed[0])
    if errored:
        return _fail("error", f"{len(errored)} required checks could not be made", errored[0])
    if waiting:
        return _fail("blocked", waiting, None)
    if unexcused:
        return _fail("error", f"{len(unexcused)} required checks did not run", unexcused[0])
    passed = [check for check in checks if check.status == "pass"]
    if not any(check.required for check in passed):
        return _fail("error", "no required check ran", None)
    if skip_reason:
        return Decision(verdict="PASS", outcome="skipped", summary=skip_reason, first_failure=None)
    skipped = sum(check.status == "skip" for check in checks)
    summary = f"{len(passed)} checks passed" + (f", {skipped} skipped" if skipped else "")
    return Decision(verdict="PASS", outcome="passed", summary=summary, first_failure=None)


def _fail(outcome: Outcome, summary: str, first: str | None) -> Decision:
    return Decision(verdict="FAIL", outcome=outcome, summary=summary, first_failure=first)


def first_of(checks: Sequence[Check], id: str | None) -> Check | None:
    return next((c for c in checks if c.id == id and c.required and c.status != "pass"), None)


def strictly(checks: Sequence[Check]) -> list[Check]:
    """Advisory checks counted as required."""
    return [replace(check, required=True) if check.status != "info" else check for check in checks]


def plain(value: Any) -> Any:
    """`value` in JSON types; what JSON can't say (NaN, infinity) as text."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, str):
        return legible(value)
    if isinstance(value, Mapping):
        return {legible(str(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value) if isinstance(value, (set, frozenset)) else value
        return [plain(item) for item in items]
    return value


def _record(item: EvidenceRef | Input) -> dict[str, Any]:
    return {name.name: getattr(item, name.name) for name in fields(item)}


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- the record on disk


def render(value: Any) -> str:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def validate(document: Mapping[str, Any]) -> None:
    """Raises ValueError unless `document` is a verdict that agrees with itself."""
    from gates.schema import problems

    found = problems(document, "verdict")
    keys = [(check["phase"], check["id"]) for check in document.get("checks", [])]
    found += [f"checks: {key} twice" for key, count in Counter(keys).items() if count > 1]
    if found:
        raise ValueError("not a verdict: " + "; ".join(found[:3]))


def write(verdict: Verdict, folder: Path) -> Path:
    """Into `folder`/NN[-phase].json, validated first."""
    document = verdict.to_json()
    validate(document)
    path = folder / f"{verdict.label}.json"
    write_text(path, render(document))
    return path


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_bytes(path: Path, content: bytes) -> None:
    """Whole or not at all: a temporary file beside `path`, then a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        _replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _replace(source: Path, target: Path) -> None:
    """Rename over `target`; Windows refuses while a scanner holds it, for a moment."""
    for _ in range(19):
        try:
            source.replace(target)
            return
        except PermissionError:
            time.sleep(0.05)
    source.replace(target)
