"""`finetune monitor` reads the run's own record."""

import json
from typing import Any

import pytest

from runtime import cli, files
from runtime.commands import monitor


def test_a_finished_run(lab: Any, capsys: Any) -> None:
    run = lab.fit()
    assert cli.main(["monitor", "--workspace", str(lab.root), "--json"]) == 0
    reading = json.loads(capsys.readouterr().out)
    assert (reading["state"], reading["step"], reading["planned_steps"]) == ("completed", 6, 6)
    assert reading["eta_s"] is None and reading["next"] == "gate check 07 --phase full"
    last = files.read_json_lines(run.path / "metrics.jsonl")[-1]
    assert reading["loss_ema"] == last["loss_ema"] and len(reading["losses"]) == 6


def test_a_run_whose_process_vanished_is_gone(lab: Any, capsys: Any) -> None:
    run = lab.fit()
    document = {**run.document, "state": "running", "pid": 2**22 + 7}
    files.write_json(run.path / "run.json", document)
    assert cli.main(["monitor", "--workspace", str(lab.root)]) == 0
    out = capsys.readouterr().out
    assert out.startswith("v0 full gone") and "next: finetune fit --resume latest" in out


def test_wait_gives_up_after_its_timeout(lab: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = lab.fit()
    files.write_json(run.path / "run.json", {**run.document, "state": "running"})
    line = ["monitor", "--workspace", str(lab.root), "--wait", "--timeout", "0.2", "--interval", "0.05"]
    assert cli.main(line) == 0
    assert "v0 full running  step 6/6" in capsys.readouterr().out


def test_no_run_says_what_to_do(lab: Any, capsys: Any) -> None:
    lab.configure()
    assert cli.main(["monitor", "--workspace", str(lab.root)]) == 1
    assert "next: finetune fit --smoke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([1.0], "_"),
        ([2.0, 1.0], "#_"),
        ([1.0, 1.0, 1.0], "___"),
        ([float(n) for n in range(100, 0, -1)], "###***===~~~~---....____"),
    ],
)
def test_sparkline(values: list[float], line: str) -> None:
    drawn = monitor.sparkline(values)
    assert len(drawn) == min(len(values), 24)
    if len(values) <= 3:
        assert drawn == line
    else:
        falling = sorted(drawn, key=monitor.SPARKS.index, reverse=True)
        assert drawn[0] == "#" and drawn[-1] == "_" and list(drawn) == falling
