"""`finetune fit`: exit status, what it prints, its limits, and a fit in the background."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from runtime import cli
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
