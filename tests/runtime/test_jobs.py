"""Long commands in the background: started apart, recorded, waited for."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest

from runtime import cli, files, jobs
from runtime.commands import detach
from runtime.errors import UserError


def finetune(lab: Any, *line: str) -> int:
    return cli.main([*line, "--workspace", str(lab.root)])


def waited(lab: Any, capsys: Any, name: str) -> dict[str, Any]:
    capsys.readouterr()
    line = ("monitor", "--job", name, "--wait", "--timeout", "60", "--interval", "0.1", "--json")
    assert finetune(lab, *line) == 0
    reading: dict[str, Any] = json.loads(capsys.readouterr().out)
    return reading


@pytest.mark.parametrize(
    ("args", "kept"),
    [
        (["--detach"], []),
        (["--smoke", "--detach", "--json"], ["--smoke"]),
        (["--workspace", "a b", "--resume", "latest", "--detach"], ["--resume", "latest"]),
        (["--detach", "--workspace=x", "--resume", "--json"], ["--resume"]),
    ],
)
def test_what_is_handed_on(args: list[str], kept: list[str]) -> None:
    assert detach._handed_on(args) == kept


def test_a_cache_in_the_background(lab: Any, capsys: Any) -> None:
    lab.configure({"data.processor.target_size": [32, 32]})
    assert finetune(lab, "cache", "--detach", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["job"] == "cache" and told["pid"] != os.getpid()
    reading = waited(lab, capsys, "cache")
    assert (reading["state"], reading["exit"], reading["next"]) == ("completed", 0, "gate next")
    assert reading["command"] == "finetune cache"
    assert "built" in (lab.root / reading["log"]).read_text(encoding="utf-8")


def test_a_start_that_fails_at_once_is_told_at_once(lab: Any, capsys: Any) -> None:
    lab.workspace.config_path.write_text("model: [", encoding="utf-8")
    assert finetune(lab, "cache", "--detach") == 1
    out, err = capsys.readouterr()
    assert out == "" and "config.yaml" in err
    assert not jobs.path_of(lab.workspace, "cache").exists()


def test_one_job_of_a_name_at_a_time(lab: Any) -> None:
    jobs.start(lab.workspace, "monitor", ["--count", "0", "--interval", "0.05", "--run", "nowhere"]).wait()
    record = jobs.path_of(lab.workspace, "monitor")
    document = files.read_json(record)
    assert document["exit"] == 1 and jobs.read(lab.workspace, "monitor")["state"] == "failed"
    files.write_json(record, {**document, "exit": None, "pid": os.getpid()})
    with pytest.raises(UserError, match="still running in the background"):
        jobs.start(lab.workspace, "monitor", [])


def test_a_job_that_was_killed_is_gone(lab: Any, capsys: Any) -> None:
    lab.configure({"train.max_train_steps": 4000, "train.checkpointing_steps": 4000})
    child = jobs.start(lab.workspace, "fit", [])
    deadline = time.monotonic() + 60
    while jobs.read(lab.workspace, "fit")["pid"] != child.pid:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    child.send_signal(signal.SIGKILL)
    child.wait()
    reading = waited(lab, capsys, "fit")
    assert (reading["state"], reading["next"]) == (
        "gone",
        f"gate diagnose {lab.root / '.gates/jobs/fit.log'}",
    )


def test_a_job_that_failed_says_itself_what_to_do(lab: Any, capsys: Any) -> None:
    """What it foresaw it names; only a death without a word is left to `gate diagnose`."""
    lab.configure({"cache.cache_dir": "empty"})
    jobs.start(lab.workspace, "fit", []).wait()
    reading = waited(lab, capsys, "fit")
    assert (reading["state"], reading["next"]) == ("failed", "finetune cache")
    assert finetune(lab, "fit", "--detach") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "next: finetune cache"
    (lab.root / reading["log"]).write_text("Fatal Python error: Aborted\n", encoding="utf-8")
    assert waited(lab, capsys, "fit")["next"] == f"gate diagnose {lab.root / '.gates/jobs/fit.log'}"


@pytest.mark.parametrize(
    ("lines", "said"), [([], None), (["next: a b"], "a b"), (["next: a", "x"], None), (["x", "next: b"], "b")]
)
def test_what_a_command_said_itself(lines: list[str], said: str | None) -> None:
    assert jobs.remedy(lines) == said


def test_no_such_job(lab: Any, capsys: Any) -> None:
    assert finetune(lab, "monitor", "--job", "cache") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "next: finetune cache --detach"


def test_a_process_that_died_before_it_was_one_does_not_live_for_ever(lab: Any) -> None:
    jobs.start(lab.workspace, "monitor", ["--help"]).wait()
    record = jobs.path_of(lab.workspace, "monitor")
    stillborn = {**files.read_json(record), "pid": 0, "exit": None}
    files.write_json(record, {**stillborn, "started_at": files.utc_now()})
    assert jobs.read(lab.workspace, "monitor")["state"] == "running"
    files.write_json(record, {**stillborn, "started_at": "2026-01-01T00:00:00.000Z"})
    assert jobs.read(lab.workspace, "monitor")["state"] == "gone"


LONG = ("demo", "adapt", "quantize", "cache", "fit", "validate", "sample")


def test_every_long_command_can_be_detached() -> None:
    commands = {name: cli.LazyGroup().get_command(click.Context(cli.cli), name) for name in cli.COMMANDS}
    assert tuple(name for name, found in commands.items() if isinstance(found, detach.LongCommand)) == LONG


def test_a_demo_needs_no_workspace_yet(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its default folder is not the working directory, so the next command names it."""
    begun: list[tuple[Any, ...]] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(detach, "SETTLE_S", 0.0)

    def start(workspace: Any, name: str, options: Any) -> Any:
        begun.append((workspace.root, name, list(options)))
        files.write_json(
            jobs.path_of(workspace, name), {"pid": 7, "exit": None, "host_id": "", "log": "a.log"}
        )
        return SimpleNamespace(pid=7, poll=lambda: None, returncode=None)

    monkeypatch.setattr(jobs, "start", start)
    assert cli.main(["demo", "--device", "cpu", "--detach"]) == 0
    assert begun == [(tmp_path / "demo-workspace", "demo", ["--device", "cpu"])]
    assert capsys.readouterr().err == "next: finetune monitor --job demo --wait --workspace demo-workspace\n"


