"""What the commands of `gate` share: their options, their workspace, how they print."""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gates.reports.text import Style
    from gates.workspace import Workspace


def options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--json", "as_json", is_flag=True, help="JSON to stdout.")(command)
    return click.option(
        "--workspace",
        "-w",
        default=".",
        metavar="DIR",
        help="The directory that `finetune init` made.  [default: .]",
    )(command)


def opened(workspace: str, **options: Any) -> "Workspace":
    from gates.workspace import NotAWorkspaceError, Workspace

    try:
        found = Workspace.open(Path(workspace), **options)
    except NotAWorkspaceError as error:
        raise click.UsageError(str(error)) from error
    click.get_current_context().obj.folder = found.root / ".gates"
    return found


def numbers(text: str) -> list[str]:
    from gates.registry import UnknownGateError, resolve

    try:
        return resolve(text)
    except UnknownGateError as error:
        raise click.BadParameter(str(error), param_hint="NN") from error


def style() -> "Style":
    from gates.reports.text import coloured, plain

    bare = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return plain if bare else coloured


def print_json(value: Any) -> None:
    from gates.verdict import render

    click.echo(render(value), nl=False)
