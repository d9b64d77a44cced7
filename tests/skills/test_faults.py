"""Every row of the fault matrix turns exactly its checks, and every required check has three rows or more."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gates import registry
from gates.selftest.faults import FAULTS
from gates.selftest.matrix import FAULTS_MIN, judged
from gates.selftest.shapes import SHAPES
from gates.selftest.snapshot import Snapshot

ROWS = [(gate, fault) for gate, rows in FAULTS.items() for fault in rows]


@pytest.fixture(scope="session")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """shape(name) -> the healthy workspace and what restores it, made when it is first asked for."""
    made: dict[str, tuple[Any, Snapshot]] = {}

    def get(name: str) -> tuple[Any, Snapshot]:
        if name not in made:
            root: Path = tmp_path_factory.mktemp("shapes") / name
            made[name] = (SHAPES[name].make(root), Snapshot(root))
        return made[name]

    return get


@pytest.mark.parametrize(("gate", "fault"), ROWS, ids=[f"{gate}-{f.shape}-{f.what}" for gate, f in ROWS])
def test_a_fault_turns_its_checks_and_no_other(gate: str, fault: Any, shape: Any, assert_turned: Any) -> None:
    made, snapshot = shape(fault.shape)
    try:
        fault.spoil(made)
        assert_turned(judged(made, gate), fail=set(fault.fails), error=set(fault.errors))
    finally:
        snapshot.restore()


@pytest.mark.parametrize("gate", registry.numbers())
@pytest.mark.parametrize("name", SHAPES)
def test_healthy_evidence_passes(name: str, gate: str, shape: Any) -> None:
    made, _ = shape(name)
    verdict = judged(made, gate)
    assert verdict.passes, [(c.id, c.message) for c in verdict.checks if c.status in ("fail", "error")]


@pytest.mark.parametrize("gate", registry.numbers())
def test_every_required_check_has_three_faults_or_more(gate: str) -> None:
    planted = Counter(check for fault in FAULTS[gate] for check in fault.turns)
    wanted = {f"{s.phase}/{s.id}" if s.phase else s.id for s in registry.load(gate).specs if s.required}
    assert {check for check in wanted if planted[check] < FAULTS_MIN} == set()


def test_no_row_is_there_twice() -> None:
    names = Counter((gate, fault.shape, fault.what) for gate, fault in ROWS)
    assert [name for name, times in names.items() if times > 1] == []
