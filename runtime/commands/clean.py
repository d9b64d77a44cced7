"""finetune clean [--cache] [--dry-run]"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from runtime import files
from runtime.cache.store import ENTRY, PARTS, TENSORS, Store
from runtime.commands import common
from runtime.config.load import load_config
from runtime.config.model import Config
from runtime.errors import UserError
from runtime.index import Index
from runtime.training import checkpoints, record
from runtime.training.record import Run
from runtime.workspace import Workspace

# As runtime.memory.modulation names them, whose import takes seconds.
TABLES, TABLE_INDEX = "models/modulation", "table.json"
TABLE, ROWS = re.compile("[0-9a-f]{16}"), re.compile(r"[0-9a-f]{16}\.bin|\.[0-9a-f]{16}\.bin\.tmp")


@click.command(cls=common.Command)
@click.option(
    "--cache",
    "with_cache",
    is_flag=True,
    help="Also remove cache entries of earlier settings, what a killed cache phase left, and all tables of "
    "modulations, which a fit makes again.",
)
@click.option("--dry-run", is_flag=True, help="Only list what would go.")
@common.workspace_option
@common.json_option
def command(with_cache: bool, dry_run: bool, workspace: Workspace, as_json: bool) -> None:
    """Reduce each run to one -last- checkpoint and remove half-written folders; never an adapter."""
    config = load_config(workspace.config_path).config
    project = record.project(workspace, config.logging)
    runs = list(record.runs(project))
    doomed = [path for run, document in runs for path in _surplus(run, document)]
    if with_cache:
        doomed += _of_cache(_store(workspace, config))
        if not any(record.is_alive(document) for _, document in runs):
            doomed += _tables(workspace.root / TABLES)
    root = workspace.root
    names = [(path.relative_to(root) if path.is_relative_to(root) else path).as_posix() for path in doomed]
    sizes = [_size(path) for path in doomed]
    if not dry_run:
        for path in doomed:
            _remove(path, workspace, config)
    if as_json:
        common.print_json({"removed": [] if dry_run else names, "would_remove": names if dry_run else []})
        return
    for name, size in zip(names, sizes, strict=True):
        click.echo(f"{'would remove' if dry_run else 'removed'} {name}, {_shown(size)}")
    click.echo(f"{len(names)} folders, {_shown(sum(sizes))}", err=True)


def _store(workspace: Workspace, config: Config) -> Store:
    return Store(workspace.resolve(config.cache.cache_dir), Index.open(workspace.index_path))


def _surplus(run: Path, document: dict[str, Any]) -> list[Path]:
    """Older -last- checkpoints and what a kill left half made; nothing of a run that still goes."""
    if record.is_alive(document):
        return []
    half_made = [p for p in run.iterdir() if p.is_dir() and p.name.startswith(".checkpoint-")]
    return [*checkpoints.lasts(run)[:-1], *half_made]


def _of_cache(store: Store) -> list[Path]:
    """Of a cache phase that did not end, its parts alone: which entries are wanted is not known yet."""
    return [store.root / PARTS] if store.has_parts() else store.unlisted()


def _tables(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.glob("*") if TABLE.fullmatch(path.name) and (path / TABLE_INDEX).is_file()
    )


def _files_of_table(folder: Path) -> Iterator[Path]:
    """Those that we wrote there; the index last, by which the rest is known to be ours."""
    yield from (path for path in folder.iterdir() if ROWS.fullmatch(path.name))
    yield folder / TABLE_INDEX


def _size(folder: Path) -> int:
    """Bytes."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _shown(size: int) -> str:
    return f"{size / files.GIB:.2f} GiB" if size >= 0.01 * files.GIB else f"{size / 2**20:.2f} MiB"


def _remove(path: Path, workspace: Workspace, config: Config) -> None:
    if checkpoints.LAST.fullmatch(path.name):
        checkpoints.remove(Run(path=path.parent), path, "finetune clean")
    elif path.name.startswith(".checkpoint-"):
        shutil.rmtree(path)
    elif path.name == PARTS:
        _store(workspace, config).drop_parts()
    elif path.parent == workspace.root / TABLES:
        _remove_files(path, list(_files_of_table(path)))
    else:  # a cache entry
        _remove_files(path, [path / TENSORS, path / ENTRY])


def _remove_files(folder: Path, ours: list[Path]) -> None:
    try:
        for path in ours:
            path.unlink(missing_ok=True)
    except PermissionError as error:  # Windows keeps a file that a process has mapped
        raise UserError(
            f"{folder} is in use: {error}",
            remedy="wait for finetune fit, validate or sample, then finetune clean",
        ) from error
    if not any(folder.iterdir()):
        folder.rmdir()
