"""Long commands in the background: apart from the shell that starts them, recorded, waited for.

    python -m runtime.jobs .gates/jobs/cache.json cache --workspace DIR

is what the background process runs; it keeps its exit status in the record. One record per command.
"""

import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from runtime import files
from runtime.errors import UserError
from runtime.workspace import Workspace, host_id

TAIL = 5
NEXT = "next: "
BIRTH_S = 60.0  # in which a new process must have noted its number


def start(workspace: Workspace, name: str, options: Sequence[str]) -> "subprocess.Popen[bytes]":
    """Run `finetune NAME OPTIONS` in the background. Raises UserError where that job still goes."""
    standing = read(workspace, name) if path_of(workspace, name).is_file() else None
    if standing and standing["state"] == "running":
        raise UserError(
            f"finetune {name} is still running in the background, as process {standing['pid']}",
            remedy=f"finetune monitor --job {name} --wait",
        )
    record, log = path_of(workspace, name), path_of(workspace, name).with_suffix(".log")
    line = [name, *options, "--workspace", str(workspace.root)]
    document = {
        "schema": "job/1",
        "name": name,
        "pid": 0,
        "host_id": host_id(),
        "command": " ".join(["finetune", name, *options]),
        "log": log.relative_to(workspace.root).as_posix(),
        "started_at": files.utc_now(),
        "ended_at": None,
        "exit": None,
    }
    files.write_json(record, document)
    with log.open("wb") as output:
        return _spawn([sys.executable, "-m", "runtime.jobs", str(record), *line], output)


def _spawn(line: list[str], output: BinaryIO) -> "subprocess.Popen[bytes]":
    """In a session of its own, so that closing the terminal, or an agent's tool call, doesn't take it along."""
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
    if sys.platform != "win32":
        return subprocess.Popen(line, start_new_session=True, **streams)
    apart = subprocess.DETACHED_PROCESS | subprocess.CREATE_NEW_PROCESS_GROUP
    try:
        return subprocess.Popen(line, creationflags=apart | subprocess.CREATE_BREAKAWAY_FROM_JOB, **streams)
    except PermissionError:  # the job that we are in lets nobody go
        return subprocess.Popen(line, creationflags=apart, **streams)


def path_of(workspace: Workspace, name: str) -> Path:
    return workspace.root / ".gates" / "jobs" / f"{name}.json"


def read(workspace: Workspace, name: str) -> dict[str, Any]:
    """The record, with `state` running, completed, failed or gone, and the log's last line."""
    path = path_of(workspace, name)
    if not path.is_file():
        raise UserError(
            f"finetune {name} was not started with --detach here", remedy=f"finetune {name} --detach"
        )
    document: dict[str, Any] = files.read_json(path)
    lines = tail(workspace.root / document["log"])
    return {**document, "state": _state(document), "last_line": lines[-1] if lines else ""}


def _state(document: dict[str, Any]) -> str:
    if document["exit"] is not None:
        return "completed" if document["exit"] == 0 else "failed"
    return "running" if _lives(document) else "gone"


def _lives(document: dict[str, Any]) -> bool:
    import psutil

    if document["host_id"] != host_id():
        return True  # nothing here can tell
    if document["pid"] == 0:  # not yet come to write its own number, or dead before it could
        started = datetime.fromisoformat(document["started_at"])
        return (datetime.now(UTC) - started).total_seconds() < BIRTH_S
    try:
        return bool(psutil.Process(document["pid"]).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def tail(log: Path) -> list[str]:
    if not log.is_file():
        return []
    return log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]


def remedy(lines: Sequence[str]) -> str | None:
    """What the command itself said to do, as its last line; None where it died without a word."""
    return lines[-1].removeprefix(NEXT) if lines and lines[-1].startswith(NEXT) else None


def main(arguments: Sequence[str]) -> int:
    """The background process: note its number, run the command line, note how it ended."""
    import os

    from runtime import cli

    record, *line = arguments
    path = Path(record)
    document = {**files.read_json(path), "pid": os.getpid()}
    files.write_json(path, document)
    code = cli.main(line)
    files.write_json(path, {**document, "exit": code, "ended_at": files.utc_now()})
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
