"""Whether the real command line takes what a mend names."""

import importlib
import shlex
from collections.abc import Callable

import click
import pytest


@pytest.fixture
def parse_command() -> Callable[[str], None]:
    from gates.cli import cli
    from runtime.cli import COMMANDS

    def parse(line: str) -> None:
        program, name, *arguments = shlex.split(line)
        known: click.Command | None
        if program == "gate":
            known = cli.get_command(click.Context(cli), name)
        else:
            known = importlib.import_module(COMMANDS[name][0]).command if name in COMMANDS else None
        assert known is not None, line
        known.make_context(name, arguments)

    return parse
