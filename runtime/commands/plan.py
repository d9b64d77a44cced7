"""finetune plan [--for NAME|all]"""

from collections.abc import Sequence

import click

from runtime import files
from runtime.commands import common
from runtime.config.load import load_config
from runtime.planning.estimate import Phase
from runtime.planning.machines import MACHINES
from runtime.planning.plan import EVIDENCE, Plan, make_plan
from runtime.planning.survey import Answer, survey
from runtime.workspace import Workspace

SHOWN = ("model.quantize", "train.streamed_blocks")


@click.command(cls=common.Command)
@click.option(
    "--for",
    "machine",
    type=click.Choice([*MACHINES, "all"]),
    help="Plan for this kind of machine instead, or show a table of all; nothing is recorded.",
)
@common.workspace_option
@common.json_option
def command(machine: str | None, workspace: Workspace, as_json: bool) -> None:
    """Say what config.yaml needs on this machine, and record it as evidence 04-plan."""
    if machine is not None:
        elsewhere(workspace, list(MACHINES) if machine == "all" else [machine], as_json=as_json)
        return
    plan = record(workspace)
    if as_json:
        common.print_json(plan.to_json())
    else:
        show(plan)
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    if plan.problems:
        first, *others = plan.problems
        for problem in others:
            click.echo(f"error: {problem.message}\nnext: {problem.remedy}", err=True)
        raise first


def elsewhere(workspace: Workspace, names: Sequence[str], *, as_json: bool) -> None:
    """On machines that are not at hand: a plan in full for one, a row each for more."""
    answers = survey(workspace, load_config(workspace.config_path), [MACHINES[name] for name in names])
    if as_json:
        common.print_json([answer.to_json() for answer in answers])
        return
    if len(answers) == 1:
        show(answers[0].plan)
    rows = [_row(answer) for answer in answers]
    common.print_table("machines", ("machine", "fits", "device", "of", "host", "of", "most in", "with"), rows)


def _row(answer: Answer) -> tuple[str, ...]:
    """The phase that leaves least; on a machine with unified memory the host's limit is that of both together."""
    plan, found = answer.plan, answer.plan.found
    name, phase = min(plan.phases.items(), key=lambda item: found.spare_gib(item[1]))
    room = f"{found.host_gib:.1f}" + (" together" if found.unified else "")
    chosen = [f"{key.rpartition('.')[2]} {plan.choices[key].value}" for key in SHOWN]
    changes = [f"{rung.key}: {str(rung.value).lower()}" for rung in answer.changes]
    return (
        answer.machine.name,
        "yes" if answer.fits else "no",
        f"{phase.needed_gib:.1f}",
        f"{found.gib:.1f}",
        f"{phase.host_peak_gib:.1f}",
        room,
        name,
        "; ".join([*changes, *chosen]),
    )


def record(workspace: Workspace) -> Plan:
    """Make the plan and write the evidence, also when something stands in its way: the gate judges it."""
    recording = workspace.begin_evidence(EVIDENCE, "finetune plan")
    plan = make_plan(workspace, load_config(workspace.config_path))
    inputs = {"files": {"config.yaml": files.file_digest(workspace.config_path)}}
    recording.write(inputs=inputs, data=plan.to_json())
    return plan


def show(plan: Plan) -> None:
    rows = [row for phase, figures in plan.phases.items() for row in _lines(phase, figures)]
    found = plan.found
    beside = (
        f"{found.host_gib:.1f} GiB with the host's together"
        if found.unified
        else f"{found.host_gib:.1f} of the host"
    )
    title = (
        f"memory on {plan.device}, {plan.budget_gib:.1f} GiB may be filled ({plan.budget_source}), {beside}"
    )
    common.print_table(title, ("phase", "component", "GiB", ""), rows)
    choices = [(key, str(choice.value), choice.reason) for key, choice in sorted(plan.choices.items())]
    common.print_table("choices", ("key", "value", "reason"), choices)
    steps = plan.steps
    click.echo(
        f"steps: {steps.planned} over {steps.samples} samples ({steps.epochs:g} epochs), "
        f"{steps.checkpoints} checkpoints; "
        f"disk: {plan.disk_needed_gib:.2f} of {plan.disk_free_gib:.0f} GiB free"
    )
    click.echo(verdict(plan))


def _lines(name: str, phase: Phase) -> list[tuple[str, str, str, str]]:
    lines = [
        (name, component, f"{gib:.3f}", "largest" if component == phase.largest else "")
        for component, gib in [*phase.components_gib.items(), ("peak", phase.peak_gib)]
    ]
    if phase.reserve_gib:
        lines.append((name, "reserve", f"{phase.reserve_gib:.3f}", "allocator and context"))
    return lines + [
        (name, f"host: {component}", f"{gib:.3f}", "") for component, gib in phase.host_gib.items()
    ]


def verdict(plan: Plan) -> str:
    name, worst = min(plan.phases.items(), key=lambda item: plan.found.spare_gib(item[1]))
    what = f"the largest part is {worst.largest} in {name}, {worst.components_gib[worst.largest]:.2f} GiB"
    if plan.margin_gib < 0:
        return f"does not fit: {-plan.margin_gib:.2f} GiB too much; {what}"
    return f"fits: {plan.margin_gib:.2f} GiB to spare; {what}"
