"""`gate check 07 --run DIR` on a run directory of qflux: a verdict that is printed and never stored."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from gates import registry
from gates.chain import tool
from gates.qflux import checks
from gates.qflux.checks import Qflux
from gates.qflux.run import CONFIG, TRAINER, looks_like, read
from gates.verdict import Check, Verdict, decide, first_of, strictly, utc_now

GATE = "07"
SHAPES = (
    "a run of ours holds run.json and metrics.jsonl (outputs/<project>/v<N>); one of qflux holds "
    f"{CONFIG} and checkpoint-<epoch>-<step> folders (<output_dir>/<project>/v<N>)"
)

__all__ = ["SHAPES", "judge", "looks_like"]


def judge(folder: Path, *, strict: bool = False, require_device: str | None = None) -> Verdict:
    """Outside of any workspace and of the chain: nothing before it is asked for, and nothing is written."""
    evidence = Qflux(run=read(folder.resolve()), require_device=require_device)
    found = checks.judge(evidence)
    if require_device:
        found = [replace(item, required=True) if item.id == "xpu-alloc" else item for item in found]
    return _verdict(evidence, strictly(found) if strict else found)


def _verdict(evidence: Qflux, found: Sequence[Check]) -> Verdict:
    decision = decide(found)
    failure = first_of(found, decision.first_failure)
    unknown = list(dict.fromkeys(item.id for item in found if item.status == "skip" and item.excused))
    core = [item for item in found if item.required]
    told = f"core {sum(item.status == 'pass' for item in core)} of {len(core)}" if core else "no core"
    skill = registry.skill_of(GATE)
    return Verdict(
        gate=GATE,
        name=f"{skill.removeprefix(registry.SERIES)[3:]}, a run of {TRAINER}",
        skill=skill,
        phase="smoke" if evidence.is_smoke else "full",
        verdict=decision.verdict,
        outcome=decision.outcome,
        summary=f"{TRAINER}: {told} ({', '.join(item.id for item in core)}); can't be known: {', '.join(unknown)}",
        first_failure=decision.first_failure,
        blocked_by=None,
        next_command=_next(decision.verdict, failure),
        device=None,
        run=evidence.run.name,
        checks=tuple(found),
        inputs=evidence.run.inputs,
        skip_reason=None,
        judged_at=utc_now(),
        tool=tool(),
    )


def _next(verdict: str, failure: Check | None) -> str:
    if verdict == "PASS":
        return "compare base and adapter on samples that it never saw"
    return failure.remedy if failure and failure.remedy else f"gate explain {GATE}"
