"""finetune fit [--smoke] [--resume latest|PATH] [--detach]"""

from typing import TYPE_CHECKING

import click

from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.progress import Progress
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from runtime.training.session import Session


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
    from runtime.training import loop, session

    loaded = load_config(workspace.config_path)
    opened = session.launch(
        workspace, loaded, smoke=smoke, resume=resume or (None if smoke else loaded.config.resume)
    )
    run = opened.run.path.relative_to(workspace.root).as_posix()
    progress = Progress()
    for line in preflight(opened, run):
        progress.say(line)
    state = loop.fit(opened, progress)
    if as_json:
        common.print_json(opened.run.document)
    else:
        click.echo(f"{run}: {state}, {opened.run.document['reason']}")
        click.echo(f"next: {following(state, smoke)}", err=True)
    ctx.exit(0 if state == "completed" else 130)


def preflight(opened: "Session", run: str) -> list[str]:
    """One screen: what is trained, on what, for how long."""
    document, config = opened.run.document, opened.config
    trainable = document["trainable"]
    train = config.train
    per_step = config.data.batch_size * train.gradient_accumulation_steps
    origin = document["resumed_from"]
    started = f", resumed from {origin['run']} at step {origin['step']}" if origin else ""
    return [
        f"run        {run} ({document['kind']}){started}",
        f"trains     LoRA rank {config.model.lora.r}, {trainable['parameters']:,} parameters, "
        f"scale {trainable['scale']:g}",
        f"base       {document['model']['family']}, {trainable['base_parameters']:,} parameters, "
        f"{config.model.quantize}, {trainable['base_gib']:.3g} GiB on {opened.device.type} ({opened.device.reason})",
        f"data       {len(opened.batches.ids('train'))} training and {len(opened.batches.ids('holdout'))} "
        f"held-out samples, {per_step} a step, {opened.batches.per_epoch} micro-batches an epoch",
        f"length     {opened.planned_steps} steps, checkpoints at {spoken(document['planned_checkpoints'])}",
    ]


def spoken(steps: list[int]) -> str:
    return ", ".join(map(str, steps)) if len(steps) <= 6 else f"{steps[0]}, {steps[1]}, ... {steps[-1]}"


def following(state: str, smoke: bool) -> str:
    if state != "completed":
        return "finetune fit --smoke" if smoke else "finetune fit --resume latest"
    return f"gate check 07 --phase {'smoke' if smoke else 'full'}"
