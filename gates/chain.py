"""Which gate blocks which: NN is judged after 01 to NN-1, all of them now; no stored verdict is trusted."""

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from gates import registry
from gates.checks import Gate, broken, skip
from gates.evidence import EvidenceError, unreadable
from gates.verdict import Check, Verdict, decide, first_of, strictly, utc_now, write, write_text
from gates.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The verdict on a whole gate, and one for each of its phases."""

    whole: Verdict
    phases: dict[str, Verdict]

    def of(self, phase: str | None) -> Verdict:
        return self.phases[phase] if phase else self.whole

    def write(self, workspace: Workspace) -> None:
        for verdict in (self.whole, *self.phases.values()):
            write(verdict, workspace.root / ".gates" / "verdicts")


def judge_up_to(workspace: Workspace, number: str, *, strict: bool = False) -> list[Judged]:
    """Gates 01 to `number`, in order; once one does not pass, those after it are blocked by it."""
    found: list[Judged] = []
    blocker: Verdict | None = None
    for other in registry.up_to(number):
        judged = _judge(other, workspace, blocker, strict=strict)
        found.append(judged)
        if blocker is None and not judged.whole.passes:
            blocker = judged.whole
    return found


def _judge(number: str, workspace: Workspace, blocker: Verdict | None, *, strict: bool) -> Judged:
    try:
        gate = registry.load(number)
    except Exception as error:  # a gate that can't be loaded is an error of its own, not of the whole command
        save_log(workspace, traceback.format_exc())
        return Judged(whole=_crashed(number, error), phases={})
    if blocker is not None:
        return block(gate, blocker)
    return judge(gate, workspace.again(), strict=strict)


def judge(gate: Gate, workspace: Workspace, *, strict: bool = False) -> Judged:
    """One gate by itself. An exception becomes the outcome `error`, and a log."""
    try:
        evidence = gate.collect(workspace)
        checks = gate.judge(evidence)
    except OSError as error:
        return _together(gate, [broken(spec, str(unreadable(error))) for spec in gate.specs])
    except Exception as error:
        if not isinstance(error, EvidenceError):
            save_log(workspace, traceback.format_exc())
        remedy = error.remedy if isinstance(error, EvidenceError) else "report it with .gates/error.log"
        return _together(gate, [broken(spec, _told(error), remedy) for spec in gate.specs])
    return _together(gate, strictly(checks) if strict else checks, evidence)


def _together(gate: Gate, checks: Sequence[Check], evidence: Any = None) -> Judged:
    return Judged(
        whole=_verdict(gate, None, checks, evidence),
        phases={
            phase: _verdict(gate, phase, [check for check in checks if check.phase == phase], evidence)
            for phase in gate.phases
        },
    )


def _verdict(gate: Gate, phase: str | None, checks: Sequence[Check], evidence: Any) -> Verdict:
    waits = evidence.waiting if evidence else {}
    waiting = next((text for name, text in waits.items() if phase in (None, name)), "")
    runs = evidence.run if evidence else {}
    skip_reason = evidence.skip_reason if evidence else None
    decision = decide(checks, waiting=waiting, skip_reason=skip_reason)
    failure = first_of(checks, decision.first_failure)
    if decision.verdict == "PASS":
        command = gate.next_commands[phase]
    elif failure is not None and failure.remedy:
        command = failure.remedy
    else:
        command = "finetune monitor --wait" if waiting else f"gate explain {gate.number}"
    return Verdict(
        gate=gate.number,
        name=gate.name,
        skill=gate.skill,
        phase=phase,
        verdict=decision.verdict,
        outcome=decision.outcome,
        summary=decision.summary,
        first_failure=decision.first_failure,
        blocked_by="a run that is still going" if decision.outcome == "blocked" else None,
        next_command=command,
        device=evidence.device if evidence else None,
        run=runs.get(phase) if phase else runs.get("full"),
        checks=tuple(checks),
        inputs=tuple(evidence.inputs) if evidence else (),
        skip_reason=skip_reason if decision.outcome == "skipped" else None,
        judged_at=utc_now(),
        tool=tool(),
    )


def block(gate: Gate, blocker: Verdict) -> Judged:
    """What a gate says after one that does not pass: nothing but that."""

    def blocked(phase: str | None) -> Verdict:
        specs = [spec for spec in gate.specs if phase in (None, spec.phase)]
        message = f"not judged: gate {blocker.gate} does not pass"
        checks = tuple(skip(spec, message) for spec in specs)
        decision = decide(checks, blocked_by=blocker.gate)
        return Verdict(
            gate=gate.number,
            name=gate.name,
            skill=gate.skill,
            phase=phase,
            verdict=decision.verdict,
            outcome=decision.outcome,
            summary=f"{decision.summary}: {blocker.first_failure or blocker.summary}",
            first_failure=None,
            blocked_by=blocker.gate,
            next_command=blocker.next_command,
            device=None,
            run=None,
            checks=checks,
            inputs=(),
            skip_reason=None,
            judged_at=utc_now(),
            tool=tool(),
        )

    return Judged(whole=blocked(None), phases={phase: blocked(phase) for phase in gate.phases})


def _crashed(number: str, error: Exception) -> Verdict:
    skill = registry.skill_of(number)
    return Verdict(
        gate=number,
        name=skill.removeprefix(registry.SERIES)[3:],
        skill=skill,
        phase=None,
        verdict="FAIL",
        outcome="error",
        summary=f"the gate can't be loaded: {_told(error)}",
        first_failure=None,
        blocked_by=None,
        next_command="install aipc-finetune again",
        device=None,
        run=None,
        checks=(),
        inputs=(),
        skip_reason=None,
        judged_at=utc_now(),
        tool=tool(),
    )


def _told(error: Exception) -> str:
    return str(error) if isinstance(error, EvidenceError) else f"{type(error).__name__}: {error}"


def save_log(workspace: Workspace, text: str) -> None:
    """The traceback for whoever mends the gate; the user gets one line."""
    write_text(workspace.root / ".gates" / "error.log", text)


def tool() -> dict[str, str]:
    try:
        version = metadata.version("aipc-finetune")
    except metadata.PackageNotFoundError:
        version = "0 (not installed)"
    return {"name": "gate", "version": version}
