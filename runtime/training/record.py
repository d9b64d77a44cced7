"""What a run leaves behind for the gates and for people: run.json and three line files.

    <output_dir>/<project>/v<N>/run.json  metrics.jsonl  saves.jsonl  probe.jsonl  config.yaml

`v<N>` is picked at launch; no launch ever empties or removes another run's folder.
"""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from importlib import metadata
from math import inf
from pathlib import Path
from typing import Any

import yaml

from runtime import files
from runtime.config.model import Logging
from runtime.device import Device
from runtime.errors import ResumeError
from runtime.workspace import Workspace, host_id, tool

PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "bitsandbytes",
    "safetensors",
    "numpy",
)
VERSION = re.compile(r"v(\d+)")


@dataclass(slots=True, kw_only=True)
class Run:
    """One launch. `document` is run.json; each change is written at once."""

    path: Path
    document: dict[str, Any] = field(default_factory=dict)

    def write(self, **changes: Any) -> None:
        self.document.update(changes)
        self.document["heartbeat_at"] = files.utc_now()
        files.write_json(self.path / "run.json", self.document)

    def metrics(self, line: dict[str, Any]) -> None:
        files.append_json_line(self.path / "metrics.jsonl", {**line, "at": files.utc_now()})

    def probe(self, line: dict[str, Any]) -> None:
        files.append_json_line(self.path / "probe.jsonl", {**line, "at": files.utc_now()})

    def saved(self, event: str, kind: str, step: int, epoch: int, path: Path, reason: str) -> None:
        """A line of saves.jsonl; a save names its files by digest, a prune only says which folder goes."""
        recorded = {
            item.relative_to(path).as_posix(): {
                "size": item.stat().st_size,
                "sha256": files.file_digest(item),
            }
            for item in sorted(path.rglob("*"))
            if event == "save" and item.is_file()
        }
        line = {"event": event, "kind": kind, "step": step, "epoch": epoch, "path": path.name}
        line |= {"files": recorded, "reason": reason, "at": files.utc_now()}
        files.append_json_line(self.path / "saves.jsonl", line)

    def finish(self, state: str, outcome: str, reason: str) -> None:
        self.write(state=state, outcome=outcome, reason=reason, ended_at=files.utc_now())


def open_run(project: Path, resolved: dict[str, Any], document: dict[str, Any]) -> Run:
    """A new `v<N>` below `project`, one above the highest there; the folder's creation settles a race."""
    project.mkdir(parents=True, exist_ok=True)
    while True:
        path = project / f"v{max((number for number, _ in versions(project)), default=-1) + 1}"
        try:
            path.mkdir()
            break
        except FileExistsError:
            continue
    run = Run(path=path, document=document)
    files.write_text(path / "config.yaml", yaml.safe_dump(resolved, sort_keys=False, allow_unicode=True))
    run.write()
    return run


def project(workspace: Workspace, logging: Logging) -> Path:
    """The folder of a project's runs."""
    return workspace.resolve(logging.output_dir) / logging.tracker_project_name


def versions(project: Path) -> list[tuple[int, Path]]:
    """All run folders of a project, oldest first."""
    if not project.is_dir():
        return []
    found = ((VERSION.fullmatch(path.name), path) for path in project.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def runs(project: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Runs whose run.json can be read, newest first."""
    for _, path in reversed(versions(project)):
        try:
            yield path, files.read_json(path / "run.json")
        except (OSError, ValueError):
            continue


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A run of a lineage, and the last step that counts of it: where its successor took over."""

    path: Path
    document: dict[str, Any]
    until: float


def lineage(project: Path, run: Path, document: dict[str, Any]) -> list[Link]:
    """A run and those that it continues, newest first."""
    known = {described["run_id"]: (path, described) for path, described in runs(project)}
    chain = [Link(path=run, document=document, until=inf)]
    while (origin := chain[-1].document.get("resumed_from")) and origin["run_id"] in known:
        path, described = known.pop(origin["run_id"])
        chain.append(Link(path=path, document=described, until=origin["step"]))
    return chain


def is_alive(document: dict[str, Any]) -> bool:
    """Whether the process that writes this run still lives, as far as this machine can tell."""
    return document["state"] == "running" and not has_vanished(document)


def has_vanished(document: dict[str, Any]) -> bool:
    """Whether a run that calls itself running has no process here; a run of another machine is left to it."""
    import psutil

    if document["host_id"] != host_id():
        return False
    try:
        process = psutil.Process(document["pid"])
        # A process id comes round again: one that started well after the run is another process. Ten
        # minutes, for a clock that is set moves the start of every process with it.
        launched = datetime.fromisoformat(document["launched_at"]).timestamp()
        return bool(process.status() == psutil.STATUS_ZOMBIE or process.create_time() > launched + 600)
    except psutil.NoSuchProcess:
        return True


def refuse_alive(path: Path) -> None:
    """Two fits on one run would take each other's checkpoints. Raises ResumeError while its process lives."""
    document = files.read_json(path / "run.json")
    if is_alive(document):
        raise ResumeError(
            f"{path.name} is still running, as process {document['pid']}", remedy="finetune monitor --wait"
        )
    if document["state"] == "running":
        bury(path, document)


def bury(path: Path, document: dict[str, Any]) -> None:
    """Record the end of a run whose process can't do it any more."""
    ended = {"state": "failed", "outcome": "vanished", "ended_at": files.utc_now()}
    reason = "its process ended without a word: killed, out of memory, or a driver abort"
    files.write_json(path / "run.json", {**document, **ended, "reason": reason})


def first_document(*, run_id: str, kind: str, device: Device, **facts: Any) -> dict[str, Any]:
    """run.json as it stands before the first step."""
    now = files.utc_now()
    return {
        "schema": "run/1",
        "run_id": run_id,
        "kind": kind,
        "state": "running",
        "launched_at": now,
        "heartbeat_at": now,
        "ended_at": None,
        "host_id": host_id(),
        "tool": tool(),
        "pid": os.getpid(),
        "device": {"type": device.type, "name": device.name, "total_gib": device.total_gib},
        "packages": packages(),
        "done_steps": 0,
        "best": None,
        "outcome": "",
        "reason": "",
        **facts,
    }


def packages() -> dict[str, str]:
    """Versions of what a result depends on, the interpreter included."""
    import platform

    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found
