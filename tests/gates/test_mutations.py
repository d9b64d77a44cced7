"""Random edits of any record: none breaks a gate, and none elsewhere hides a planted fault."""

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gates import registry
from gates.selftest.editing import Made
from gates.selftest.faults import FAULTS
from gates.selftest.matrix import judged
from gates.selftest.shapes import SHAPES
from gates.selftest.snapshot import Snapshot
from gates.verdict import validate

EXAMPLES = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,  # CI meets the same edits every time; a deeper search is one number away
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
ODD: list[Any] = [
    None, True, False, 0, -1, 1, 1.5, 1e308, -1e308, 10**30, 10**400, float("nan"), float("inf"), "", "x", "0" * 64,
    "\ud800", "../..", "a\0b", "external:no", "auto", "nf4", "passed", "completed", [], {}, [None], {"a": 1}, [[]],
]  # fmt: skip
RECORDS = (
    ".gates/target.json", ".gates/evidence/01-host.json", ".gates/evidence/02-dataset.json",
    ".gates/evidence/03-environment.json", ".gates/evidence/04-plan.json", ".gates/evidence/05-adaptation.json",
    ".gates/evidence/06-quantize.json", ".gates/evidence/07-cache-roundtrip.json",
    ".gates/evidence/08-validation.json", "cache/manifest.json", "cache/*/entry.json", "*/run.json",
    "*/metrics.jsonl", "*/probe.jsonl", "*/saves.jsonl", "models/nf4/transformer/config.json",
)  # fmt: skip


@pytest.fixture(scope="module")
def shape(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Made, Snapshot]]:
    there: dict[str, tuple[Made, Snapshot]] = {}

    def get(name: str) -> tuple[Made, Snapshot]:
        if name not in there:
            made = SHAPES[name].make(tmp_path_factory.mktemp("mutations") / name)
            there[name] = (made, Snapshot(made.root))
        return there[name]

    return get


# ---- edits


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in children:
        yield from _paths(child, (*path, key))


def _at(document: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        document = document[key]
    return document


def _edit(document: Any, draw: Callable[[Any], Any]) -> str:
    """Drop, rename, replace or swap the value at some path; returns what was done."""
    paths = list(_paths(document))
    if not paths:
        return "nothing to edit"
    path, other = draw(st.sampled_from(paths)), draw(st.sampled_from(paths))
    place, key = _at(document, path[:-1]), path[-1]
    how = draw(st.sampled_from(["drop", "rename", "copy", "odd", "odd"]))
    if how == "drop":
        del place[key]
    elif how == "rename" and isinstance(place, dict):
        place["another"] = place.pop(key)
    elif how == "copy":
        place[key] = copy.deepcopy(_at(document, other))
        return f"{path} is a copy of {other}"
    else:
        place[key] = draw(st.sampled_from(ODD))
        return f"{path} = {place[key]!r}"
    return f"{how} {path}"


def _read(path: Path) -> Any:
    if path.suffix == ".json":
        return json.loads(path.read_text(encoding="utf-8"))
    *lines, _torn = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]


def _write(path: Path, document: Any) -> None:
    lines = document if path.suffix == ".jsonl" else [document]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8", newline="\n")


def _records(made: Made) -> list[Path]:
    """One file for each kind of record, of runs every one."""
    found: list[Path] = []
    for name in RECORDS:
        base, pattern = (made.project, name) if name.startswith("*/") else (made.root, name)
        found += sorted(base.glob(pattern))[: 3 if name.startswith("*/") else 1]
    return found


def _mutate(path: Path, draw: Callable[[Any], Any]) -> str:
    document = _read(path)
    told = _edit(document, draw)
    _write(path, document)
    return f"{path.name}: {told}"


# ---- properties


@pytest.mark.parametrize("name", ["cpu", "xpu", "resumed", "nf4-skipped"])
def test_no_edit_breaks_a_gate(name: str, shape: Any) -> None:
    """Every gate gives a verdict that can be written, with an exit status, and no check of it raised."""
    made, snapshot = shape(name)
    records = _records(made)

    @EXAMPLES
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        try:
            told = _mutate(data.draw(st.sampled_from(records)), data.draw)
            for gate in registry.numbers():
                verdict = judged(made, gate)
                document = json.loads(json.dumps(verdict.to_json(), allow_nan=False, ensure_ascii=False))
                validate(document)
                assert verdict.exit_code in (0, 1, 3), told
                assert verdict.passes == (verdict.exit_code == 0), told
                broken = [c.message for c in verdict.checks if "Error: " in c.message]
                assert not broken, (told, gate, broken)
            assert not (made.root / ".gates/error.log").exists(), told
        finally:
            snapshot.restore()

    holds()


ROWS = [
    (gate, fault)
    for gate, rows in FAULTS.items()
    for fault in rows
    if any(
        spec.required and spec.id == c.rpartition("/")[2]
        for spec in registry.load(gate).specs
        for c in fault.turns
    )
]


def test_no_edit_elsewhere_hides_a_planted_fault(shape: Any) -> None:
    """A FAIL stays one whatever is edited in the records that the fault did not touch."""

    @settings(EXAMPLES, max_examples=150)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        gate, fault = data.draw(st.sampled_from(ROWS))
        made, snapshot = shape(fault.shape)
        try:
            before = {path: path.read_bytes() for path in _records(made)}
            fault.spoil(made)
            untouched = [p for p, text in before.items() if p.is_file() and p.read_bytes() == text]
            told = _mutate(data.draw(st.sampled_from(untouched)), data.draw)
            verdict = judged(made, gate)
            assert not verdict.passes, (gate, fault.shape, fault.what, told)
        finally:
            snapshot.restore()

    holds()


def test_the_edits_themselves_do_turn_gates(shape: Any) -> None:
    """The property above would hold of edits that change nothing."""
    made, snapshot = shape("cpu")
    turned: list[bool] = []

    @settings(EXAMPLES, max_examples=60)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        try:
            _mutate(made.evidence("03-environment"), data.draw)
            turned.append(not judged(made, "03").passes)
        finally:
            snapshot.restore()

    holds()
    assert sum(turned) > len(turned) / 3
