"""`gate diagnose`: of a log, of a run's directory, of nothing that it can read."""

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gates import cli
from gates.diagnose import diagnose
from gates.faults import library, runs

LOG = "Loading transformer\ntrainable params: 23,592,960\noptimizer: bitsandbytes.optim.Adam8bit\n"
NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def stamp(minutes: float = 0.0) -> str:
    return (NOW - timedelta(minutes=minutes)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: Any) -> tuple[int, str, str]:
        code = cli.main(["diagnose", *map(str, arguments)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "train.log"
    path.write_text(LOG, encoding="utf-8")
    return path


def test_what_it_says(gate: Any, log: Path) -> None:
    code, out, err = gate(log, "--exit-code", 134)
    assert code == 0 and err == "" and out.isascii()
    rows = [line.split(None, 1) for line in out.splitlines() if line.startswith("  ") and line[2] != " "]
    assert [row[0] for row in rows] == ["seen", "and", "cause", "do", "do", "do", "from"]
    assert rows[0][1] == "train.log:3: optimizer: bitsandbytes.optim.Adam8bit"
    assert "died-at-first-step: " in out and "exit code 134" in out
    assert rows[3][1] == "set optimizer.class_path: torch.optim.AdamW in config.yaml"


def test_json(gate: Any, log: Path) -> None:
    code, out, _ = gate(log, "--json")
    document = json.loads(out)
    (fault,) = document.pop("faults")
    assert code == 0 and (fault["id"], fault["where"]) == ("died-at-first-step", "train.log:3")
    assert document == {
        "schema": "diagnosis/1", "read": ["train.log"], "told": "", "exit_code": None, "stops": "optimizer",
        "last_lines": [], "advice": [],
    }  # fmt: skip


NOTHING = (
    ("step 4 loss: 0.4\n", None, "if the process is gone: gate diagnose"),
    ("step 4 loss: 0.4\nValueError: odd\n", None, "read the last lines"),
    ("odd\n", 1, "read the last lines"),
    ("step 4 loss: 0.4\n", 0, "nothing: it ended as it should"),
    ("training complete\n", None, "nothing: it ended as it should"),
    ("", None, "if the process is gone: gate diagnose"),
)


@pytest.mark.parametrize(("text", "code", "advice"), NOTHING)
def test_nothing_known_is_an_answer(text: str, code: int | None, advice: str, gate: Any, log: Path) -> None:
    log.write_text(text, encoding="utf-8")
    status, out, _ = gate(log, *(["--exit-code", code] if code is not None else []))
    assert status == 1 and "nothing known; the log stops " in out and f"do: {advice}" in out
    assert all(f"train.log:{number}: {line}" in out for number, line in enumerate(text.splitlines(), 1))


def test_what_can_not_be_read(gate: Any, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "run.json").write_text("{", encoding="utf-8")
    for name in ("none.log", "empty", "v1"):
        code, out, err = gate(tmp_path / name)
        assert code == 3 and out == "" and err.startswith("gate: "), name


def test_another_trainers_folder(gate: Any, log: Path) -> None:
    older = log.with_name("older.log")
    older.write_text("UR_RESULT_ERROR_DEVICE_LOST\n", encoding="utf-8")
    os.utime(older, (1, 1))
    code, out, _ = gate(log.parent)
    assert code == 0 and out.startswith("read train.log\n") and "died-at-first-step" in out


# ---- a run's directory

RECORD = {
    "state": "running", "heartbeat_at": stamp(), "launched_at": stamp(60), "pid": 7, "planned_steps": 200,
    "done_steps": 0, "reason": None, "device": {"type": "xpu"},
    "resolved": {"optimizer": {"class_path": "bitsandbytes.optim.AdamW8bit"}},
}  # fmt: skip


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """run(record fields, metrics=lines, job=record, log=text, error=text) -> the run's folder."""

    def make(
        fields: dict[str, Any],
        *,
        metrics: str = "",
        job: dict[str, Any] | None = None,
        log: str = "",
        error: str = "",
    ) -> Path:
        folder = tmp_path / "outputs" / "demo" / "v1"
        folder.mkdir(parents=True)
        (tmp_path / ".gates" / "jobs").mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({**RECORD, **fields}), encoding="utf-8")
        (folder / "metrics.jsonl").write_text(metrics, encoding="utf-8")
        if job is not None:
            (tmp_path / ".gates" / "jobs" / "fit.json").write_text(json.dumps(job), encoding="utf-8")
            (tmp_path / ".gates" / "jobs" / "fit.log").write_text(log, encoding="utf-8")
        if error:
            (tmp_path / ".gates" / "error.log").write_text(error, encoding="utf-8")
        return folder

    return make


STEP = json.dumps({"step": 3, "loss": 0.4, "grad_norm": 0.1, "device": "xpu", "alloc_gib": 9.0})
LOST = json.dumps({"step": 4, "loss": None, "grad_norm": None, "device": "xpu", "alloc_gib": 9.0})
TORCH = {"optimizer": {"class_path": "torch.optim.AdamW"}}
VANISHED = "its process ended without a word: killed, out of memory, or a driver abort"
FAILED = {"state": "failed", "outcome": "vanished", "reason": VANISHED}
GONE = {"heartbeat_at": stamp(30)}
DEAD = {"pid": 7, "exit": 1}
DONE = {"done_steps": 3}
# name: run.json, the rest, the faults
RUNS: dict[str, tuple[dict[str, Any], dict[str, Any], list[str]]] = {
    "at work before its first step": ({}, {}, []),
    "silent for long before its first step": (GONE, {}, ["died-at-first-step"]),
    "the same, without an 8-bit optimizer": ({**GONE, "resolved": TORCH}, {}, []),
    "buried before its first step": (FAILED, {}, ["died-at-first-step"]),
    "at work": (DONE, {"metrics": STEP + "\n"}, []),
    "silent for long": ({**GONE, **DONE}, {"metrics": STEP + "\n"}, ["died-in-training"]),
    "buried": ({**FAILED, **DONE}, {"metrics": STEP + "\n" + STEP[:9]}, ["died-in-training"]),
    "killed, as its job's record says": (
        {**GONE, **DONE}, {"metrics": STEP + "\n", "job": {"pid": 7, "exit": 137}}, ["killed-by-system"],
    ),
    "another run's job": (
        {**GONE, **DONE}, {"job": {"pid": 8, "exit": 137}, "log": "device lost\n"}, ["died-in-training"],
    ),
    "its job's log": ({**FAILED, **DONE}, {"job": DEAD, "log": "UR_RESULT_ERROR_DEVICE_LOST\n"}, ["device-lost"]),
    "its traceback": (
        {**FAILED, **DONE},
        {"error": "Traceback (most recent call last):\nRuntimeError: expected scalar type BFloat16 but found Float\n"},
        ["mixed-dtypes-in-attention"],
    ),
    "a reason that it recorded": ({**FAILED, "outcome": "error", "reason": "XPU out of memory"}, {}, ["out-of-memory"]),
    "a loss of NaN": ({**FAILED, **DONE}, {"metrics": LOST + "\n"}, ["nan-gradients"]),
    "completed": ({"state": "completed", "done_steps": 200, "heartbeat_at": stamp(900)}, {"metrics": STEP + "\n"}, []),
    "interrupted": ({"state": "interrupted", **DONE}, {"metrics": STEP + "\n"}, []),
    "a record of nonsense": (
        {"state": 3, "heartbeat_at": [], "resolved": [], "device": 1, "planned_steps": True, "done_steps": "x"},
        {"metrics": '[]\n{"step": {}}\n\n'}, [],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run(name: str, run: Any) -> None:
    fields, rest, wanted = RUNS[name]
    found = runs.read(run(fields, **rest), now=NOW)
    assert [match.fault.id for match in library.name(found.log)] == wanted


def test_a_run_tells_what_was_read(run: Any) -> None:
    found = diagnose(run({**FAILED, **DONE}, metrics=STEP + "\n", job=DEAD, log="odd\n"))
    assert found.read == ("run.json", "fit.log", "metrics.jsonl")
    assert found.told == f"v1: failed, {VANISHED}"


JOB = "run        outputs/demo/v1 (full), from step 0\ntrains     LoRA rank 16 on 40 linears\n"
# name: run.json, the job's record, its log, the faults that the log alone names
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any], str, list[str]]] = {
    "killed": ({**FAILED, **DONE}, {"pid": 7, "exit": None}, JOB, ["died-in-training"]),
    "at work": (DONE, {"pid": 7, "exit": None}, JOB, []),
    "another run since": ({**FAILED, **DONE, "pid": 9}, {"pid": 7, "exit": 137}, JOB, ["killed-by-system"]),
    "no run was made": (DONE, {"pid": 7, "exit": 1}, "load the denoiser\n", ["died-while-loading"]),
    "done": ({"state": "completed", "done_steps": 9}, {"pid": 7, "exit": 0}, JOB, []),
}


