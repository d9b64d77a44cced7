"""finetune recommend [--steps N] [--force | --keep]"""

from functools import partial
from pathlib import Path

import click
import yaml

from runtime import files
from runtime.commands import common
from runtime.config.load import load_config, parse
from runtime.config.model import Config
from runtime.config.recommend import Value, recommend
from runtime.data import manifest
from runtime.data.manifest import Manifest
from runtime.data.sources import dataset_file
from runtime.errors import UserError
from runtime.planning import architecture, ladder, plan
from runtime.planning.architecture import Architecture
from runtime.quantize import made
from runtime.workspace import Workspace


@click.command(cls=common.Command)
@click.option(
    "--steps", type=click.IntRange(min=1), metavar="N", help="Length of the run, instead of the rule's."
)
@click.option("--force", is_flag=True, help="Overwrite an existing config.yaml.")
@click.option("--keep", is_flag=True, help="Leave an existing config.yaml alone and say so.")
@common.workspace_option
@common.json_option
def command(steps: int | None, force: bool, keep: bool, workspace: Workspace, as_json: bool) -> None:
    """Write config.yaml from target, dataset and base, each value with its reason."""
    kept = keep and not force and workspace.config_path.exists()
    if kept:
        click.echo(f"{workspace.config_path} is kept as it is", err=True)
    else:
        write_config(workspace, steps=steps, force=force)
    if as_json:
        loaded = load_config(workspace.config_path)
        common.print_json({"path": "config.yaml", "config_digest": loaded.digest, "config": loaded.raw})
    elif not kept:
        click.echo(workspace.config_path.read_text(encoding="utf-8"), nl=False)
        click.echo(f"wrote {workspace.config_path}\nnext: finetune plan", err=True)


def write_config(workspace: Workspace, *, steps: int | None = None, force: bool = False) -> None:
    """Raises UserError where a config.yaml exists and `force` is not given."""
    target = workspace.target()
    if workspace.config_path.exists() and not force:
        raise UserError(
            f"{workspace.config_path} exists and is left as it is",
            remedy="finetune plan, or finetune recommend --force to overwrite it",
        )
    listed = manifest.load(workspace)
    base = architecture.read(plan.locate_model(workspace, target["model"]))
    write = partial(
        recommend,
        listed,
        base,
        model=target["model"],
        device=target["device"],
        steps=steps,
        cache_dir=_cache_dir(workspace, target["dataset"]) if listed.layout == "toml" else None,
    )
    text = write()
    needed = _needed(workspace, parse(yaml.safe_load(text)), listed, base)
    files.write_text(workspace.config_path, write(needed=needed) if needed else text)


def _needed(workspace: Workspace, config: Config, listed: Manifest, base: Architecture) -> list[Value]:
    """What makes it fit into this machine; nothing where its device is not at hand: `finetune plan` then says so."""
    try:
        found = plan.look(workspace, config)
        model = plan.locate_model(workspace, config.model.pretrained_model_name_or_path)
    except UserError:
        return []
    quantized = made.find(workspace, model, config)
    rungs = ladder.recommended(config, listed, base, found, quantized) or []
    why = f"or it would not fit into {found.gib:.1f} GiB"
    return [Value(key=rung.key, value=rung.value, reason=f"{why}; {rung.cost}") for rung in rungs]


def _cache_dir(workspace: Workspace, reference: str) -> str | None:
    """The first cache_directory of a dataset file, as config.yaml refers to it; relative ones are the file's."""
    file = workspace.resolve(reference)
    named = dataset_file.read(file).cache_directories
    return workspace.refer(file.parent / Path(named[0]).expanduser(), "cache") if named else None
