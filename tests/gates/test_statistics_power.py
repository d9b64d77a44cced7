"""benchmarks/statistics_power.py in small, with a seed: no rate of wrong answers is far from what is stated."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from gates import registry

RUNS = 120
PLACE = Path(__file__).resolve().parents[2] / "benchmarks" / "statistics_power.py"


@pytest.fixture(scope="module")
def power() -> ModuleType:
    spec = importlib.util.spec_from_file_location("statistics_power", PLACE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["statistics_power"] = module
    spec.loader.exec_module(module)
    return module


def _rate(fell: list[bool]) -> float:
    return sum(fell) / len(fell)


# Share that pass: (at least, at most). 120 runs of a rate of 1 % give 5 or more once in 130.
CURVES: dict[tuple[int, str], tuple[float, float]] = {
    (300, "flat"): (0.0, 0.04),
    (300, "rising 10 %"): (0.0, 0.02),
    (300, "falling 30 % to the middle, and back"): (0.0, 0.04),
    (300, "settling 75% lower"): (0.97, 1.0),
    (1000, "flat"): (0.0, 0.04),
    (1000, "rising 50 %"): (0.0, 0.0),
    (1000, "rising 30 % to the middle, and back"): (0.0, 0.02),
    (1000, "falling 30 % till 0.7 of it, and back"): (0.0, 0.08),
    (1000, "settling 20% lower"): (0.05, 0.5),
    (1000, "settling 50% lower"): (0.97, 1.0),
}


@pytest.mark.parametrize("heavy", [False, True])
@pytest.mark.parametrize("case", CURVES)
def test_curve(case: tuple[int, str], heavy: bool, power: Any) -> None:
    steps, name = case
    draw = np.random.default_rng(1)
    shape, _ = power.CURVES[name]
    rate = _rate([power.trend(power.curve(draw, steps, shape, heavy=heavy)).fell for _ in range(RUNS)])
    least, most = CURVES[case]
    assert least <= rate <= most


def test_a_lucky_last_step(power: Any) -> None:
    draw = np.random.default_rng(1)
    curves = [power.lucky(power.curve(draw, 300, power.line(0.0))) for _ in range(RUNS)]
    assert _rate([power.trend(curve).fell for curve in curves]) <= 0.04


def test_what_is_told_as_detectable_is_detected(power: Any) -> None:
    """A fall of the size that a flat curve's noise lets pass 99 times in 100."""
    draw = np.random.default_rng(2)
    flat = [power.trend(power.curve(draw, 600, power.line(0.0))).detectable for _ in range(RUNS)]
    typical = float(np.median(flat))
    assert 0.4 < typical < 0.6
    fell = [power.trend(power.curve(draw, 600, power.settling(typical))).fell for _ in range(RUNS)]
    assert _rate(fell) > 0.97


@pytest.mark.parametrize("row", range(3))
def test_probe(row: int, power: Any) -> None:
    decline, spread, least, most = [(0.0, 0.1, 0.0, 0.03), (0.05, 0.02, 0.98, 1.0), (-0.05, 0.05, 0.0, 0.0)][
        row
    ]
    draw = np.random.default_rng(3)
    for alike in (0.0, 0.3, 0.6):
        found = [power.paired(*power.probe(draw, decline, spread, alike)) for _ in range(300)]
        rate = _rate([item.relative_drop >= power.DROP_MIN and item.t > item.limit for item in found])
        assert least <= rate <= most, alike


def test_memory(power: Any) -> None:
    wrong = [
        row for row in power.memory_rows(np.random.default_rng(4), 40, (200, 400)) if row.wanted is not None
    ]
    assert len(wrong) == 28
    for row in wrong:
        assert abs(row.passed - row.wanted) <= 0.05, row


def test_the_thresholds_are_those_of_the_gate(power: Any) -> None:
    training = registry.load_module(f"{registry.SERIES}07-training")
    assert (power.DROP_MIN, power.RSS_MAX / 1024) == (training.LOSS_DROP_MIN, training.RSS_GROWTH_MAX)


def test_the_table_is_printed(power: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["statistics_power.py", "--runs", "2", "--part", "probe"])
    power.main()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("(2 runs each, seed 0)") and len(lines) == 1 + 3 * len(power.PROBES)
