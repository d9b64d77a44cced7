"""finetune plan"""

import click

from runtime import files
from runtime.commands import common
from runtime.config.load import load_config
from runtime.memory.plan import EVIDENCE, Plan, make_plan
from runtime.workspace import Workspace


@click.command(cls=common.Command)
@common.workspace_option
@common.json_option
def command(workspace: Workspace, as_json: bool) -> None:
    """Say what config.yaml needs on this machine, and record it as evidence 04-plan."""
    plan = record(workspace)
    if as_json:
        common.print_json(plan.to_json())
    else:
        show(plan)
    if plan.problems:
        first, *others = plan.problems
        for problem in others:
            click.echo(f"error: {problem.message}\nnext: {problem.remedy}", err=True)
        raise first


def record(workspace: Workspace) -> Plan:
    """Make the plan and write the evidence, also when something stands in its way: the gate judges it."""
    recording = workspace.begin_evidence(EVIDENCE, "finetune plan")
    plan = make_plan(workspace, load_config(workspace.config_path))
    inputs = {"files": {"config.yaml": files.file_digest(workspace.config_path)}}
    recording.write(inputs=inputs, data=plan.to_json())
    return plan


def show(plan: Plan) -> None:
    rows = [
        (phase, component, f"{gib:.3f}", "largest" if component == figures.largest else "")
        for phase, figures in plan.phases.items()
        for component, gib in [*figures.components_gib.items(), ("peak", figures.peak_gib)]
    ]
    title = f"memory on {plan.device}, {plan.budget_gib:.1f} GiB may be filled: {plan.budget_source}"
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


def verdict(plan: Plan) -> str:
    name, worst = max(plan.phases.items(), key=lambda item: item[1].peak_gib)
    what = f"the largest part is {worst.largest} in {name}, {worst.components_gib[worst.largest]:.2f} GiB"
    if plan.margin_gib < 0:
        return f"does not fit: {-plan.margin_gib:.2f} GiB too much; {what}"
    return f"fits: {plan.margin_gib:.2f} GiB to spare; {what}"
