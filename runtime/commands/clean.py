"""finetune clean [--cache] [--dry-run]"""

import shutil
from pathlib import Path
from typing import Any

import click

from runtime.cache.store import ENTRY, TENSORS, Store
from runtime.commands import common
from runtime.config.load import load_config
from runtime.index import Index
from runtime.training import checkpoints, record
from runtime.training.record import Run
from runtime.workspace import Workspace


@click.command(cls=common.Command)
@click.option("--cache", "with_cache", is_flag=True, help="Also remove cache entries of earlier settings.")
@click.option("--dry-run", is_flag=True, help="Only list what would go.")
@common.workspace_option
@common.json_option
def command(with_cache: bool, dry_run: bool, workspace: Workspace, as_json: bool) -> None:
    """Reduce each run to one -last- checkpoint and remove half-written folders; never an adapter."""
    config = load_config(workspace.config_path).config
    project = record.project(workspace, config.logging)
    doomed = [path for run, document in record.runs(project) for path in _surplus(run, document)]
    if with_cache:
        index = Index.open(workspace.index_path)
        doomed += Store(workspace.resolve(config.cache.cache_dir), index).unlisted()
    root = workspace.root
    names = [(path.relative_to(root) if path.is_relative_to(root) else path).as_posix() for path in doomed]
    if not dry_run:
        for path in doomed:
            _remove(path)
    if as_json:
        common.print_json({"removed": [] if dry_run else names, "would_remove": names if dry_run else []})
        return
    for name in names:
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}")
    click.echo(f"{len(names)} folders", err=True)


def _surplus(run: Path, document: dict[str, Any]) -> list[Path]:
    """Older -last- checkpoints and what a kill left half made; nothing of a run that still goes."""
    if record.is_alive(document):
        return []
    half_made = [p for p in run.iterdir() if p.is_dir() and p.name.startswith(".checkpoint-")]
    return [*checkpoints.lasts(run)[:-1], *half_made]


def _remove(path: Path) -> None:
    if checkpoints.LAST.fullmatch(path.name):
        checkpoints.remove(Run(path=path.parent), path, "finetune clean")
    elif path.name.startswith(".checkpoint-"):
        shutil.rmtree(path)
    else:  # a cache entry: only the files that we wrote there
        for name in (TENSORS, ENTRY):
            (path / name).unlink(missing_ok=True)
        if not any(path.iterdir()):
            path.rmdir()