@pytest.mark.parametrize("name", JOBS)
def test_a_jobs_log_with_what_is_known_beside_it(name: str, run: Any, tmp_path: Path) -> None:
    fields, job, text, wanted = JOBS[name]
    run({**fields, "heartbeat_at": datetime.now(UTC).isoformat()}, job={"schema": "job/1", **job}, log=text)
    found = diagnose(tmp_path / ".gates" / "jobs" / "fit.log")
    assert [match.fault.id for match in found.matches] == wanted
    assert ("run.json" in found.read) == (name in ("killed", "at work", "done"))


def test_a_healthy_workspaces_runs_name_nothing(made: Any, gate: Any) -> None:
    for kind in ("smoke", "full"):
        code, out, _ = gate(made.run(kind))
        assert code == 1 and "nothing: it ended as it should" in out


def test_the_log_of_a_real_failure_is_read(tmp_path: Path) -> None:
    """What Python itself writes when it dies of a signal: no word at all."""
    path = tmp_path / "a.log"
    script = "import os\nprint('Loading transformer', flush=True)\nos.abort()"
    with path.open("wb") as handle:
        ended = subprocess.run([sys.executable, "-c", script], stdout=handle, stderr=handle, check=False)
    found = diagnose(path, exit_code=ended.returncode)
    assert ended.returncode != 0 and [match.fault.id for match in found.matches] == ["died-while-loading"]
