"""Plant each fault in healthy evidence, judge its gate, and see whether the right check turned."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gates import chain, registry
from gates.selftest.editing import Made
from gates.selftest.faults.row import Fault
from gates.selftest.shapes import Shape
from gates.selftest.snapshot import Snapshot
from gates.verdict import Check, Verdict
from gates.workspace import Workspace

FAULTS_MIN = 3  # planted for every required check


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One fault, or none, in one shape, judged by one gate."""

    gate: str
    shape: str
    fault: Fault | None
    """None: the healthy workspace"""
    amiss: str
    """what was seen instead of what had to be; empty where it is right"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A check, and what of the faults for it was seen."""

    gate: str
    check: str
    required: bool
    planted: int
    turned: int

    @property
    def enough(self) -> bool:
        return not self.required or self.planted >= FAULTS_MIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    trials: tuple[Trial, ...]
    lines: tuple[Line, ...]
    seconds: float

    @property
    def amiss(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.amiss]

    @property
    def sparse(self) -> list[Line]:
        return [line for line in self.lines if not line.enough]

    @property
    def passes(self) -> bool:
        return bool(self.trials) and not self.amiss and not self.sparse


def run(shapes: Mapping[str, Shape], faults: Mapping[str, tuple[Fault, ...]], folder: Path) -> Matrix:
    """Every shape healthy, then spoilt by each of its faults; `folder` is for the workspaces."""
    start = time.monotonic()
    trials = [
        trial for name, shape in shapes.items() for trial in _in_shape(name, shape, faults, folder / name)
    ]
    return Matrix(trials=tuple(trials), lines=tuple(_lines(trials)), seconds=time.monotonic() - start)


def _in_shape(
    name: str, shape: Shape, faults: Mapping[str, tuple[Fault, ...]], root: Path
) -> Iterator[Trial]:
    made = shape.make(root)
    for gate in registry.numbers():
        verdict = judged(made, gate)
        told = f"{verdict.outcome}: {verdict.summary}"
        yield Trial(gate=gate, shape=name, fault=None, amiss="" if verdict.passes else told)
    snapshot = Snapshot(root)
    for gate, rows in faults.items():
        for fault in rows:
            if fault.shape == name:
                fault.spoil(made)
                amiss = difference(judged(made, gate), fault)
                yield Trial(gate=gate, shape=name, fault=fault, amiss=amiss)
                snapshot.restore()


def judged(made: Made, gate: str) -> Verdict:
    """The verdict of one gate by itself: no other is asked, so none blocks it."""
    return chain.judge(registry.load(gate), Workspace.open(made.root)).whole


def name_of(check: Check) -> str:
    return f"{check.phase}/{check.id}" if check.phase else check.id


def difference(verdict: Verdict, fault: Fault) -> str:
    """Where `verdict` is not what `fault` must make of it: one line, empty where it is."""
    seen = {status: _with(verdict.checks, status) for status in ("fail", "error")}
    for status, wanted in (("fail", fault.fails), ("error", fault.errors)):
        if missing := wanted - seen[status]:
            return f"no {status} of {', '.join(sorted(missing))}"
        if more := seen[status] - wanted:
            return f"{status} of {', '.join(sorted(more))}, too"
    if verdict.passes and any(check.required for check in verdict.checks if name_of(check) in fault.turns):
        return "the gate passes all the same"
    alone = [name_of(check) for check in verdict.checks if check.status == "skip" and not _skips(check)]
    return f"skipped without need: {', '.join(alone)}" if alone else ""


def _with(checks: Iterable[Check], status: str) -> set[str]:
    return {name_of(check) for check in checks if check.status == status}


def _skips(check: Check) -> bool:
    return check.excused or check.message.startswith("not judged: it needs ")


def _lines(trials: list[Trial]) -> Iterator[Line]:
    for gate in registry.numbers():
        for spec in registry.load(gate).specs:
            check = f"{spec.phase}/{spec.id}" if spec.phase else spec.id
            planted = [t for t in trials if t.fault and t.gate == gate and check in t.fault.turns]
            yield Line(
                gate=gate,
                check=check,
                required=spec.required,
                planted=len(planted),
                turned=sum(not trial.amiss for trial in planted),
            )
