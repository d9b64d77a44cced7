"""benchmarks/memory_encoders.py on the CPU, where tensors are counted: the embedded base's encoders beside the plan."""

import json
from typing import Any

import memory_encoders
import memory_plan
import pytest

from runtime import device as devices
from runtime.demo.series import BASE

SMALL, LARGE = memory_encoders.SMALL_SIDES


@pytest.fixture(scope="module")
def lines() -> dict[str, dict[str, Any]]:
    where = devices.pick("cpu")
    return {line["case"]: line for line in memory_encoders.encoders(BASE, where)}


def test_every_case_has_a_line(lines: dict[str, dict[str, Any]]) -> None:
    pictures = {
        f"vae {mode}, {way} {side}"
        for mode in ("exact", "folded", "tiled")
        for way in ("encode", "decode")
        for side in (SMALL, LARGE)
    }
    assert pictures < set(lines) and len(lines) == len(pictures) + len(memory_encoders.SMALL_ASKED)
    for line in lines.values():
        assert line["ratio"] == pytest.approx(line["plan_gib"] / line["over_resident_gib"], rel=0.01)


@pytest.mark.parametrize("way", ["encode", "decode"])
@pytest.mark.parametrize("side", [SMALL, LARGE])
def test_the_plan_of_a_vae(side: int, way: str, lines: dict[str, dict[str, Any]]) -> None:
    """Folded, a convolution needs no room of its own, so a count of tensors is the whole; else it is a part."""
    exact, folded, tiled = (lines[f"vae {mode}, {way} {side}"] for mode in ("exact", "folded", "tiled"))
    assert folded["ratio"] == pytest.approx(1.0, abs=0.03)
    assert 1.4 < exact["ratio"] < 1.8
    assert tiled["ratio"] > 1.4  # of more pixels than fit into the picture, where that is small
    assert (tiled["over_resident_gib"] < 0.95 * exact["over_resident_gib"]) == (side == LARGE)


def test_peaks_grow_as_the_plan_says(lines: dict[str, dict[str, Any]]) -> None:
    for mode in ("exact", "folded"):
        one, other = (lines[f"vae {mode}, encode {side}"]["over_resident_gib"] for side in (SMALL, LARGE))
        assert other / one == pytest.approx((LARGE / SMALL) ** 2, rel=0.03)
    one, longer, two = (line for case, line in lines.items() if case.startswith("text encoder"))
    assert two["over_resident_gib"] == pytest.approx(2 * one["over_resident_gib"], rel=0.02)
    assert two["ratio"] == pytest.approx(one["ratio"], rel=0.02)
    assert all(line["ratio"] > 1.0 for line in (one, longer, two))


def test_the_plans_script_tells_them(
    call: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def encoders(*asked: Any) -> list[dict[str, Any]]:
        given.append(asked)
        return [{"case": "one"}]

    monkeypatch.setattr(memory_plan, "encoders", encoders)
    call(memory_plan.main, "--tiny", "--encoders", "--only", "no such case")
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [{"case": "one"}]
    ((root, where),) = given
    assert root == BASE and not where.is_accelerator
