"""finetune export --format diffusers|comfyui|kohya [--checkpoint best|last|PATH] [--out FILE]"""

import json
import math
import shutil
from pathlib import Path

import click

from runtime import files
from runtime.commands import common
from runtime.config.load import load_config
from runtime.errors import UserError
from runtime.inference import validate
from runtime.training import naming, record, trainables
from runtime.workspace import Workspace


@click.command(cls=common.Command)
@click.option("--format", "form", type=click.Choice(naming.FORMATS), default="diffusers", show_default=True)
@click.option(
    "--checkpoint", default="best", show_default=True, metavar="best|last|PATH", help="Which adapter."
)
@click.option("--out", metavar="FILE", help="Where to write.  [default: exports/PROJECT-FORMAT.safetensors]")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
@common.workspace_option
@common.json_option
def command(
    form: str, checkpoint: str, out: str | None, force: bool, workspace: Workspace, as_json: bool
) -> None:
    """Write the adapter under the names that another tool reads, its scale kept."""
    logging = load_config(workspace.config_path).config.logging
    project = record.project(workspace, logging)
    source = validate.find_checkpoint(project, checkpoint, workspace.root) / trainables.WEIGHTS
    path = workspace.resolve(out or f"exports/{logging.tracker_project_name}-{form}.safetensors")
    if path.exists() and not force:
        raise UserError(f"{path} exists and is left as it is", remedy="finetune export --force")
    write(source, path, form)
    if as_json:
        digest = files.file_digest(path)
        common.print_json({"path": str(path), "format": form, "source": str(source), "sha256": digest})
    else:
        click.echo(path)


def write(source: Path, path: Path, form: str) -> None:
    """`source` is the adapter of a checkpoint; `path` gets it under the names of `form`."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    if form == "diffusers":
        files.write_with(path, lambda temporary: shutil.copyfile(source, temporary))
        return
    with safe_open(source, "pt") as handle:
        metadata = json.loads((handle.metadata() or {})["lora_adapter_metadata"])
    rank, alpha = metadata["transformer.r"], metadata["transformer.lora_alpha"]
    if metadata.get("transformer.use_rslora"):
        alpha *= math.sqrt(rank)  # other tools know alpha / r only
    tensors = naming.exported(load_file(source), alpha, form)
    described = {"ss_network_dim": str(rank), "ss_network_alpha": str(alpha), "format": "pt"}
    files.write_with(path, lambda temporary: save_file(tensors, temporary, metadata=described))
