"""finetune demo [--workspace DIR]"""

import sys
from pathlib import Path

import click

from runtime.commands import common
from runtime.config.model import DEVICES
from runtime.demo import series


@click.command(cls=common.Command)
@click.option(
    "--workspace",
    metavar="DIR",
    default="demo-workspace",
    show_default=True,
    help="Where to put the demo's workspace; a second run does only what is stale.",
)
@click.option("--device", type=click.Choice(DEVICES), default="cpu", show_default=True)
@click.pass_context
def command(ctx: click.Context, workspace: str, device: str) -> None:
    """Teach the embedded tiny base a new edit, gate by gate, and show before and after."""
    root = Path(workspace).expanduser().resolve()
    series.prepare(root, device)
    code = series.run(root)
    print(file=sys.stderr)
    series.verdicts(root)
    for line in series.what_next(root) if code == 0 else ["next: gate status"]:
        click.echo(line, err=True)
    ctx.exit(code)
