"""finetune fit [--smoke] [--resume latest|PATH] [--detach]"""

from pathlib import Path
from typing import Any

import click

from runtime.commands import common, monitor, preflight
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.progress import Progress
from runtime.training import history
from runtime.workspace import Workspace

PICTURE = "probe.png"


@click.command(cls=LongCommand)
@click.option("--smoke", is_flag=True, help="A few steps whose only purpose is to be judged.")
@click.option(
    "--resume", metavar="latest|PATH", help="Continue from a checkpoint-last-*-last; opens a new v<N>."
)
@common.workspace_option
@common.json_option
@click.pass_context
def command(
    ctx: click.Context,
    smoke: bool,
    resume: str | None,
    workspace: Workspace,
    as_json: bool,
) -> None:
    """Train the adapter as config.yaml says; Ctrl-C leaves a resumable checkpoint."""
    if smoke and resume:
        raise click.UsageError("--smoke starts anew; it can't be combined with --resume")
    from runtime.training import awake, loop, session

    loaded = load_config(workspace.config_path)
    expected = preflight.forecast(workspace, loaded, smoke=smoke)
    progress = Progress()
    with awake.held() as sleep:
        opened = session.launch(
            workspace,
            loaded,
            smoke=smoke,
            resume=resume or (None if smoke else loaded.config.resume),
            report=progress.say,
        )
        run = opened.run.path.relative_to(workspace.root).as_posix()
        for line in preflight.screen(opened, expected, run, sleep):
            progress.say(line)
        state = loop.fit(opened, progress)
    for line in looking_back(opened.run.path, opened.run.document):
        progress.say(line)
    if as_json:
        common.print_json(opened.run.document)
    else:
        click.echo(f"{run}: {state}, {opened.run.document['reason']}")
        click.echo(f"next: {following(state, smoke)}", err=True)
    ctx.exit(0 if state == "completed" else 130)


def looking_back(run: Path, document: dict[str, Any]) -> list[str]:
    """Draw the run as probe.png in its folder; what a person should know of it, a line each."""
    past = history.read(run, document)
    warning = history.overfitting(past.probes, past.checkpoints)
    try:
        monitor.draw(run, run / PICTURE)
        drawn = f"losses     {run.name}/{PICTURE}"
    except OSError as error:  # a full disk takes no picture; the fit is done all the same
        drawn = f"warning: no {PICTURE}: {error}"
    return [drawn, *([f"warning: {warning}"] if warning else [])]


def following(state: str, smoke: bool) -> str:
    if state != "completed":
        return "finetune fit --smoke" if smoke else "finetune fit --resume latest"
    return f"gate check 07 --phase {'smoke' if smoke else 'full'}"
