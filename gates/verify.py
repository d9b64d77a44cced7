"""`gate verify`: stored verdicts judged again from the files that lie here, on this machine or another.

A check ends confirmed (judged again it says the same), contradicted, or unverifiable (its input is absent). It
guards against accident and the lazy edit; who rewrites every file and every digest can still lie.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gates import chain, inventory, registry, schema, verdict
from gates.checks import Checks, Gate, Spec, listing
from gates.checks import Finding as Outcome
from gates.evidence import EvidenceError, read_json
from gates.inventory import KINDS, RESTS, Survey
from gates.verdict import Check, Input, Verdict
from gates.workspace import Workspace

State = Literal["confirmed", "contradicted", "unverifiable"]
RECORD = "record"  # an input that the verdict itself names; it can't be done without
ALLOWABLE = ("weights", "dataset", "cache")
DEVICES = ("xpu", "cuda", "cpu")

FIELDS = (
    "name", "skill", "verdict", "outcome", "summary", "first_failure", "blocked_by", "next_command", "device",
    "run", "skip_reason", "counts",
)  # fmt: skip
"""of a verdict, beside its checks and inputs; when and by which version it was judged can't be verified"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How one check ended; `id` is None for what stands around the checks."""

    id: str | None
    phase: str | None
    state: State
    message: str = ""
    rests_on: tuple[str, ...] = ()
    """what is absent: weights, dataset, cache, pictures, or record"""
    allowed: bool = False
    """it rests on recorded digests, as --allow-absent says it may"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One stored verdict."""

    label: str
    verdict: str | None
    """as stored; None where the file is refused"""
    findings: tuple[Finding, ...]
    judged_by: str | None = None
    """the version that stored it"""

    @property
    def state(self) -> State:
        states = {finding.state for finding in self.findings if not finding.allowed}
        return next((s for s in ("contradicted", "unverifiable") if s in states), "confirmed")

    @property
    def counts(self) -> dict[str, int]:
        seen = Counter(finding.state for finding in self.findings if finding.id)
        return {state: seen[state] for state in ("confirmed", "contradicted", "unverifiable")}


def exit_code(found: Sequence[Verified]) -> int:
    """Nothing stored is nothing confirmed."""
    states = {item.state for item in found}
    if "contradicted" in states:
        return 1
    return 3 if "unverifiable" in states or not found else 0


