"""finetune monitor [--run DIR | --job NAME] [--wait] [--timeout S] [--interval S] [--count N] [--plot FILE]

Reads what the run itself records. The allocator's counters belong to the training process: another
process that asks torch for them reads 0, whatever the fit uses.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

from runtime import files, jobs
from runtime.commands import common
from runtime.config.load import load_config
from runtime.errors import UserError
from runtime.progress import duration
from runtime.training import history, record
from runtime.workspace import Workspace

SPARKS = "_.-~=*#"  # ASCII: every console has it
BLOCKS = "▁▂▃▄▅▆▇█"
WINDOW = 50

Reading = dict[str, Any]


@click.command(cls=common.Command)
@click.option("--run", "run_dir", metavar="DIR", help="A run's directory.  [default: the newest]")
@click.option(
    "--job", metavar="NAME", help="A command started with --detach (cache, quantize, ...) instead of a run."
)
@click.option("--wait", is_flag=True, help="Return when it has ended.")
@click.option("--timeout", type=float, metavar="S", help="With --wait: return after S seconds at the latest.")
@click.option("--interval", type=float, default=2.0, show_default=True, help="Seconds between readings.")
@click.option(
    "--count",
    type=int,
    help="Readings before it stops; 0 is no end.  [default: 0 on a terminal, 1 elsewhere]",
)
@click.option(
    "--plot", "picture", metavar="FILE", help="Draw loss and probes into this PNG instead, and return."
)
@common.workspace_option
@common.json_option
def command(
    run_dir: str | None,
    job: str | None,
    wait: bool,
    timeout: float | None,
    interval: float,
    count: int | None,
    picture: str | None,
    workspace: Workspace,
    as_json: bool,
) -> None:
    """Show how far a run or a background job is, or wait for its end."""
    if job is not None:
        if picture is not None:
            raise click.UsageError("--plot draws a run; it can't be combined with --job")
        look, say, show = partial(read_job, workspace, job), spoken_job, spoken_job
    else:
        path = workspace.resolve(run_dir) if run_dir else newest(workspace)
        if picture is not None:
            click.echo(draw(path, Path(picture).expanduser().resolve()))
            return
        look, say, show = partial(read, path), spoken, screen
    deadline = time.monotonic() + timeout if timeout is not None else None
    if sys.stdout.isatty() and not as_json and (count is None or count == 0):
        _refresh(look, show, interval, deadline)
    else:
        _lines(look, say, interval, deadline, 1 if count is None else count, wait=wait, as_json=as_json)


def _lines(
    look: Callable[[], Reading],
    say: Callable[[Reading], str],
    interval: float,
    deadline: float | None,
    count: int,
    *,
    wait: bool,
    as_json: bool,
) -> None:
    """A line, or a JSON document, per reading; with `wait` the last reading only."""
    shown = 0
    while True:
        reading = look()
        ended = _ended(reading, deadline)
        if not wait or ended:
            common.print_json(reading) if as_json else click.echo(say(reading))
            shown += 1
        if ended or (not wait and shown == count):
            return
        time.sleep(interval)


def _refresh(
    look: Callable[[], Reading], show: Callable[[Reading], str], interval: float, deadline: float | None
) -> None:
    """In place on a terminal, until the run's end."""
    from rich.live import Live
    from rich.text import Text

    reading = look()
    with Live(Text(show(reading)), auto_refresh=False) as live:
        while not _ended(reading, deadline):
            time.sleep(interval)
            reading = look()
            live.update(Text(show(reading)), refresh=True)


def _ended(reading: Reading, deadline: float | None) -> bool:
    return reading["state"] != "running" or (deadline is not None and time.monotonic() >= deadline)


def read_job(workspace: Workspace, name: str) -> Reading:
    """A background job's record, its log's last line with the progress, and what to do next."""
    document = jobs.read(workspace, name)
    following = {"running": f"finetune monitor --job {name} --wait", "completed": "gate next"}
    said = jobs.remedy([document["last_line"]]) if document["state"] == "failed" else None
    why = f"gate diagnose {common.from_here(workspace.root / document['log'])}"
    return {**document, "next": following.get(document["state"], said or why)}


def spoken_job(reading: Reading) -> str:
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


def document_of(path: Path) -> dict[str, Any]:
    if not (path / "run.json").is_file():
        raise UserError(f"{path} is no run: it has no run.json", remedy="finetune monitor")
    document: dict[str, Any] = files.read_json(path / "run.json")
    return document


def read(path: Path) -> Reading:
    """State, progress, loss and memory of a run; losses and probes from the first step on, across resumes.

    `gone` is a run whose process died without a word; run.json is told, for the gates judge files and
    can't look for a process.
    """
    document = document_of(path)
    past = history.read(path, document)
    lines = [line for line in past.metrics if line["run"] == path.name]
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
        **{name: last.get(name) for name in ("loss", "loss_ema", "lr")},
        "losses": [line["loss_ema"] for line in past.metrics if line["loss_ema"] is not None][-200:],
        "probes": [
            {key: line[key] for key in ("step", "train_mean", "holdout_mean")} for line in past.probes
        ],
        "warning": history.overfitting(past.probes, past.checkpoints),
        "device": document["device"]["type"],
        **{name: last.get(name) for name in ("alloc_gib", "reserved_gib", "peak_gib", "rss_gib")},
        "capacity_gib": document["device"]["total_gib"],
        "heartbeat_at": document["heartbeat_at"],
        "reason": document["reason"],
        "next": _next(path, state, document["kind"]),
    }


