"""`gate`: parse, call, render, exit.

Exit status: 0 PASS, 1 FAIL, 2 a bad command line, 3 a check could not be made, 130 Ctrl-C.
"""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from gates.reports.text import Style
    from gates.verdict import Verdict
    from gates.workspace import Workspace

PHASES = ("cache", "smoke", "full")
FORMATS = ("text", "json", "junit", "github")


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
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.commands and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], list(self.commands), n=1)
            known = f"did you mean {near[0]}?" if near else "there are " + ", ".join(self.commands)
            ctx.fail(f"no such command {args[0]!r}; {known}")
        return super().resolve_command(ctx, args)


@click.group(cls=Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="aipc-finetune", prog_name="gate")
def cli() -> None:
    """Judge the steps of a fine-tune by the evidence that they left: PASS or FAIL, and what to do.

    Exit status: 0 PASS, 1 FAIL, 2 bad command line, 3 a check could not be made, 130 Ctrl-C.
    """


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--json", "as_json", is_flag=True, help="JSON to stdout.")(command)
    return click.option(
        "--workspace",
        "-w",
        default=".",
        metavar="DIR",
        help="The directory that `finetune init` made.  [default: .]",
    )(command)


def _open(workspace: str, **options: Any) -> "Workspace":
    from gates.workspace import NotAWorkspaceError, Workspace

    try:
        opened = Workspace.open(Path(workspace), **options)
    except NotAWorkspaceError as error:
        raise click.UsageError(str(error)) from error
    click.get_current_context().obj.folder = opened.root / ".gates"
    return opened


def _numbers(text: str) -> list[str]:
    from gates.registry import UnknownGateError, resolve

    try:
        return resolve(text)
    except UnknownGateError as error:
        raise click.BadParameter(str(error), param_hint="NN") from error


def _style() -> "Style":
    from gates.reports.text import coloured, plain

    bare = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not sys.stdout.isatty()
    return plain if bare else coloured


# ---- status


@cli.command()
@_common
def status(workspace: str, as_json: bool) -> int:
    """Judge everything now: a line per gate, and the next command."""
    from gates import registry
    from gates.chain import judge_up_to
    from gates.reports import text

    opened = _open(workspace)
    verdicts = [judged.whole for judged in judge_up_to(opened, registry.numbers()[-1])]
    if as_json:
        _print_json([_brief(verdict) for verdict in verdicts])
    else:
        rows = [("gate", "skill", "verdict", "outcome", "first failing check", "next")]
        rows += [
            (v.gate, v.name, v.verdict, v.outcome, text.first_failure(v), v.next_command) for v in verdicts
        ]
        click.echo(text.table(rows, _style()))
    for verdict in verdicts:
        if not verdict.passes:
            return verdict.exit_code
    return 0


def _brief(verdict: "Verdict") -> dict[str, Any]:
    document = verdict.to_json()
    names = ("gate", "name", "skill", "verdict", "outcome", "summary", "first_failure", "blocked_by")
    return {name: document[name] for name in (*names, "next_command", "device", "run", "counts")}


def _print_json(value: Any) -> None:
    from gates.verdict import render

    click.echo(render(value), nl=False)


@cli.command("next")
@_common
def next_(workspace: str, as_json: bool) -> int:
    """The one action that leads on: a command, or what to edit before it."""
    from dataclasses import asdict

    from gates import advice, registry
    from gates.chain import judge_up_to
    from gates.workspace import NotAWorkspaceError, Workspace

    try:
        judged = judge_up_to(Workspace.open(Path(workspace)), registry.numbers()[-1])
        action = advice.next_action(judged)
    except NotAWorkspaceError as error:
        action = advice.no_workspace(str(error))
    if as_json:
        _print_json(asdict(action))
    else:
        click.echo(action.instruction)
        click.echo(f"{action.kind}: {action.because}", err=True)
    return 0


# ---- check


