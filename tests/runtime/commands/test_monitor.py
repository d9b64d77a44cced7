"""`finetune monitor` reads the run's own record."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
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
    assert out.startswith("v0 full gone") and out.endswith(f"next: gate diagnose {run.path}\n")


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
    ("values", "line", "blocks"),
    [
        ([], "", ""),
        ([1.0], "_", "▁"),
        ([2.0, 1.0], "#_", "█▁"),
        ([1.0, 1.0, 1.0], "___", "▁▁▁"),
        ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0], "_.-~=*#", "▁▂▃▅▆▇█"),
    ],
)
def test_sparkline(monkeypatch: pytest.MonkeyPatch, values: list[float], line: str, blocks: str) -> None:
    for encoding, drawn in (
        ("cp1252", line),
        ("utf-8", blocks),
        ("cp437", line),
        (None, line),
        ("odd", line),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(monitor.sys, "stdout", SimpleNamespace(encoding=encoding))
            assert monitor.sparkline(values) == drawn
            if encoding in ("cp1252", "utf-8"):
                drawn.encode(encoding)


def test_a_long_sparkline_keeps_the_first_and_the_last() -> None:
    drawn = monitor.sparkline([float(n) for n in range(100, 0, -1)])
    assert (len(drawn), drawn[0], drawn[-1]) == (24, "█", "▁")
    assert list(drawn) == sorted(drawn, reverse=True)


READING: dict[str, Any] = {
    "run": "v2",
    "kind": "full",
    "state": "running",
    "step": 40,
    "planned_steps": 100,
    "eta_s": 75.0,
    "step_s": 1.25,
    "loss": 0.31,
    "loss_ema": 0.25,
    "lr": 1e-4,
    "losses": [1.0, 0.25],
    "probes": [
        {"step": 0, "train_mean": 0.5, "holdout_mean": 0.6},
        {"step": 20, "train_mean": 0.4, "holdout_mean": 0.7},
    ],
    "warning": "",
    "device": "xpu",
    "alloc_gib": 8.0,
    "reserved_gib": 9.5,
    "peak_gib": 9.0,
    "rss_gib": 2.5,
    "capacity_gib": 16.5,
    "heartbeat_at": "2026-01-01T00:00:00.000Z",
    "reason": "",
    "next": "finetune monitor --wait",
}
MEMORY = "xpu alloc 8.00 GiB, reserved 9.50 GiB, peak 9.00 GiB of 16.5 GiB, process 2.50 GiB"


def test_one_line_for_a_log_and_rows_for_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "marks_for", lambda encoding: monitor.SPARKS)
    assert monitor.spoken(READING) == (
        "v2 full running  step 40/100  loss 0.2500 [#_]  lr 1.00e-04  1.25 s/step, ETA 1 min 15 s  "
        f"probe train 0.4000 [#_] held 0.7000 [_#]  {MEMORY}"
    )
    assert monitor.screen(READING).splitlines() == [
        "v2 full running  step 40/100",
        "loss    0.3100, smooth 0.2500  [#_]",
        "train   0.4000, first 0.5000  [#_]",
        "held    0.7000, first 0.6000  [_#]",
        "pace    lr 1.00e-04  1.25 s/step, ETA 1 min 15 s",
        f"memory  {MEMORY}",
    ]


def test_before_the_first_step_there_is_little_to_say() -> None:
    nothing = dict.fromkeys(("eta_s", "step_s", "loss", "loss_ema", "lr", "alloc_gib", "rss_gib"))
    early = {**READING, **nothing, "step": 0, "losses": [], "probes": []}
    assert monitor.spoken(early) == monitor.screen(early) == "v2 full running  step 0/100"


def test_the_warning_and_what_to_do_have_lines_of_their_own() -> None:
    ended = {**READING, "warning": "overfitting: so", "state": "completed", "next": "gate check 07"}
    for say in (monitor.spoken, monitor.screen):
        assert say(ended).splitlines()[-2:] == ["warning: overfitting: so", "next: gate check 07"]


def test_overfitting_is_read_from_the_run(lab: Any, capsys: Any) -> None:
    run = lab.fit()
    for step, held in enumerate((0.1, 0.2, 0.3, 0.4), 7):
        line = {"step": step, "items": [], "train_mean": 0.1 / step, "holdout_mean": held, "at": ""}
        files.append_json_line(run.path / "probe.jsonl", line)
    assert cli.main(["monitor", "--workspace", str(lab.root), "--json"]) == 0
    reading = json.loads(capsys.readouterr().out)
    assert reading["warning"].startswith("overfitting: since step 7 ")
    assert [probe["step"] for probe in reading["probes"]] == [0, 3, 6, 7, 8, 9, 10]


def test_plot_draws_the_run(lab: Any, capsys: Any, tmp_path: Path) -> None:
    lab.fit()
    picture = tmp_path / "a" / "loss.png"
    line = ["monitor", "--workspace", str(lab.root), "--plot", str(picture)]
    assert cli.main(line) == 0
    assert capsys.readouterr().out.strip() == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert cli.main([*line, "--job", "cache"]) == 2


def test_count_readings_then_an_end(lab: Any, capsys: Any) -> None:
    run = lab.fit()
    files.write_json(run.path / "run.json", {**run.document, "state": "running"})
    line = ["monitor", "--workspace", str(lab.root), "--interval", "0.01"]
    for options, lines in (([], 1), (["--count", "3"], 3)):
        assert cli.main([*line, *options]) == 0
        out = capsys.readouterr().out.splitlines()
        assert len(out) == lines and all(text.startswith("v0 full running  step 6/6") for text in out)


def test_a_terminal_is_refreshed_until_the_run_has_ended(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = [READING, {**READING, "step": 41}, {**READING, "step": 42, "state": "completed"}]
    stream = Terminal()
    monkeypatch.setattr(monitor, "newest", lambda workspace: lab.root)
    monkeypatch.setattr(monitor, "read", lambda path: readings.pop(0))
    monkeypatch.setattr("sys.stdout", stream)
    assert cli.main(["monitor", "--workspace", str(lab.root), "--interval", "0"]) == 0
    written = stream.getvalue()
    assert readings == [] and all(f"step {step}/100" in written for step in (40, 41, 42))
    assert "next: finetune monitor" in written


class Terminal(io.StringIO):
    encoding = "utf-8"  # type: ignore[assignment]

    def isatty(self) -> bool:
        return True
