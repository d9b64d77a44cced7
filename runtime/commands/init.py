"""finetune init [DIR] --model MODEL --dataset FOLDER [--device DEVICE]"""

import re
from pathlib import Path
from typing import Any

import click

from runtime import files
from runtime.commands import common
from runtime.config.model import DEVICES
from runtime.errors import UserError
from runtime.workspace import Workspace, python_minor

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


@click.command(cls=common.Command)
@click.argument("directory", metavar="[DIR]", required=False)
@click.option("--model", help="The base: a folder in the diffusers layout, or a hub id.")
@click.option(
    "--dataset",
    metavar="PATH",
    help="A folder that holds training_images/ and control_images/; or a .toml, .jsonl, .csv, .parquet or "
    ".tar file, or a folder of archives.",
)
@click.option("--device", type=click.Choice(DEVICES), help="Where to train.  [default: auto]")
@common.workspace_option
@common.json_option
def command(
    directory: str | None,
    model: str | None,
    dataset: str | None,
    device: str | None,
    workspace: Workspace,
    as_json: bool,
) -> None:
    """Make a workspace, or change what is given of an existing one."""
    if directory is not None:
        workspace = Workspace(Path(directory).expanduser().resolve())
    document = write_target(workspace, model=model, dataset=dataset, device=device)
    if as_json:
        common.print_json(document)
        return
    rows = [(key, str(document[key])) for key in ("model", "dataset", "device", "python")]
    common.print_table(f"workspace {workspace.root}", ("target", "value"), rows)
    click.echo("next: finetune probe, or ask: gate next", err=True)


def write_target(
    workspace: Workspace, *, model: str | None, dataset: str | None, device: str | None
) -> dict[str, Any]:
    """Write .gates/target.json and return it. Raises UserError for a path that isn't there."""
    old = _standing(workspace)
    missing = [
        name for name, value in (("model", model), ("dataset", dataset)) if not value and name not in old
    ]
    if missing:
        raise UserError(
            f"a new workspace needs {' and '.join('--' + name for name in missing)}",
            remedy="finetune init --model FOLDER_OR_HUB_ID --dataset FOLDER",
        )
    _refuse_absent(model, dataset)
    document = {
        "schema": "target/1",
        "device": device or old.get("device", "auto"),
        "model": _model(workspace, model) if model else old["model"],
        "dataset": workspace.refer(Path(dataset), "dataset") if dataset else old["dataset"],
        "python": python_minor(),
        "created_at": old.get("created_at", files.utc_now()),
    }
    files.write_json(workspace.target_path, document)
    return document


def _standing(workspace: Workspace) -> dict[str, Any]:
    """What a target says already; empty where there is none, or one that can't be read: it is written anew."""
    try:
        return workspace.target()
    except UserError:
        return {}


def _refuse_absent(model: str | None, dataset: str | None) -> None:
    if model and not Path(model).expanduser().is_dir() and not HUB_ID.fullmatch(model):
        raise UserError(
            f"--model {model} is neither a folder nor a hub id", remedy="finetune init --model FOLDER"
        )
    if dataset and not Path(dataset).expanduser().exists():
        raise UserError(f"--dataset {dataset} is not there", remedy="finetune init --dataset FOLDER_OR_FILE")


def _model(workspace: Workspace, model: str) -> str:
    path = Path(model).expanduser()
    return workspace.refer(path, "model") if path.is_dir() else model
