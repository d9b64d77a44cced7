"""A run's directory as a log: its record, the job's log, the saved traceback, the last steps."""

import json
import os
import re
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gates.evidence import EvidenceError, parse_json, read_json
from gates.faults import logs
from gates.faults.logs import Line, Log

STALE_S = 600.0  # a run beats every few seconds; without a beat for so long its process is gone
RUN = re.compile(r"run +(\S+) \((?:smoke|full)\)")  # the first line of a fit
STEPS = 40  # of the last lines of metrics.jsonl
ENDED = {"completed": 0, "interrupted": 130}
LIVES = {"running": False, "completed": False, "failed": True, "gone": True}  # whether it ended wrongly
# What a foreign trainer's folder may call its log.
LOGS = ("*.log", "*log*.txt", "logs/*.log", "logs/*.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    log: Log
    read: tuple[str, ...]
    """names of the files that were read"""
    told: str
    """what the run's own record says of its end"""


def is_run(folder: Path) -> bool:
    return (folder / "run.json").is_file()


def read(folder: Path, *, exit_code: int | None = None, now: datetime | None = None) -> Found:
    """A run of `finetune fit`. Raises EvidenceError, OSError."""
    record = read_json(folder / "run.json", "run.json")
    if not isinstance(record, dict):
        raise EvidenceError("run.json", "is no record of a run")
    state = _state(record, now or datetime.now(UTC))
    job, base = _job(folder, record)
    code = exit_code if exit_code is not None else _code(job, state)
    log = Log(lines=(), exit_code=code, ended=LIVES.get(state))
    names = ["run.json"]
    for path in _texts(base, job, record):
        log = log.with_(logs.read(path))
        names.append(path.name)
    steps = _steps(folder / "metrics.jsonl")
    if (folder / "metrics.jsonl").is_file():
        names.append("metrics.jsonl")
    log = replace(
        log,
        lines=(*log.lines, *_settings(record), *steps, *_reason(record)),
        limit=_number(record.get("planned_steps")),
        at=_stage(record, state),
    )
    return Found(
        log=log, read=tuple(names), told=f"{folder.name}: {state}, {record.get('reason') or 'no reason'}"
    )


def read_job(log: Path, *, exit_code: int | None = None) -> Found | None:
    """A background job's log, with its record beside it and the run that it made; None where it is no such log."""
    try:
        job = read_json(log.with_suffix(".json"), "the job's record")
    except EvidenceError:
        return None
    if not isinstance(job, dict) or job.get("schema") != "job/1":
        return None
    found = logs.read(log, exit_code=exit_code)
    named = next((hit for line in found.lines if (hit := RUN.match(line.text))), None)
    folder = log.parent.parent.parent / named[1] if named else None
    if folder is not None and is_run(folder) and _job(folder, read_json(folder / "run.json", "run.json"))[0]:
        return read(folder, exit_code=exit_code)
    code = job.get("exit") if exit_code is None else exit_code
    return Found(
        log=replace(found, exit_code=_number(code)), read=(log.name, log.with_suffix(".json").name), told=""
    )


def read_foreign(folder: Path, *, exit_code: int | None = None) -> Found | None:
    """The newest log in another trainer's folder; None where there is none."""
    found = [
        path for pattern in LOGS for path in folder.glob(pattern) if path.is_file() and not path.is_symlink()
    ]
    if not found:
        return None
    newest = max(found, key=lambda path: path.stat().st_mtime)
    return Found(log=logs.read(newest, exit_code=exit_code), read=(newest.name,), told="")


def _state(record: dict[str, Any], now: datetime) -> str:
    state = str(record.get("state"))
    try:
        beat = datetime.fromisoformat(str(record.get("heartbeat_at")))
        stale = (now - beat).total_seconds() > STALE_S
    except (ValueError, TypeError):
        stale = False
    return "gone" if state == "running" and stale else state


def _job(folder: Path, record: dict[str, Any]) -> tuple[dict[str, Any] | None, Path | None]:
    """The background job that made this run, by the process id in both records, and the workspace's .gates."""
    base = next((up / ".gates" for up in folder.resolve().parents if (up / ".gates").is_dir()), None)
    if base is None:
        return None, None
    try:
        job = read_json(base / "jobs" / "fit.json", "fit.json")
    except EvidenceError:
        return None, base
    mine = isinstance(job, dict) and job.get("pid") == record.get("pid")
    return (job, base) if mine else (None, base)


def _code(job: dict[str, Any] | None, state: str) -> int | None:
    if job and isinstance(job.get("exit"), int):
        return int(job["exit"])
    return ENDED.get(state)


def _texts(base: Path | None, job: dict[str, Any] | None, record: dict[str, Any]) -> list[Path]:
    """The job's log, and the traceback that the error boundary saved while this run was the newest thing."""
    if base is None:
        return []
    found = [base / "jobs" / "fit.log"] if job else []
    saved = base / "error.log"
    if record.get("state") == "failed" and saved.is_file() and _after(saved, record.get("launched_at")):
        found.append(saved)
    return [path for path in found if path.is_file()]


def _after(path: Path, launched: Any) -> bool:
    try:
        return path.stat().st_mtime >= datetime.fromisoformat(str(launched)).timestamp()
    except ValueError:
        return False


def _settings(record: dict[str, Any]) -> list[Line]:
    """What the faults ask of the config, as a log would say it."""
    resolved = record.get("resolved") or record.get("config")
    optimizer = resolved.get("optimizer", {}) if isinstance(resolved, dict) else {}
    device = record.get("device")
    name = optimizer.get("class_path") if isinstance(optimizer, dict) else None
    lines = [f"optimizer: {name}"] if name else []
    lines += [f"device     {device.get('type')}"] if isinstance(device, dict) else []
    return [Line("run.json", text) for text in lines]


def _reason(record: dict[str, Any]) -> list[Line]:
    reason = record.get("reason")
    own = (
        record.get("state") == "failed" and record.get("outcome") != "vanished"
    )  # not written by others afterwards
    return [Line("run.json:reason", str(reason))] if reason and own else []


def _steps(path: Path) -> list[Line]:
    """The last steps, worded as a log line each; a torn or odd line is passed over."""
    if not path.is_file():
        return []
    with path.open("rb") as handle:
        size = handle.seek(0, os.SEEK_END)
        handle.seek(max(0, size - logs.TAIL))
        raw = handle.read().split(b"\n")[-STEPS - 1 :]
    found = []
    for text in raw:
        try:
            line = parse_json(text, path.name, allow_nan=True)
        except (EvidenceError, json.JSONDecodeError):
            continue
        if isinstance(line, dict) and {"step", "loss"} <= line.keys():
            found.append(Line(f"{path.name}:step {line['step']}", _spoken(line)))
    return found


def _spoken(line: dict[str, Any]) -> str:
    told = f"step {line['step']}  loss {'nan' if line['loss'] is None else line['loss']}"
    if line.get("grad_norm") is not None:
        told += f"  grad_norm {line['grad_norm']}"
    if line.get("device") in ("xpu", "cuda"):
        told += f"  {line['device']} alloc {line.get('alloc_gib')}"
    return told


def _stage(record: dict[str, Any], state: str) -> str | None:
    if state not in {*LIVES, *ENDED}:
        return None  # a record that says nothing
    if state == "completed":
        return "done"
    return "step" if (_number(record.get("done_steps")) or 0) > 0 else "optimizer"


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
