"""finetune cache"""

from dataclasses import asdict

import click

from runtime import files
from runtime.cache import build
from runtime.cache.build import Summary
from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.config.resolve import resolve
from runtime.planning import limit
from runtime.progress import Progress
from runtime.workspace import Workspace

SHOWN = 20


@click.command(cls=LongCommand)
@common.workspace_option
@common.json_option
def command(workspace: Workspace, as_json: bool) -> None:
    """Encode what is missing; a second run with nothing changed loads no model."""
    config = resolve(workspace, load_config(workspace.config_path).config).config
    progress = Progress()
    limit.enforce(workspace, config, "cache", progress.say)
    summary = build.build(build.plan(workspace, config), progress)
    if as_json:
        common.print_json(asdict(summary))
    else:
        show(summary)


def show(summary: Summary) -> None:
    """Counts and bytes per kind, why entries were built, and what was cut."""
    rows = [("entries", str(summary.entries), ""), ("kept", str(summary.kept), "")]
    rows.append(("built", str(summary.built), ""))
    rows += [(f"  {reason}", str(len(ids)), "") for reason, ids in summary.reasons.items()]
    rows += [
        (kind, str(count), f"{summary.bytes[kind] / files.MIB:.1f}")
        for kind, count in sorted(summary.tensors.items())
    ]
    rows += [("left over", str(summary.left_over), "")]
    common.print_table("cache", ("what", "count", "MiB"), rows)
    for note in summary.notes[:SHOWN]:
        click.echo(f"warning: {note}", err=True)
    if len(summary.notes) > SHOWN:
        click.echo(f"warning: and {len(summary.notes) - SHOWN} more, all in --json", err=True)
    if summary.left_over:
        click.echo("left over are entries of earlier settings: finetune clean --cache", err=True)
