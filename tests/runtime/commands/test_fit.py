"""`finetune fit`: exit status, what it prints, its limits, and a fit in the background."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime import cli
from runtime.commands import preflight
from runtime.planning import plan as planning
from runtime.training import record


def finetune(lab: Any, *line: str) -> int:
    return cli.main([*line, "--workspace", str(lab.root)])


def started(lab: Any, *line: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "runtime", "fit", *line, "--workspace", str(lab.root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def lines_of(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def until(what: Any, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.01)


def test_smoke_stops_after_five_steps_and_leaves_the_config_alone(lab: Any, capsys: Any) -> None:
    lab.configure({"train.max_train_steps": 40, "train.checkpointing_steps": 20})
    before = lab.workspace.config_path.read_bytes()
    assert finetune(lab, "fit", "--smoke") == 0
    assert lab.workspace.config_path.read_bytes() == before
    (path, document), *_ = record.runs(lab.project)
    assert (document["kind"], document["done_steps"], lines_of(path)) == ("smoke", 5, 5)
    out, err = capsys.readouterr()
    assert out.startswith("outputs/edit-lora/v0: completed")
    assert "next: gate check 07 --phase smoke" in err and "trains     LoRA rank 4" in err


def test_one_screen_before_the_first_step(lab: Any, capsys: Any) -> None:
    lab.configure(
        {
            "train.max_train_steps": 6,
            "train.checkpointing_steps": 2,
            "train.checkpoints_total_limit": 2,
            "train.gradient_accumulation_steps": 2,
            "model.lora.use_rslora": True,
        }
    )
    assert finetune(lab, "fit") == 0
    rows = dict(line.split(None, 1) for line in capsys.readouterr().err.splitlines()[:9])
    assert list(rows) == ["run", "trains", "base", "device", "memory", "data", "length", "disk", "sleep"]
    (_, document), *_ = record.runs(lab.project)
    parameters = document["trainable"]["parameters"]
    adapter = parameters * 4 / 2**20
    assert rows["run"] == "outputs/edit-lora/v0 (full), from step 0"
    # Two blocks with q, k, v and out of the picture's stream.
    assert rows["trains"] == f"LoRA (rslora) rank 4 on 8 linears, {parameters:,} parameters, scale 4"
    assert rows["device"].startswith("cpu, ") and rows["device"].endswith("compute fp32, adapter fp32")
    assert "GiB planned" in rows["memory"] and "GiB may be filled" in rows["memory"]
    assert rows["data"] == (
        "8 training, 0 regularisation and 3 held-out samples, 4 a step, 4 micro-batches an epoch"
    )
    assert rows["length"] == "6 steps, 3 epochs; checkpoints at 2, 4, 6"
    assert rows["disk"].endswith(
        f"checkpoints 2 x {adapter:.1f} MiB, the resumable one {adapter * 4:.1f} MiB"
    )
    assert "held off" in rows["sleep"]


def test_the_screen_ends_with_what_does_nothing_here(
    lab: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = {"attention-backends": {"facts": {"math": True, "flash_attention": False}}}
    monkeypatch.setattr(planning, "probed", lambda *given: facts)
    lab.configure({"train.max_train_steps": 1, "train.gradient_checkpointing": "selective"})
    assert finetune(lab, "fit") == 0
    row = capsys.readouterr().err.splitlines()[9]
    assert row.startswith(
        "note       train.gradient_checkpointing: selective keeps no more than true: step 05"
    )


def test_the_disk_forecast_is_about_what_is_written(lab: Any) -> None:
    loaded = lab.configure({"train.max_train_steps": 6, "train.checkpointing_steps": 2})
    expected = preflight.forecast(lab.workspace, loaded, smoke=False)
    assert expected.kept == 3
    run = lab.fit({"train.max_train_steps": 6, "train.checkpointing_steps": 2}).path
    plain, last = (
        [sum(item.stat().st_size for item in folder.iterdir()) for folder in sorted(run.glob(pattern))]
        for pattern in ("checkpoint-[0-9]*", "checkpoint-last-*")
    )
    spare = 60_000  # names and metadata, which a real adapter's 100 MiB don't notice
    assert all(0 <= size - expected.adapter_bytes < spare for size in plain) and len(plain) == 3
    assert all(0 <= size - expected.last_bytes < spare for size in last) and len(last) == 1


@pytest.mark.parametrize(
    ("free_gib", "peak_factor", "said"),
    [
        (0.9, 1.0, "the checkpoints need 0.00 GiB and 1 GiB to spare, 0.90 GiB are free"),
        (9.0, 1e6, "the fit would peak at "),
        (9.0, 1.0, ""),
    ],
)
def test_what_cannot_work_stops_before_anything_is_loaded(
    lab: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, free_gib: float, peak_factor: float, said: str
) -> None:
    lab.configure({"train.max_train_steps": 1, "train.checkpointing_steps": 1})
    usage = SimpleNamespace(free=free_gib * 2**30)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage)
    real = preflight.Forecast.peak_gib.fget
    monkeypatch.setattr(preflight.Forecast, "peak_gib", property(lambda found: real(found) * peak_factor))
    assert finetune(lab, "fit") == (1 if said else 0)
    assert said in capsys.readouterr().err
    assert bool(record.versions(lab.project)) == (not said), "a refused launch opens no run"


def test_a_smoke_fit_is_forecast_with_its_own_length(lab: Any) -> None:
    loaded = lab.configure({"train.max_train_steps": 400, "train.checkpointing_steps": 2})
    assert preflight.forecast(lab.workspace, loaded, smoke=False).kept == 200
    expected = preflight.forecast(lab.workspace, loaded, smoke=True)
    assert (expected.kept, expected.plan.steps.planned) == (1, 5)


def test_the_run_is_drawn_at_its_end(lab: Any, capsys: Any) -> None:
    lab.configure()
    assert finetune(lab, "fit") == 0
    assert (lab.project / "v0" / "probe.png").read_bytes().startswith(b"\x89PNG")
    assert "losses     v0/probe.png" in capsys.readouterr().err


def test_overfitting_is_said_at_the_end(lab: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.configure({"train.max_train_steps": 5, "train.checkpointing_steps": 1})

    def measure(probe: Any, predict: Any, step: int) -> dict[str, Any]:
        held = 0.5 if step == 1 else 0.6 + step / 10
        return {"step": step, "items": [], "train_mean": 1 / (1 + step), "holdout_mean": held}

    monkeypatch.setattr("runtime.training.probe.Probe.measure", measure)
    assert finetune(lab, "fit") == 0
    (line,) = [text for text in capsys.readouterr().err.splitlines() if "overfitting" in text]
    assert line.startswith("warning: overfitting: since step 1 ")
    assert line.endswith("the best checkpoint is v0/checkpoint-0-1")


def test_a_picture_that_cannot_be_written_is_only_a_warning(
    lab: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.configure({"train.max_train_steps": 1, "train.checkpointing_steps": 1})

    def full(*given: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runtime.training.plot.write", full)
    assert finetune(lab, "fit") == 0
    assert "warning: no probe.png: [Errno 28]" in capsys.readouterr().err


def test_json_is_the_run_record(lab: Any, capsys: Any, conforms: Any) -> None:
    lab.configure()
    assert finetune(lab, "fit", "--json") == 0
    conforms(json.loads(capsys.readouterr().out), "run")


def test_smoke_and_resume_exclude_each_other(lab: Any, capsys: Any) -> None:
    lab.configure()
    assert finetune(lab, "fit", "--smoke", "--resume", "latest") == 2
    assert "--smoke starts anew" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("resume", "said"),
    [("latest", "nothing to resume"), ("outputs/nowhere", "no resumable checkpoint at")],
)
def test_resume_with_nothing_there_says_so(lab: Any, capsys: Any, resume: str, said: str) -> None:
    lab.configure()
    assert finetune(lab, "fit", "--resume", resume) == 1
    assert said in capsys.readouterr().err
    assert not record.versions(lab.project), "a refused launch opens no run"


def test_a_missing_cache_is_named_with_its_command(lab: Any, capsys: Any) -> None:
    lab.configure({"cache.cache_dir": "other"})
    assert finetune(lab, "fit") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "next: finetune cache"


@pytest.mark.slow
def test_ctrl_c_leaves_a_resumable_checkpoint(lab: Any) -> None:
    lab.configure({"train.max_train_steps": 4000, "train.checkpointing_steps": 4000})
    child = started(lab)
    until(lambda: lines_of(lab.project / "v0") >= 3)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    document = json.loads((lab.project / "v0" / "run.json").read_text(encoding="utf-8"))
    assert child.returncode == 130, out
    assert (document["state"], document["reason"][:6]) == ("interrupted", "SIGINT")
    assert "next: finetune fit --resume latest" in out
    (last,) = (lab.project / "v0").glob("checkpoint-last-*-last")
    state = json.loads((last / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["step"] == document["done_steps"] == lines_of(lab.project / "v0")


@pytest.mark.slow
def test_a_detached_fit_outlives_the_command_and_can_be_waited_for(lab: Any, capsys: Any) -> None:
    lab.configure({"train.max_train_steps": 30, "train.checkpointing_steps": 30})
    assert finetune(lab, "fit", "--detach", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["run"] == "outputs/edit-lora/v0" and told["pid"] != os.getpid()
    assert finetune(lab, "monitor", "--wait", "--timeout", "60", "--interval", "0.1", "--json") == 0
    reading = json.loads(capsys.readouterr().out)
    assert (reading["state"], reading["step"]) == ("completed", 30)


def test_a_detached_fit_that_dies_early_tells_why(lab: Any, capsys: Any) -> None:
    lab.configure({"cache.cache_dir": "other"})
    assert finetune(lab, "fit", "--detach") == 1
    assert "no cache in" in capsys.readouterr().err
