"""--detach, for every command that outlasts an agent's tool call: start it apart, say where to look, return."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from runtime import jobs
from runtime.commands import common
from runtime.config.load import load_config
from runtime.errors import UserError
from runtime.training import record
from runtime.workspace import Workspace

SETTLE_S = 2.0  # what is wrong at the very start shows within it
LAUNCH_S = 600.0  # loading and quantizing a 20-billion-parameter base comes before a run's run.json

DETACH = "--detach"


class LongCommand(common.Command):
    """A command that takes --detach; what else it was given is handed on to the background as it stands.

    `makes_workspace`: one that needs no config.yaml, for it writes it.
    """

    def __init__(self, *arguments: Any, makes_workspace: bool = False, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.makes_workspace = makes_workspace
        help_text = "Run in the background; `finetune monitor` waits for it."
        self.params.append(click.Option([DETACH], is_flag=True, expose_value=False, help=help_text))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["line"] = _handed_on(args)
        ctx.meta["detached"] = DETACH in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        if not ctx.meta["detached"]:
            return super().invoke(ctx)
        workspace, as_json = ctx.params["workspace"], ctx.params.get("as_json", False)
        with common.boundary(workspace):
            name = str(ctx.info_name)
            if not self.makes_workspace:  # all others read it, and here its faults are seen at once
                load_config(workspace.config_path)
            begin = fit if name == "fit" else job
            return begin(workspace, name, ctx.meta["line"], as_json=as_json)


def _handed_on(args: Sequence[str]) -> list[str]:
    """The options without those that speak of this process alone."""
    kept: list[str] = []
    skip = False
    for part in args:
        if not skip and part not in (DETACH, "--json", "--workspace") and not part.startswith("--workspace="):
            kept.append(part)
        skip = part == "--workspace"
    return kept


def job(workspace: Workspace, name: str, options: Sequence[str], *, as_json: bool) -> None:
    """Start `finetune NAME OPTIONS`; returns once it has had time to die of a wrong start."""
    child = jobs.start(workspace, name, options)
    _unless_dead(workspace, name, child, lambda: False, SETTLE_S)
    _tell(
        {"job": name, **_place(workspace, name, child)},
        f"finetune monitor --job {name} --wait{_there(workspace)}",
        as_json,
    )


def fit(workspace: Workspace, name: str, options: Sequence[str], *, as_json: bool) -> None:
    """Start `finetune fit OPTIONS`; returns once its run exists."""
    logging = load_config(workspace.config_path).config.logging
    project = record.project(workspace, logging)
    child = jobs.start(workspace, name, options)

    def opened() -> list[str]:
        # By the number that the process itself wrote: a Windows venv starts Python through another one.
        pid = jobs.read(workspace, name)["pid"]
        found = (path for path, document in record.runs(project) if document.get("pid") == pid)
        return [path.relative_to(workspace.root).as_posix() for path in found]

    _unless_dead(workspace, name, child, lambda: bool(opened()), LAUNCH_S)
    run = opened()
    if not run:
        raise UserError(f"no run after {LAUNCH_S:.0f} s", remedy="finetune monitor --job fit")
    _tell(
        {"run": run[0], **_place(workspace, name, child)},
        f"finetune monitor --wait{_there(workspace)}",
        as_json,
    )


def _there(workspace: Workspace) -> str:
    """The option that leads to a workspace other than the working directory."""
    here = Path.cwd()
    if workspace.root == here:
        return ""
    inside = workspace.root.is_relative_to(here)
    path = workspace.root.relative_to(here).as_posix() if inside else str(workspace.root)
    return f' --workspace "{path}"' if " " in path else f" --workspace {path}"


def _place(workspace: Workspace, name: str, child: Any) -> dict[str, Any]:
    log = jobs.path_of(workspace, name).with_suffix(".log").relative_to(workspace.root).as_posix()
    return {"pid": jobs.read(workspace, name)["pid"] or child.pid, "log": log}


def _unless_dead(
    workspace: Workspace, name: str, child: Any, ready: Callable[[], bool], limit_s: float
) -> None:
    """Wait until `ready` or the limit. Raises UserError with the log's end where the command failed before."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and not ready():
        if child.poll() is not None:
            if child.returncode == 0:
                return
            log = jobs.path_of(workspace, name).with_suffix(".log")
            lines = jobs.tail(log)
            raise UserError(
                f"finetune {name} ended with {child.returncode} at its start:\n  " + "\n  ".join(lines),
                remedy=jobs.remedy(lines) or f"gate diagnose {common.from_here(log)}",
            )
        time.sleep(0.1)
    child.returncode = 0  # it outlives us on purpose; Popen would warn of a child not waited for


def _tell(told: dict[str, Any], following: str, as_json: bool) -> None:
    if as_json:
        common.print_json(told)
    else:
        click.echo(told.get("run") or told["log"])
        click.echo(f"next: {following}", err=True)
