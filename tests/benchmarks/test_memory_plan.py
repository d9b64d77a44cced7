"""The memory plan's benchmark in small: a case on the CPU, where tensors are counted; and the table of machines."""

import json
from typing import Any

import pytest

pytest.importorskip("torch")


def test_a_step_is_measured_beside_its_plan(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import memory_plan

    call(memory_plan.main, "--tiny", "--table", "--only", "nf4", "cached", "rank 8")
    out = capsys.readouterr().out.splitlines()
    lines = [json.loads(line) for line in out if line.startswith("{")]
    assert len(lines) == sum(line.startswith("| nf4") for line in out) >= 1
    for line in lines:
        assert line["ratio"] == pytest.approx(1.0, abs=0.1), line["case"]
        assert line["plan_gib"] == pytest.approx(line["ratio"] * line["peak_gib"], rel=0.02)


def test_every_machine_has_an_answer(call: Any, capsys: pytest.CaptureFixture[str]) -> None:
    import what_fits

    call(what_fits.main, "--json", "--machines", "pc16-raised", "pc16", "card24")
    answers = {answer["machine"]: answer for answer in json.loads(capsys.readouterr().out)}
    assert all(answer["fits"] for answer in answers.values())
    raised = answers["pc16-raised"]
    assert raised["changes"] == {"model.quantize_text_encoder": "nf4"}
    fit = raised["plan"]["phases"]["fit"]
    assert fit["peak_gib"] == pytest.approx(8.15, abs=0.1), "384x672 with one control"
    assert fit["peak_gib"] + fit["reserve_gib"] + fit["host_peak_gib"] < 12.5
    assert answers["pc16"]["plan"]["choices"]["train.streamed_blocks"]["value"] > 0