def verify(workspace: Workspace, numbers: Sequence[str], allowed: Sequence[str] = ()) -> list[Verified]:
    """The stored verdicts of `numbers`, in order. Gates before them are judged too, for they may block."""
    stored, refused = _read(workspace)
    found: list[Verified] = []
    blocker: Verdict | None = None
    for number in registry.up_to(numbers[-1]):
        again = _Again(workspace, number, stored, allowed)
        found += again.verified(blocker)
        if blocker is None and not (now := again.settled()).passes:
            blocker = now
    others = set(registry.numbers()) - set(numbers)
    wanted = [item for item in [*found, *refused] if item.label[:2] not in others]
    return sorted(wanted, key=lambda item: item.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    document: dict[str, Any]
    told: Verdict


def _read(workspace: Workspace) -> tuple[list[Stored], list[Verified]]:
    """What lies in .gates/verdicts, and what of it is no verdict as `gate check` writes it."""
    stored, refused = [], []
    for path in sorted((workspace.root / ".gates" / "verdicts").glob("*.json")):
        try:
            stored.append(_stored(path, workspace.shown(path)))
        except (EvidenceError, ValueError) as error:
            problem = _around(None, f"refused: {error}")
            refused.append(Verified(label=path.stem, verdict=None, findings=(problem,)))
    return stored, refused


def _stored(path: Path, shown: str) -> Stored:
    document = read_json(path, shown)
    if not isinstance(document, dict):
        raise ValueError("not a verdict: no JSON object")
    schema.require(document, "verdict", shown)  # first, for what follows counts on its shape
    verdict.validate(document)
    told = Verdict.from_json(document)
    if told.label != path.stem:
        raise ValueError(f"it is a verdict on {told.label}")
    if told.judgement_digest != document["judgement_digest"]:
        raise ValueError("judgement_digest is not that of its gate, inputs and checks: it was edited")
    return Stored(document=document, told=told)


class _Again:
    """One gate judged again, for its stored verdicts to be held against."""

    def __init__(
        self, workspace: Workspace, number: str, stored: Sequence[Stored], allowed: Sequence[str]
    ) -> None:
        self.gate: Gate = registry.load(number)
        self.stored = [item for item in stored if item.told.gate == number]
        self.allowed = allowed
        self.workspace = _as_judged(workspace, [item.told for item in self.stored])
        self.evidence: Any = None
        strict = any(_was_strict(self.gate, item.told) for item in self.stored)
        self.fresh = chain.judge(replace(self.gate, collect=self._collect), self.workspace, strict=strict)
        self.survey = Survey(self.workspace, tuple(self._runs()))

    def _collect(self, workspace: Workspace) -> Any:
        self.evidence = self.gate.collect(workspace)
        return self.evidence

    def _runs(self) -> Iterator[Path]:
        kinds = [item.told.run for item in self.stored]
        for run in dict.fromkeys([*kinds, *(self.evidence.run.values() if self.evidence else ())]):
            if run is not None:
                yield from inventory.lineage(self.workspace, self.workspace.root / run)

    def settled(self) -> Verdict:
        """What the gate says now, where what is absent rests on the stored verdict."""
        whole = next((item.told for item in self.stored if item.told.phase is None), None)
        return self._decided(self._findings(whole)[1]).whole if whole else self.fresh.whole

    def verified(self, blocker: Verdict | None) -> list[Verified]:
        return [self._verified(item, blocker) for item in self.stored]

    def _verified(self, stored: Stored, blocker: Verdict | None) -> Verified:
        told = stored.told
        if blocker is not None:
            expected = chain.block(self.gate, blocker).of(told.phase)
            findings = list(_blocked(told, expected, blocker.gate))
        else:
            findings, checks = self._findings(told)
            findings += self._inputs(told)
            expected = self._decided(checks).of(told.phase)
        absent = {name for finding in findings for name in finding.rests_on}
        findings += self._fields(stored.document, expected, absent)
        return Verified(
            label=told.label,
            verdict=told.verdict,
            findings=tuple(findings),
            judged_by=told.tool["version"],
        )

    def _decided(self, checks: Sequence[Check]) -> chain.Judged:
        """The gate's verdict of these checks."""
        if self.evidence is None:
            return self.fresh
        given = replace(self.gate, collect=lambda _: self.evidence, judge=lambda _: list(checks))
        return chain.judge(given, self.workspace)

    # ---- checks

    def _findings(self, told: Verdict) -> tuple[list[Finding], list[Check]]:
        """Of each stored check how it ended; and the gate's checks, with the stored ones where input is absent."""
        stored = {(check.phase, check.id): check for check in told.checks}
        gone = tuple(item.path for item in told.inputs if self._input(item) == "absent")
        found: list[Finding] = []
        done: dict[tuple[str | None, str], Check] = {}
        resting: set[tuple[str | None, str]] = set()
        for judged in self.fresh.whole.checks:
            key = (judged.phase, judged.id)
            check = stored.pop(key, None)
            if check is None:
                done[key] = judged
                if told.phase in (None, judged.phase):
                    found.append(_finding(judged, "contradicted", "the verdict has no such check"))
                continue
            waits = any((judged.phase, name) in resting for name in judged.needs)
            fresh = self._measured(judged, done) if waits and self.evidence is not None else judged
            finding = self._compared(check, fresh, gone)
            found.append(finding)
            if finding.rests_on:
                resting.add(key)
            done[key] = _as_stored(check) if finding.state == "unverifiable" else fresh
        found += [_finding(check, "contradicted", "the gate has no such check") for check in stored.values()]
        return found, list(done.values())

    def _measured(self, check: Check, done: Mapping[tuple[str | None, str], Check]) -> Check:
        """Judged where some of what it needs rests on a record."""
        spec = next(s for s in self.gate.specs if (s.phase, s.id) == (check.phase, check.id))
        own = [s for s in self.gate.specs if s.phase == spec.phase and s.id in spec.needs]
        alone: Checks[Any] = Checks(spec.phase)
        alone.specs += [_given(s, done[s.phase, s.id]) for s in own]
        alone.specs.append(replace(spec, required=check.required))
        return alone.run(getattr(self.evidence, spec.phase) if spec.phase else self.evidence)[-1]

    def _compared(self, told: Check, fresh: Check, gone: Sequence[str]) -> Finding:
        if told == fresh:
            return _finding(told, "confirmed")
        if gone:
            return _finding(told, "unverifiable", f"absent: {listing(gone)}", (RECORD,))
        kinds = [k for k in RESTS.get((self.gate.number, told.phase, told.id), ()) if self.survey.absent(k)]
        if changed := [name for kind in kinds for name in self.survey.changed(kind)]:
            return _finding(told, "contradicted", f"{listing(changed)} has other bytes than were recorded")
        if kinds:
            names = [name for kind in kinds for name in self.survey.absent(kind)]
            words = tuple(dict.fromkeys(KINDS[kind] for kind in kinds))
            return self._resting(told, f"absent: {listing(names, 1)}", words)
        return _finding(told, "contradicted", _difference(told, fresh))

    def _resting(self, told: Check, message: str, words: tuple[str, ...]) -> Finding:
        if set(words) <= set(self.allowed):
            return _finding(
                told, "unverifiable", f"rests on recorded digests: {message}", words, allowed=True
            )
        return _finding(told, "unverifiable", message, words)

    # ---- around the checks

    def _input(self, item: Input) -> str | None:
        return inventory.state_of(self.workspace, item.path, item.sha256)

    def _inputs(self, told: Verdict) -> list[Finding]:
        """Files that the verdict says it rests on, against those that it rests on now."""
        now = {item.path: item for item in self.fresh.whole.inputs}
        absent = [item.path for item in told.inputs if self._input(item) == "absent"]
        here = [item for item in told.inputs if item.path not in absent]
        stale = [
            f"stale: {item.path} has changed since it was judged"
            for item in here
            if self._input(item) == "changed" or now.get(item.path, item) != item
        ]
        if unread := sorted(now.keys() - {item.path for item in told.inputs}):
            stale.append(f"stale: it was judged before there was {listing(unread)}")
        if not (absent or stale) and told.inputs != self.fresh.whole.inputs:
            stale.append("its inputs are not those of the gate")
        missing = [
            replace(_around(told.phase, f"absent: {path}"), state="unverifiable", rests_on=(RECORD,))
            for path in absent
        ]
        return missing + [_around(told.phase, message) for message in stale]

    def _fields(self, document: dict[str, Any], expected: Verdict, absent: set[str]) -> Iterator[Finding]:
        now = expected.to_json()
        for name in FIELDS:
            if document[name] == now[name]:
                continue
            message = f"{name} is {_short(document[name])}, judged again {_short(now[name])}"
            if RECORD in absent:
                yield replace(_around(expected.phase, message), state="unverifiable", rests_on=(RECORD,))
            else:
                yield _around(expected.phase, message)


def _given(spec: Spec[Any], check: Check) -> Spec[Any]:
    """A check that was settled."""
    return replace(spec, needs=(), measure=lambda _: Outcome(status=check.status))


def _blocked(told: Verdict, expected: Verdict, by: str) -> Iterator[Finding]:
    """A gate after one that does not pass says nothing but that."""
    checks = {(check.phase, check.id): check for check in expected.checks}
    for check in told.checks:
        if check == checks.pop((check.phase, check.id), None):
            yield _finding(check, "confirmed")
        else:
            yield _finding(check, "contradicted", f"not to be judged: gate {by} does not pass now")
    for check in checks.values():
        yield _finding(check, "contradicted", "the verdict has no such check")
    if told.inputs != expected.inputs:
        yield _around(told.phase, "a blocked gate rests on no input")


def _finding(
    check: Check, state: State, message: str = "", rests_on: tuple[str, ...] = (), *, allowed: bool = False
) -> Finding:
    return Finding(
        id=check.id, phase=check.phase, state=state, message=message, rests_on=rests_on, allowed=allowed
    )


def _around(phase: str | None, message: str) -> Finding:
    return Finding(id=None, phase=phase, state="contradicted", message=message)


def _difference(told: Check, fresh: Check) -> str:
    """The first that differs, status before all."""
    if told.status != fresh.status:
        return f"stored {told.status}, judged again {fresh.status}: {fresh.message}"
    old, new = told.to_json(), fresh.to_json()
    name = next(name for name in ("observed", "expected", "message", *sorted(old)) if old[name] != new[name])
    return f"{name} is {_short(old[name])}, judged again {_short(new[name])}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)
    return text if len(text) <= 120 else text[:117] + "..."


def _as_stored(check: Check) -> Check:
    """A stored skip was excused, unless what it needs kept it from running."""
    return replace(check, excused=check.status == "skip" and not check.message.startswith("not judged"))


def _as_judged(workspace: Workspace, told: Sequence[Verdict]) -> Workspace:
    """With the run and the device that the stored verdict was asked for."""
    again = replace(workspace.again(), require_device=_required_device(told))
    run = next((item.run for item in told if item.run and item.phase in (None, "full")), None)
    if run is not None and ".." not in run.split("/") and (workspace.root / run / "run.json").is_file():
        again.chosen_run = workspace.root / run
    again.__dict__["externals"] = workspace.externals
    return again


def _required_device(told: Sequence[Verdict]) -> str | None:
    """--require-device leaves its mark on one check only, where it made it fail."""
    seen = [c.expected for item in told for c in item.checks if c.id == "xpu-alloc" and c.status == "fail"]
    return next((device for device in seen if device in DEVICES), None)


def _was_strict(gate: Gate, told: Verdict) -> bool:
    """--strict made each advisory check a required one."""
    advisory = {(spec.phase, spec.id) for spec in gate.specs if not spec.required}
    return any(check.required for check in told.checks if (check.phase, check.id) in advisory)
