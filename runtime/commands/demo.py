"""finetune demo [--workspace DIR] [--detach]"""

import sys

import click

from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.model import DEVICES
from runtime.demo import series
from runtime.workspace import Workspace


@click.command(cls=LongCommand, makes_workspace=True)
@click.option(
    "--workspace",
    metavar="DIR",
    default="demo-workspace",
    show_default=True,
    callback=common.as_workspace,
    help="Where to put the demo's workspace; a second run does only what is stale.",
)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.pass_context
def command(ctx: click.Context, workspace: Workspace, device: str) -> None:
    """Teach the embedded tiny base a new edit, gate by gate, and show before and after."""
    root = workspace.root
    series.prepare(root, device)
    code = series.run(root)
    print(file=sys.stderr)
    series.verdicts(root)
    for line in series.what_next(root) if code == 0 else ["next: gate status"]:
        click.echo(line, err=True)
    ctx.exit(code)
