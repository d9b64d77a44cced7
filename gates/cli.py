"""`gate`: parse, call, render, exit.

Exit status: 0 PASS, 1 FAIL, 2 a bad command line, 3 a check could not be made, 130 Ctrl-C.
"""

import importlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

COMMANDS: dict[str, str] = {
    "status": "Judge everything now: a line per gate, and the next command.",
    "next": "The one action that leads on: a command, or what to edit before it.",
    "check": "Judge gate NN, after all gates before it.",
    "explain": "What gate NN measures, its thresholds, why, and what mends it.",
    "verify": "Judge the stored verdicts again, here or on another machine.",
    "skip": "Leave a step out on purpose; only 06 may be.",
    "selftest": "Plant faults in healthy evidence: does each turn the right check?",
    "report": "Write everything down as one HTML page, or as a bundle to verify.",
    "diagnose": "Name the known fault that a log shows, its cause, and what mends it.",
    "schema": "Print a published schema; without NAME list them.",
    "install": "Copy the skills to where a coding agent looks for them.",
}
"""Name -> the line in `gate --help`; the module is gates.commands.NAME, its attribute `command`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status. The one place where exceptions become one."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a cp1252 console must not die on a caption of the dataset
            stream.reconfigure(errors="replace")
    place = Place()
    try:
        given = None if arguments is None else list(arguments)
        return int(cli.main(args=given, prog_name="gate", standalone_mode=False, obj=place) or 0)
    except click.ClickException as error:
        error.show()
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("stopped", err=True)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 3
    except Exception as error:
        return _crashed(error, place)


@dataclass(slots=True)
class Place:
    """Where the error boundary may leave its log, once a command has said it."""

    folder: Path | None = None


def _crashed(error: Exception, place: Place) -> int:
    log = (place.folder or Path.cwd()) / "error.log"
    click.echo(f"gate: error: {type(error).__name__}: {error}", err=True)
    try:
        log.write_text(traceback.format_exc(), encoding="utf-8", newline="\n")
        click.echo(f"gate: the traceback is in {log}; nothing was judged to pass", err=True)
    except OSError:
        click.echo(traceback.format_exc(), err=True)
    return 3


class Group(click.Group):
    """Lists commands from the table above, so that --help imports none of them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"gates.commands.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], list(COMMANDS), n=1)
            known = f"did you mean {near[0]}?" if near else "there are " + ", ".join(COMMANDS)
            ctx.fail(f"no such command {args[0]!r}; {known}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="aipc-finetune", prog_name="gate")
def cli() -> None:
    """Judge the steps of a fine-tune by the evidence that they left: PASS or FAIL, and what to do.

    Exit status: 0 PASS, 1 FAIL, 2 bad command line, 3 a check could not be made, 130 Ctrl-C.
    """
