"""What all commands share: their options, the way they print, and the one place where errors end."""

import contextlib
import difflib
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from runtime import files
from runtime.errors import UserError
from runtime.workspace import Workspace

TRAIN_PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "psutil")
INSTALL = 'pip install -e ".[train]" -c constraints.txt'

F = TypeVar("F", bound=Callable[..., Any])


class Failure(click.ClickException):
    """Ends the command: lines on stderr and an exit status."""

    def __init__(self, message: str, *, remedy: str = "", exit_code: int = 1) -> None:
        super().__init__(message)
        self.remedy = remedy
        self.exit_code = exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        click.echo(f"error: {self.message}", err=True)
        if self.remedy:
            click.echo(f"next: {self.remedy}", err=True)


class Command(click.Command):
    """A command whose failures end in `boundary`, also when it is called without the group."""

    def invoke(self, ctx: click.Context) -> Any:
        workspace = ctx.params.get("workspace")
        with boundary(workspace if isinstance(workspace, Workspace) else None):
            return super().invoke(ctx)


@contextlib.contextmanager
def boundary(workspace: Workspace | None) -> Iterator[None]:
    """The one error boundary: every exception becomes lines for a person and an exit status."""
    try:
        yield
    except UserError as error:
        raise Failure(error.message, remedy=error.remedy) from error
    except KeyboardInterrupt as error:
        raise Failure("interrupted", exit_code=130) from error
    except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
        raise
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in TRAIN_PACKAGES:
            raise _unexpected(error, workspace) from error
        raise Failure(f"this command needs {error.name}, which is not installed", remedy=INSTALL) from error
    except Exception as error:  # the boundary: what nobody foresaw is kept in a log, not thrown at the user
        raise _unexpected(error, workspace) from error


def _unexpected(error: Exception, workspace: Workspace | None) -> Failure:
    message = (
        f"unexpected {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    )
    folder = (workspace.root if workspace is not None else Path.cwd()) / ".gates"
    if not folder.is_dir():  # no workspace: leave no trace of one
        folder = Path(tempfile.gettempdir())
    path = folder / ("error.log" if folder.name == ".gates" else "finetune-error.log")
    try:
        files.write_text(path, "".join(traceback.format_exception(error)))
    except OSError:
        return Failure(message, remedy="run the command again from a folder that can be written to")
    return Failure(f"{message}; the traceback is in {path}", remedy=f"gate diagnose {from_here(path)}")


def from_here(path: Path) -> str:
    """`path` for a command line, in any shell: as short as the working directory allows."""
    here = Path.cwd()
    text = path.relative_to(here).as_posix() if path.is_relative_to(here) else str(path)
    return f'"{text}"' if " " in text else text


def as_workspace(ctx: click.Context, parameter: click.Parameter, value: str) -> Workspace:
    return Workspace(Path(value).expanduser().resolve())


def workspace_option(function: F) -> F:
    return click.option(
        "--workspace",
        metavar="DIR",
        default=".",
        show_default=True,
        callback=as_workspace,
        help="The workspace, made by `finetune init`.",
    )(function)


def json_option(function: F) -> F:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document to stdout.")(
        function
    )


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table for a person at a terminal; plain aligned lines for anything else."""
    if sys.stdout.isatty():
        _rich_table(title, columns, rows)
        return
    click.echo(title)
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    for row in (columns, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        click.echo(("  " + "  ".join(cells)).rstrip())


def _rich_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    Console().print(table)


def unknown(what: str, given: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean {close[0]}?" if close else "known: " + ", ".join(known)
    return f"no {what} {given}; {hint}"
