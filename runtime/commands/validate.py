"""finetune validate [--checkpoint best|last|PATH]"""

import click

from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.inference import validate
from runtime.progress import Progress
from runtime.training import record
from runtime.workspace import Workspace


@click.command(cls=LongCommand)
@click.option(
    "--checkpoint",
    default="best",
    show_default=True,
    metavar="best|last|PATH",
    help="Which adapter of the newest full run; best is by the held-out probe.",
)
@common.workspace_option
@common.json_option
def command(checkpoint: str, workspace: Workspace, as_json: bool) -> None:
    """Paint the held-out samples with base and adapter, from the same noise, into one picture."""
    loaded = load_config(workspace.config_path)
    logging = loaded.config.logging
    project = record.project(workspace, logging)
    folder = validate.find_checkpoint(project, checkpoint, workspace.root)
    result = validate.validate(workspace, loaded, folder, Progress())
    if as_json:
        common.print_json(result.data)
        return
    mean = result.data["heldout_mean"]
    rows = [("checkpoint", f"{result.data['run']}/{result.checkpoint}")]
    rows += [("samples", str(len(result.data["samples"])))]
    rows += [
        (f"held-out loss, {name}", "not finite" if value is None else f"{value:.4f}")
        for name, value in mean.items()
    ]
    common.print_table("validation", ("what", "value"), rows)
    click.echo(result.grid.relative_to(workspace.root).as_posix())
    click.echo("next: gate check 08", err=True)
