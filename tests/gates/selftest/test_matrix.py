"""The matrix itself: it tells a fault that is not caught, one that turns too much, and a sick shape."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gates.cli import main
from gates.selftest import faults, matrix, report, shapes
from gates.selftest.editing import Made
from gates.selftest.faults.row import Fault, fault
from gates.selftest.healthy import healthy
from gates.selftest.shapes import SHAPES, Shape

HOST = "01-host"


def _host(**values: Any) -> Callable[[Any], object]:
    def change(document: dict[str, Any]) -> None:
        document["data"].update(values)

    return lambda made: made.edit(made.evidence(HOST), change)


def _no_disk(made: Made) -> None:
    _host(disk=[])(made)


# a row, and what the matrix says of it ("" where it is right)
ROWS: list[tuple[Fault, str]] = [
    (fault("no disk", {"disk-free"}, _no_disk), ""),
    (fault("nothing at all", {"disk-free"}, lambda made: None), "no fail of disk-free"),
    (fault("told as an error", set(), _no_disk, errors={"disk-free"}), "fail of disk-free, too"),
    (fault("two checks", {"disk-free", "ram-tier"}, _no_disk), "no fail of ram-tier"),
    (
        fault("one of two", {"disk-free"}, lambda made: (_no_disk(made), _host(ram_gib=0.001)(made))),
        "fail of ram-tier, too",
    ),
]


@pytest.mark.parametrize(("row", "amiss"), ROWS, ids=[row.what for row, _ in ROWS])
def test_a_row_is_right_only_if_exactly_its_checks_turn(row: Fault, amiss: str, tmp_path: Path) -> None:
    found = matrix.run({"cpu": SHAPES["cpu"]}, {"01": (row,)}, tmp_path)
    (trial,) = (trial for trial in found.trials if trial.fault is row)
    assert trial.amiss == amiss
    assert len(found.trials) == 9 and not any(t.amiss for t in found.trials if t.fault is None)
    told = {line.check: (line.planted, line.turned) for line in found.lines}
    assert told["disk-free"] == (1, int(not amiss))


def test_what_a_fault_spoilt_is_whole_for_the_next(tmp_path: Path) -> None:
    rows = tuple(fault(f"{n}", {"disk-free"}, _no_disk) for n in range(3))
    found = matrix.run({"cpu": SHAPES["cpu"]}, {"01": rows}, tmp_path)
    assert not found.amiss
    assert {line.check for line in found.sparse} >= {"ram-tier"}
    assert "disk-free" not in {line.check for line in found.sparse if line.gate == "01"}
    assert not found.passes  # for the other checks have fewer than three


def _sick(root: Path) -> Made:
    made = healthy(root)
    _no_disk(made)
    return made


def test_healthy_evidence_that_does_not_pass_fails_the_selftest(tmp_path: Path) -> None:
    found = matrix.run({"sick": Shape(told="x", make=_sick)}, {}, tmp_path)
    assert [(trial.gate, trial.fault) for trial in found.amiss] == [("01", None)]
    assert not found.passes


def test_no_trial_is_no_pass() -> None:
    assert not matrix.Matrix(trials=(), lines=(), seconds=0.0).passes


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """few(row, ...) -> `gate selftest` knows one shape and these rows for gate 01, each check needs none."""

    def keep(*rows: Fault) -> None:
        for where in (shapes.SHAPES, faults.FAULTS):
            for name in list(where):  # type: ignore[call-overload]
                monkeypatch.delitem(where, name)  # type: ignore[arg-type]
        monkeypatch.setitem(shapes.SHAPES, "cpu", Shape(told="one", make=healthy))
        monkeypatch.setitem(faults.FAULTS, "01", rows)
        monkeypatch.setattr(matrix, "FAULTS_MIN", 0)

    return keep


@pytest.mark.parametrize(("row", "amiss"), ROWS[:2], ids=["caught", "missed"])
def test_the_command(row: Fault, amiss: str, few: Any, capsys: pytest.CaptureFixture[str]) -> None:
    few(row)
    status = 1 if amiss else 0
    assert main(["selftest"]) == status
    text = capsys.readouterr().out
    assert ("NOT CAUGHT" in text) == (f"with '{row.what}': {amiss}" in text) == bool(amiss)
    assert text.splitlines()[-1].startswith(
        f"selftest: {'FAIL' if amiss else 'PASS'}, {1 - status} of 1 faults"
    )
    assert main(["selftest", "--json"]) == status
    document = json.loads(capsys.readouterr().out)
    assert document["passes"] == (not amiss)
    (told,) = document["faults"]
    assert (told["fault"], told["caught"], told["amiss"]) == (row.what, not amiss, amiss)
    assert {item["gate"] for item in document["healthy"]} == {f"0{n}" for n in range(1, 9)}


def test_the_output_says_what_is_real_and_what_is_synthetic(tmp_path: Path) -> None:
    for name, shape in SHAPES.items():
        assert shape.told.endswith("synthetic") != name.startswith("recorded"), name
    text = report.text(matrix.run({"cpu": SHAPES["cpu"]}, {}, tmp_path))
    assert "a real run on a CPU, recorded" in text and "the base's weights are left out" in text