@cli.command()
@click.argument("nn", metavar="NN")
@click.option("--phase", type=click.Choice(PHASES), help="One part of gate 07.")
@click.option("--run", "run_dir", metavar="DIR", help="Judge this run instead of the newest of its kind.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="What to print.  [default: text]")
@click.option("--output", metavar="FILE", help="Write it to this file too.")
@click.option("--strict", is_flag=True, help="Advisory checks count as required.")
@click.option(
    "--require-device", type=click.Choice(("xpu", "cuda", "cpu")), help="Fail if the run was elsewhere."
)
@_common
def check(
    nn: str,
    phase: str | None,
    run_dir: str | None,
    form: str | None,
    output: str | None,
    strict: bool,
    require_device: str | None,
    workspace: str,
    as_json: bool,
) -> int:
    """Judge gate NN, after all gates before it.

    NN is a number (7 or 07), a skill's name, all, or a range (02..07).
    """
    from gates import registry
    from gates.chain import judge_up_to

    if as_json and form not in (None, "json"):
        raise click.UsageError(f"--json and --format {form} are two wishes: give one")
    numbers = _numbers(nn)
    if phase and not (len(numbers) == 1 and phase in registry.load(numbers[0]).phases):
        raise click.UsageError(f"gate {nn} has no phase {phase}")
    opened = _open(workspace, chosen_run=_run(workspace, run_dir), require_device=require_device)
    judged = judge_up_to(opened, numbers[-1], strict=strict)
    for item in judged:
        item.write(opened)
    wanted = [item.of(phase) for item in judged if item.whole.gate in numbers]
    report = _render(wanted, "json" if as_json else form or "text", alone=len(numbers) == 1)
    click.echo(report, nl=False)
    if output:
        _write_output(Path(output), wanted, "json" if as_json else form or "text", alone=len(numbers) == 1)
    if as_json or form not in (None, "text"):
        from gates.reports.text import line

        for verdict in wanted:
            click.echo(line(verdict), err=True)
    return _worst(wanted)


def _run(workspace: str, chosen: str | None) -> Path | None:
    if chosen is None:
        return None
    for base in (Path(chosen), Path(workspace) / chosen):
        if (base / "run.json").is_file():
            return base.resolve()
    raise click.UsageError(f"--run {chosen}: no run.json in it")


def _worst(verdicts: Sequence["Verdict"]) -> int:
    """Of several, the first that does not pass says why: those after it are only blocked."""
    return next((verdict.exit_code for verdict in verdicts if not verdict.passes), 0)


def _render(verdicts: Sequence["Verdict"], form: str, *, alone: bool, styled: bool = True) -> str:
    from gates.reports import github, junit, text
    from gates.verdict import render

    if form == "json":
        documents = [verdict.to_json() for verdict in verdicts]
        return render(documents[0] if alone else documents)
    if form == "junit":
        return junit.render(verdicts)
    if form == "github":
        _step_summary(verdicts)
        return github.render(verdicts)
    return text.render(verdicts, style=_style() if styled else text.plain) + "\n"


def _step_summary(verdicts: Sequence["Verdict"]) -> None:
    from gates.reports import github

    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if path:
        with Path(path).open("a", encoding="utf-8", newline="\n") as handle:
            handle.write(github.summary(verdicts))


def _write_output(path: Path, verdicts: Sequence["Verdict"], form: str, *, alone: bool) -> None:
    from gates.reports import github
    from gates.verdict import write_text

    content = (
        github.render(verdicts) if form == "github" else _render(verdicts, form, alone=alone, styled=False)
    )
    write_text(path, content)


# ---- skip


@cli.command()
@click.argument("nn", metavar="NN")
@click.option("--reason", required=True, metavar="TEXT", help="Why; the verdict will say it.")
@_common
def skip(nn: str, reason: str, workspace: str, as_json: bool) -> int:
    """Leave a step out on purpose. Only 06 may be, and its gate still asks whether the plan fits without it."""
    from gates import registry
    from gates.verdict import render, utc_now, write_text

    (number, *others) = _numbers(nn)
    if others or not registry.load(number).may_be_skipped:
        raise click.UsageError(f"gate {nn} can't be skipped; only 06 can")
    if not reason.strip():
        raise click.BadParameter("say why, in a few words", param_hint="--reason")
    opened = _open(workspace)
    document = {"schema": "skip/1", "gate": number, "reason": reason.strip(), "at": utc_now()}
    write_text(opened.root / ".gates" / "skips" / f"{number}.json", render(document))
    if as_json:
        _print_json(document)
    else:
        click.echo(f"gate {number} is to be skipped: {document['reason']}")
        click.echo(f"next: gate check {number}", err=True)
    return 0


# ---- explain and schema


@cli.command()
@click.argument("nn", metavar="NN")
@click.argument("check_id", metavar="[CHECK]", required=False)
@_common
def explain(nn: str, check_id: str | None, workspace: str, as_json: bool) -> int:
    """What gate NN measures, why, and what mends it. Needs no workspace."""
    from gates.registry import load

    specs = [spec for number in _numbers(nn) for spec in load(number).specs]
    chosen = [spec for spec in specs if check_id in (None, spec.id)]
    if not chosen:
        known = ", ".join(dict.fromkeys(spec.id for spec in specs))
        raise click.BadParameter(f"{check_id}: no such check; there are {known}", param_hint="CHECK")
    if as_json:
        _print_json([_explained(spec) for spec in chosen])
    else:
        click.echo("\n\n".join(_explanation(_explained(spec)) for spec in chosen))
    return 0


def _explained(spec: Any) -> dict[str, Any]:
    names = ("id", "phase", "title", "section", "why", "measures", "required", "may_skip", "remedy")
    return {**{name: getattr(spec, name) for name in names}, "needs": list(spec.needs)}


def _explanation(spec: dict[str, Any]) -> str:
    phase = f" ({spec['phase']})" if spec["phase"] else ""
    rows = [
        ("measures", spec["measures"]),
        ("because", spec["why"]),
        ("mend", spec["remedy"]),
        ("needs", ", ".join(spec["needs"])),
        ("may skip", f"if {spec['may_skip']}" if spec["may_skip"] else ""),
        ("advisory", "" if spec["required"] else "it never fails the gate, unless --strict"),
        ("section", spec["section"]),
    ]
    lines = [f"{spec['id']}{phase}: {spec['title']}"]
    return "\n".join(lines + [f"  {name:<9} {text}" for name, text in rows if text])


@cli.command()
@click.argument("name", required=False)
@_common
def schema(name: str | None, workspace: str, as_json: bool) -> int:
    """Print a published schema; without NAME list them."""
    from gates.schema import NAMES, load

    if name is None:
        if as_json:
            _print_json(list(NAMES))
        else:
            click.echo("\n".join(NAMES))
        return 0
    if name not in NAMES:
        raise click.BadParameter(f"{name}: there are {', '.join(NAMES)}", param_hint="NAME")
    _print_json(load(name))
    return 0
