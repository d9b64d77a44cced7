"""Checks as small functions, so that a gate.py reads like the PASS section of its SKILL.md."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from gates.evidence import EvidenceError, MissingEvidenceError, legible, unreadable
from gates.verdict import Check, EvidenceRef, Input, Status, plain

E = TypeVar("E")
UNMET: tuple[Status, ...] = ("fail", "error", "skip")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What every gate's evidence says for its verdict, beside what its checks judge."""

    inputs: tuple[Input, ...] = ()
    device: str | None = None
    run: Mapping[str, str] = field(default_factory=dict)
    """phase to the run directory that is judged"""
    waiting: Mapping[str, str] = field(default_factory=dict)
    """phase to why it can't be judged yet: its run is still going"""
    skip_reason: str | None = None
    """why the user left the step out, where a skip of it counts"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check saw."""

    status: Status
    message: str = ""
    expected: Any = None
    observed: Any = None
    unit: str | None = None
    evidence: tuple[EvidenceRef, ...] = ()
    remedy: str | None = None
    """None: the check's own"""
    title: str | None = None
    """None: the check's own"""


def passed(message: str = "", **details: Any) -> Finding:
    return Finding(status="pass", message=message, **details)


def failed(message: str, **details: Any) -> Finding:
    return Finding(status="fail", message=message, **details)


def skipped(message: str, **details: Any) -> Finding:
    return Finding(status="skip", message=message, **details)


def verdict_of(ok: bool, message: str, **details: Any) -> Finding:
    """pass or fail; `ok` must be a true comparison of finite numbers, for NaN compares false."""
    return Finding(status="pass" if ok else "fail", message=message, **details)


def listing(items: Sequence[str], limit: int = 3) -> str:
    """The first few of `items`, and how many more there are."""
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return "; ".join(items[:limit]) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec(Generic[E]):
    """A check as declared: what `gate explain` tells, and how to run it."""

    id: str
    phase: str | None
    title: str
    section: str
    remedy: str
    why: str
    needs: tuple[str, ...]
    required: bool
    may_skip: str | None
    """the condition, in words, under which this check may skip and the gate still pass"""
    measure: Callable[[E], Finding]

    @property
    def measures(self) -> str:
        return " ".join((self.measure.__doc__ or "").split())


class Checks(Generic[E]):
    """The checks of one gate, or of one phase of it, in order."""

    def __init__(self, phase: str | None = None) -> None:
        self.phase = phase
        self.specs: list[Spec[E]] = []

    def check(
        self,
        id: str,
        *,
        title: str,
        section: str,
        remedy: str,
        why: str,
        needs: tuple[str, ...] = (),
        required: bool = True,
        may_skip: str | None = None,
    ) -> Callable[[Callable[[E], Finding]], Callable[[E], Finding]]:
        """Register the decorated function, whose docstring says what is measured."""
        unknown = set(needs) - {spec.id for spec in self.specs}
        if unknown or id in {spec.id for spec in self.specs}:
            raise ValueError(f"check {id}: given twice, or needs {sorted(unknown)} that stand not above it")

        def register(measure: Callable[[E], Finding]) -> Callable[[E], Finding]:
            self.specs.append(
                Spec(
                    id=id,
                    phase=self.phase,
                    title=title,
                    section=section,
                    remedy=remedy,
                    why=why,
                    needs=needs,
                    required=required,
                    may_skip=may_skip,
                    measure=measure,
                )
            )
            return measure

        return register

    def run(self, evidence: E, *, waiting: str = "") -> list[Check]:
        """Every check, each once; `waiting` makes all of them skips that say so."""
        done: dict[str, Check] = {}
        for spec in self.specs:
            done[spec.id] = skip(spec, waiting) if waiting else _run(spec, evidence, done)
        return list(done.values())


def shared(
    lists: Mapping[Checks[E], str], id: str, *, remedy: str = "", **details: Any
) -> Callable[[Callable[[E], Finding]], Callable[[E], Finding]]:
    """Register one function in several phases; `lists` has what to run in each where no remedy is given."""

    def register(measure: Callable[[E], Finding]) -> Callable[[E], Finding]:
        for checks, default in lists.items():
            checks.check(id, remedy=remedy or default, **details)(measure)
        return measure

    return register


def _run(spec: Spec[E], evidence: E, done: Mapping[str, Check]) -> Check:
    unmet = [name for name in spec.needs if done[name].status in UNMET]
    if unmet:
        return skip(spec, f"not judged: it needs {', '.join(unmet)}, which did not pass")
    try:
        finding = spec.measure(evidence)
    except MissingEvidenceError as error:
        finding = failed(str(error), remedy=error.remedy or None, evidence=(EvidenceRef(path=error.path),))
    except EvidenceError as error:
        finding = _error(str(error), remedy=error.remedy or None, evidence=(EvidenceRef(path=error.path),))
    except OSError as error:
        finding = _error(str(unreadable(error)))
    except Exception as error:  # a fault of the gate itself must never pass, nor hide the other checks
        finding = _error(f"{type(error).__name__}: {error}")
    if finding.status == "skip" and spec.required and not spec.may_skip:
        finding = _error(f"skipped, which this check may not: {finding.message}")
    return _check(spec, finding)


def _error(message: str, **details: Any) -> Finding:
    return Finding(status="error", message=message, **details)


def skip(spec: Spec[Any], message: str) -> Check:
    """A skip that the check did not choose: it can't let the gate pass."""
    return _check(spec, skipped(message), excused=False)


def excuse(spec: Spec[Any], message: str) -> Check:
    """A skip under a condition of the whole gate, coded in its `judge`."""
    return _check(spec, skipped(message))


def broken(spec: Spec[Any], message: str, remedy: str = "") -> Check:
    """The check of a gate that could not even read its evidence; `remedy` is of what was not readable."""
    return _check(spec, _error(message, remedy=remedy or None))


def _check(spec: Spec[Any], finding: Finding, *, excused: bool = True) -> Check:
    acts = finding.status in ("fail", "error")
    return Check(
        id=spec.id,
        phase=spec.phase,
        title=finding.title or spec.title,
        status=finding.status,
        required=spec.required,
        needs=spec.needs,
        expected=plain(finding.expected),
        observed=plain(finding.observed),
        unit=finding.unit,
        evidence=finding.evidence,
        message=legible(finding.message),
        remedy=(spec.remedy if finding.remedy is None else finding.remedy) if acts else "",
        section=spec.section,
        excused=excused and finding.status == "skip",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """What a gate.py exports as GATE."""

    number: str
    name: str
    skill: str
    purpose: str
    collect: Callable[[Any], Any]
    judge: Callable[[Any], list[Check]]
    specs: tuple[Spec[Any], ...]
    next_commands: Mapping[str | None, str]
    """phase to what comes after it passes; None is the whole gate"""
    phases: tuple[str, ...] = ()
    may_be_skipped: bool = False
    """`gate skip` takes it"""
