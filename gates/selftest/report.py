"""The fault matrix as text and as JSON."""

from collections.abc import Iterator
from typing import Any

from gates.selftest.matrix import FAULTS_MIN, Line, Matrix, Trial
from gates.selftest.shapes import SHAPES


def document(matrix: Matrix) -> dict[str, Any]:
    return {
        "schema": "selftest/1",
        "passes": matrix.passes,
        "seconds": round(matrix.seconds, 1),
        "shapes": {name: shape.told for name, shape in SHAPES.items()},
        "healthy": [_healthy(trial) for trial in matrix.trials if trial.fault is None],
        "checks": [
            {
                "gate": line.gate, "check": line.check, "required": line.required,
                "planted": line.planted, "turned": line.turned,
            }
            for line in matrix.lines
        ],
        "faults": [_planted(trial) for trial in matrix.trials if trial.fault is not None],
    }  # fmt: skip


def _healthy(trial: Trial) -> dict[str, Any]:
    return {"gate": trial.gate, "shape": trial.shape, "passed": not trial.amiss, "amiss": trial.amiss}


def _planted(trial: Trial) -> dict[str, Any]:
    assert trial.fault is not None
    return {
        "gate": trial.gate, "shape": trial.shape, "fault": trial.fault.what,
        "turns": sorted(trial.fault.turns), "caught": not trial.amiss, "amiss": trial.amiss,
    }  # fmt: skip


def text(matrix: Matrix) -> str:
    width = max(len(line.check) for line in matrix.lines)
    lines = ["healthy evidence, judged by all gates:"]
    lines += [f"  {_mark(matrix, name)} {name:<14} {shape.told}" for name, shape in SHAPES.items()]
    lines += ["", f"{'gate':<5}{'check':<{width}}  planted  turned"]
    lines += [_row(line, width) for line in matrix.lines]
    return "\n".join([*lines, *_faults(matrix), "", summary(matrix)])


def _mark(matrix: Matrix, shape: str) -> str:
    trials = [trial for trial in matrix.trials if trial.shape == shape and trial.fault is None]
    return "pass" if trials and not any(trial.amiss for trial in trials) else "FAIL"


def _row(line: Line, width: int) -> str:
    told = "" if line.turned == line.planted else "  NOT CAUGHT"
    told += "" if line.enough else f"  fewer than {FAULTS_MIN}"
    told += "" if line.required else "  (advisory)"
    return f"{line.gate:<5}{line.check:<{width}}  {line.planted:>7}  {line.turned:>6}{told}"


def _faults(matrix: Matrix) -> Iterator[str]:
    for trial in matrix.amiss:
        what = f"with {trial.fault.what!r}" if trial.fault else "healthy"
        yield f"gate {trial.gate}, shape {trial.shape}, {what}: {trial.amiss}"


def summary(matrix: Matrix) -> str:
    planted = [trial for trial in matrix.trials if trial.fault is not None]
    caught = sum(not trial.amiss for trial in planted)
    required = [line for line in matrix.lines if line.required]
    return (
        f"selftest: {'PASS' if matrix.passes else 'FAIL'}, {caught} of {len(planted)} faults turned the right "
        f"checks, {len(required)} required checks, {FAULTS_MIN} faults or more for "
        f"{sum(line.enough for line in required)} of them, {matrix.seconds:.0f} s"
    )