def _next(path: Path, state: str, kind: str) -> str:
    if state == "running":
        return "finetune monitor --wait"
    if state == "completed":
        return f"gate check 07 --phase {kind}"
    if state != "interrupted":  # it died: what of, before it does so again
        return f"gate diagnose {common.from_here(path)}"
    return "finetune fit --smoke" if kind == "smoke" else "finetune fit --resume latest"


def draw(run: Path, picture: Path) -> Path:
    """The run's numbers as a PNG; returns its path."""
    from runtime.training import plot

    document = document_of(run)
    done = f"{document['done_steps']} of {document['planned_steps']} steps"
    title = f"{run.parent.name} {run.name}, {document['kind']}, {document['state']}: {done}"
    plot.write(picture, title, history.read(run, document), document["planned_steps"])
    return picture


def spoken(reading: Reading) -> str:
    """One line, a second with a warning, and a last one with what to do where the run has ended."""
    parts = [_head(reading)]
    if reading["loss_ema"] is not None:
        parts.append(f"loss {reading['loss_ema']:.4f} [{sparkline(reading['losses'])}]")
    if reading["lr"] is not None:
        parts.append(f"lr {reading['lr']:.2e}")
    parts += [part for part in (_pace(reading), _probe(reading), _memory(reading)) if part]
    return "\n".join(["  ".join(parts), *_notes(reading)])


def screen(reading: Reading) -> str:
    """The same, a line each."""
    rows = [_head(reading)]
    if reading["loss_ema"] is not None:
        one = "none" if reading["loss"] is None else f"{reading['loss']:.4f}"
        rows.append(f"loss    {one}, smooth {reading['loss_ema']:.4f}  [{sparkline(reading['losses'], 60)}]")
    for split, name in (("train", "train_mean"), ("held", "holdout_mean")):
        values = [p[name] for p in reading["probes"] if p[name] is not None]
        if values:
            rows.append(f"{split:7} {values[-1]:.4f}, first {values[0]:.4f}  [{sparkline(values, 60)}]")
    if reading["lr"] is not None:
        pace = _pace(reading)
        rows.append(f"pace    lr {reading['lr']:.2e}{'  ' + pace if pace else ''}")
    memory = _memory(reading)
    rows += [f"memory  {memory}"] if memory else []
    return "\n".join([*rows, *_notes(reading)])


def _head(reading: Reading) -> str:
    head = f"{reading['run']} {reading['kind']} {reading['state']}"
    return f"{head}  step {reading['step']}/{reading['planned_steps']}"


def _notes(reading: Reading) -> list[str]:
    warning = [f"warning: {reading['warning']}"] if reading["warning"] else []
    return [*warning, *([] if reading["state"] == "running" else [f"next: {reading['next']}"])]


def _pace(reading: Reading) -> str:
    if reading["step_s"] is None:
        return ""
    pace = f"{reading['step_s']:.2f} s/step"
    return pace if reading["eta_s"] is None else f"{pace}, ETA {duration(reading['eta_s'])}"


def _probe(reading: Reading) -> str:
    words = []
    for split, name in (("train", "train_mean"), ("held", "holdout_mean")):
        values = [p[name] for p in reading["probes"] if p[name] is not None]
        if values:
            words.append(f"{split} {values[-1]:.4f} [{sparkline(values, 8)}]")
    return "probe " + " ".join(words) if words else ""


def _memory(reading: Reading) -> str:
    if reading["rss_gib"] is None:
        return ""
    process = f"process {reading['rss_gib']:.2f} GiB"
    if reading["device"] == "cpu":
        return f"{process} of {reading['capacity_gib']:.1f} GiB"
    return (
        f"{reading['device']} alloc {reading['alloc_gib']:.2f} GiB, reserved {reading['reserved_gib']:.2f} GiB, "
        f"peak {reading['peak_gib']:.2f} GiB of {reading['capacity_gib']:.1f} GiB, {process}"
    )


def sparkline(values: list[float], width: int = 24) -> str:
    """`values` over the run, high to low, in blocks where stdout can show them, else in ASCII."""
    if not values:
        return ""
    marks = marks_for(getattr(sys.stdout, "encoding", None))
    width = min(width, len(values))
    picked = [values[index * (len(values) - 1) // max(1, width - 1)] for index in range(width)]
    low, high = min(picked), max(picked)
    scale = (len(marks) - 1) / (high - low) if high > low else 0.0
    return "".join(marks[round((value - low) * scale)] for value in picked)


def marks_for(encoding: str | None) -> str:
    """Signs from low to high that a console of this encoding can show."""
    try:
        BLOCKS.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return SPARKS
    return BLOCKS
