"""finetune monitor [--run DIR | --job NAME] [--wait] [--timeout S] [--interval S] [--count N]

Reads what the run itself records. The allocator's counters belong to the training process: another
process that asks torch for them reads 0, whatever the fit uses.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import click

from runtime import files, jobs
from runtime.commands import common
from runtime.config.load import load_config
from runtime.errors import UserError
from runtime.progress import duration
from runtime.training import record
from runtime.workspace import Workspace

SPARKS = "_.-~=*#"  # ASCII: every console has it
WINDOW = 50


@click.command(cls=common.Command)
@click.option("--run", "run_dir", metavar="DIR", help="A run's directory.  [default: the newest]")
@click.option(
    "--job", metavar="NAME", help="A command started with --detach (cache, quantize, ...) instead of a run."
)
@click.option("--wait", is_flag=True, help="Return when it has ended.")
@click.option("--timeout", type=float, metavar="S", help="With --wait: return after S seconds at the latest.")
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between readings.")
@click.option(
    "--count", type=int, default=1, show_default=True, help="Readings before it stops; 0 is no end."
)
@common.workspace_option
@common.json_option
def command(
    run_dir: str | None,
    job: str | None,
    wait: bool,
    timeout: float | None,
    interval: float,
    count: int,
    workspace: Workspace,
    as_json: bool,
) -> None:
    """Show how far a run or a background job is, or wait for its end."""
    if job is not None:
        look, say = partial(read_job, workspace, job), spoken_job
    else:
        look, say = partial(read, workspace.resolve(run_dir) if run_dir else newest(workspace)), spoken
    deadline = time.monotonic() + timeout if timeout is not None else None
    shown = 0
    while True:
        reading = look()
        late = deadline is not None and time.monotonic() >= deadline
        ended = reading["state"] != "running" or late
        if not wait or ended:
            common.print_json(reading) if as_json else click.echo(say(reading))
            shown += 1
        if ended or (not wait and shown == count):
            return
        time.sleep(interval)


def read_job(workspace: Workspace, name: str) -> dict[str, Any]:
    """A background job's record, its log's last line with the progress, and what to do next."""
    document = jobs.read(workspace, name)
    following = {"running": f"finetune monitor --job {name} --wait", "completed": "gate next"}
    return {**document, "next": following.get(document["state"], document["command"])}


def spoken_job(reading: dict[str, Any]) -> str:
    head = f"job {reading['name']} {reading['state']}  {reading['last_line']}"
    return (
        head if reading["state"] == "running" else f"{head}\nlog: {reading['log']}\nnext: {reading['next']}"
    )


def newest(workspace: Workspace) -> Path:
    logging = load_config(workspace.config_path).config.logging
    project = record.project(workspace, logging)
    for path, _ in record.runs(project):
        return path
    raise UserError(f"no run below {project}", remedy="finetune fit --smoke")


def read(path: Path) -> dict[str, Any]:
    """State, progress, loss and memory of a run.

    `gone` is a run whose process died without a word; run.json is told, for the gates judge files and
    can't look for a process.
    """
    if not (path / "run.json").is_file():
        raise UserError(f"{path} is no run: it has no run.json", remedy="finetune monitor")
    document = files.read_json(path / "run.json")
    lines = files.read_json_lines(path / "metrics.jsonl")
    last = lines[-1] if lines else {}
    state = document["state"]
    if state == "running" and record.has_vanished(document):
        state = "gone"
        record.bury(path, document)
    done = last.get("step", document["done_steps"])
    recent = sorted(line["step_s"] for line in lines[-WINDOW:])
    step_s = recent[len(recent) // 2] if recent else None
    left = document["planned_steps"] - done
    return {
        "run": path.name,
        "kind": document["kind"],
        "state": state,
        "step": done,
        "planned_steps": document["planned_steps"],
        "eta_s": step_s * left if step_s is not None and state == "running" else None,
        "step_s": step_s,
        "loss": last.get("loss"),
        "loss_ema": last.get("loss_ema"),
        "losses": [line["loss_ema"] for line in lines if line["loss_ema"] is not None][-200:],
        "device": document["device"]["type"],
        "alloc_gib": last.get("alloc_gib"),
        "reserved_gib": last.get("reserved_gib"),
        "peak_gib": last.get("peak_gib"),
        "rss_gib": last.get("rss_gib"),
        "capacity_gib": document["device"]["total_gib"],
        "heartbeat_at": document["heartbeat_at"],
        "reason": document["reason"],
        "next": _next(state, document["kind"]),
    }


def _next(state: str, kind: str) -> str:
    if state == "running":
        return "finetune monitor --wait"
    if state == "completed":
        return f"gate check 07 --phase {kind}"
    return "finetune fit --smoke" if kind == "smoke" else "finetune fit --resume latest"


def spoken(reading: dict[str, Any]) -> str:
    head = f"{reading['run']} {reading['kind']} {reading['state']}"
    parts = [head, f"step {reading['step']}/{reading['planned_steps']}"]
    if reading["loss_ema"] is not None:
        parts.append(f"loss {reading['loss_ema']:.4f} [{sparkline(reading['losses'])}]")
    if reading["eta_s"] is not None:
        parts.append(f"{reading['step_s']:.2f} s/step, ETA {duration(reading['eta_s'])}")
    if reading["device"] == "cpu" and reading["rss_gib"] is not None:
        parts.append(f"process {reading['rss_gib']:.2f} GiB")
    elif reading["alloc_gib"] is not None:
        parts.append(
            f"{reading['device']} alloc {reading['alloc_gib']:.2f} GiB, reserved {reading['reserved_gib']:.2f} GiB "
            f"of {reading['capacity_gib']:.1f} GiB"
        )
    return "  ".join(parts) + (f"\nnext: {reading['next']}" if reading["state"] != "running" else "")


def sparkline(values: list[float], width: int = 24) -> str:
    """Smoothed loss over the run, high to low, in ASCII."""
    if not values:
        return ""
    width = min(width, len(values))
    picked = [values[index * (len(values) - 1) // max(1, width - 1)] for index in range(width)]
    low, high = min(picked), max(picked)
    scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(SPARKS[round((value - low) * scale)] for value in picked)