@pytest.mark.skipif(sys.platform == "win32", reason="sessions and SIGHUP are POSIX's")
def test_a_job_survives_its_shell(lab: Any) -> None:
    """The shell's whole process group is killed, as a terminal or an agent's tool call that ends does it."""
    line = [sys.executable, "-m", "runtime", "cache", "--detach", "--workspace", str(lab.root)]
    lab.configure({"data.processor.target_size": [32, 32]})
    shell = subprocess.Popen(
        ["sh", "-c", '"$@"; sleep 60', "sh", *line], stderr=subprocess.PIPE, start_new_session=True, text=True
    )
    assert shell.stderr is not None and "next: finetune monitor" in shell.stderr.readline()
    pid = jobs.read(lab.workspace, "cache")["pid"]
    with contextlib.suppress(ProcessLookupError):  # it may be done
        assert os.getsid(pid) == pid != shell.pid
    os.killpg(shell.pid, signal.SIGHUP)
    os.killpg(shell.pid, signal.SIGKILL)
    shell.communicate()
    deadline = time.monotonic() + 60
    while (document := jobs.read(lab.workspace, "cache"))["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (document["state"], document["exit"]) == ("completed", 0)


@pytest.mark.parametrize("lets_go", [True, False])
def test_windows_flags(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lets_go: bool) -> None:
    """No console, no part in Ctrl-C, and out of the caller's job object where that is allowed."""
    flags = {
        "DETACHED_PROCESS": 0x8,
        "CREATE_NEW_PROCESS_GROUP": 0x200,
        "CREATE_BREAKAWAY_FROM_JOB": 0x1000000,
    }
    given: list[int] = []

    def popen(line: list[str], **options: Any) -> str:
        assert "start_new_session" not in options and options["stdin"] == subprocess.DEVNULL
        given.append(options["creationflags"])
        if not lets_go and options["creationflags"] & flags["CREATE_BREAKAWAY_FROM_JOB"]:
            raise PermissionError
        return "child"

    monkeypatch.setattr(jobs.sys, "platform", "win32")
    for name, value in flags.items():
        monkeypatch.setattr(jobs.subprocess, name, value, raising=False)
    monkeypatch.setattr(jobs.subprocess, "Popen", popen)
    with (tmp_path / "log").open("wb") as output:
        made: Any = jobs._spawn(["python"], output)
    assert made == "child"
    assert given == ([0x1000208] if lets_go else [0x1000208, 0x208])
