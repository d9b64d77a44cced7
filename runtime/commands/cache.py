"""finetune cache"""

from dataclasses import asdict

import click

from runtime.cache import build
from runtime.cache.build import Summary
from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.config.resolve import resolve
from runtime.progress import Progress
from runtime.workspace import Workspace


@click.command(cls=LongCommand)
@common.workspace_option
@common.json_option
def command(workspace: Workspace, as_json: bool) -> None:
    """Encode what is missing; a second run with nothing changed loads no model."""
    config = resolve(workspace, load_config(workspace.config_path).config).config
    summary = build.build(build.plan(workspace, config), Progress())
    if as_json:
        common.print_json(asdict(summary))
    else:
        show(summary)


def show(summary: Summary) -> None:
    """Counts per kind, and why entries were built."""
    rows = [("entries", str(summary.entries)), ("kept", str(summary.kept)), ("built", str(summary.built))]
    rows += [(f"  because {reason}", str(count)) for reason, count in summary.reasons.items()]
    rows += [(name, str(count)) for name, count in sorted(summary.tensors.items())]
    rows += [("size", f"{summary.size_gib * 1024:.1f} MiB"), ("left over", str(summary.left_over))]
    common.print_table("cache", ("what", "count"), rows)
    if summary.left_over:
        click.echo("left over are entries of earlier settings: finetune clean --cache", err=True)
