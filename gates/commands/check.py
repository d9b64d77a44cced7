"""gate check NN"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gates.commands import common

if TYPE_CHECKING:
    from gates.verdict import Verdict

PHASES = ("cache", "smoke", "full")
FORMATS = ("text", "json", "junit", "github")


@click.command()
@click.argument("nn", metavar="NN")
@click.option("--phase", type=click.Choice(PHASES), help="One part of gate 07.")
@click.option("--run", "run_dir", metavar="DIR", help="Judge this run instead of the newest of its kind.")
@click.option("--format", "form", type=click.Choice(FORMATS), help="What to print.  [default: text]")
@click.option("--output", metavar="FILE", help="Write it to this file too.")
@click.option("--strict", is_flag=True, help="Advisory checks count as required.")
@click.option(
    "--require-device", type=click.Choice(("xpu", "cuda", "cpu")), help="Fail if the run was elsewhere."
)
@common.options
def command(
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
    numbers = common.numbers(nn)
    if phase and not (len(numbers) == 1 and phase in registry.load(numbers[0]).phases):
        raise click.UsageError(f"gate {nn} has no phase {phase}")
    foreign = _foreign(workspace, run_dir, numbers)
    if foreign is not None:
        return _check_foreign(foreign, phase, strict, require_device, "json" if as_json else form, output)
    opened = common.opened(workspace, chosen_run=_run(workspace, run_dir), require_device=require_device)
    judged = judge_up_to(opened, numbers[-1], strict=strict)
    for item in judged:
        item.write(opened)
    wanted = [item.of(phase) for item in judged if item.whole.gate in numbers]
    return _report(wanted, "json" if as_json else form, output, alone=len(numbers) == 1)


def _report(verdicts: Sequence["Verdict"], form: str | None, output: str | None, *, alone: bool) -> int:
    click.echo(_render(verdicts, form or "text", alone=alone), nl=False)
    if output:
        _write_output(Path(output), verdicts, form or "text", alone=alone)
    if form not in (None, "text"):
        from gates.reports.text import line

        for verdict in verdicts:
            click.echo(line(verdict), err=True)
    return _worst(verdicts)


def _run(workspace: str, chosen: str | None) -> Path | None:
    if chosen is None:
        return None
    for base in (Path(chosen), Path(workspace) / chosen):
        if (base / "run.json").is_file():
            return base.resolve()
    from gates.qflux.verdict import SHAPES

    raise click.UsageError(f"--run {chosen}: no run of a known trainer; {SHAPES}")


def _foreign(workspace: str, chosen: str | None, numbers: list[str]) -> Path | None:
    """The run directory of another trainer that --run means, if it is one."""
    if chosen is None:
        return None
    from gates.qflux.run import looks_like

    places = (Path(chosen), Path(workspace) / chosen)
    if any((base / "run.json").is_file() for base in places):
        return None
    found = next((base for base in places if looks_like(base)), None)
    if found is not None and numbers != ["07"]:
        raise click.UsageError(f"--run {chosen} is a run of qflux: only gate 07 judges those, by itself")
    return found


def _check_foreign(
    run: Path,
    phase: str | None,
    strict: bool,
    require_device: str | None,
    form: str | None,
    output: str | None,
) -> int:
    """Outside of the chain: no workspace is needed, and no verdict is stored."""
    from gates.qflux.verdict import judge

    verdict = judge(run, strict=strict, require_device=require_device)
    if phase not in (None, verdict.phase):
        raise click.UsageError(f"{run} is a {verdict.phase} run of qflux: it has no phase {phase}")
    return _report([verdict], form, output, alone=True)


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
    return text.render(verdicts, style=common.style() if styled else text.plain) + "\n"


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
