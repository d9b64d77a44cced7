"""finetune adapt"""

from typing import Any

import click

from runtime.adaptation import measure
from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.workspace import Workspace


@click.command(cls=LongCommand)
@common.workspace_option
@common.json_option
def command(workspace: Workspace, as_json: bool) -> None:
    """Probe the device, each probe in a process of its own, and compare one training step with the CPU's."""
    data = record(workspace)
    if as_json:
        common.print_json(data)
    else:
        show(data)
    click.echo("next: gate check 05", err=True)


def record(workspace: Workspace) -> dict[str, Any]:
    """Measure and write the evidence; what does not work here is a finding, which the gate judges."""
    loaded = load_config(workspace.config_path)
    recording = workspace.begin_evidence(measure.EVIDENCE, "finetune adapt")
    data = measure.measure(loaded.config, lambda line: click.echo(line, err=True))
    recording.write(inputs={"config": measure.inputs(loaded.config)}, data=data)
    return data


def show(data: dict[str, Any]) -> None:
    device = data["device"]
    probes = [
        (p["name"], p["status"], f"{p['seconds']:.1f}", number(p["error"]), p["reason"])
        for p in data["probes"]
    ]
    title = f"probes on {device['type']} ({device['name']})"
    common.print_table(title, ("probe", "result", "s", "error", "why"), probes)
    chosen = [(key, str(choice["value"]), choice["reason"]) for key, choice in data["choices"].items()]
    common.print_table("choices", ("key", "value", "reason"), chosen)
    steps = [
        (
            s["what"],
            s["status"],
            *(number(s[f"{name}_error"]) for name in ("loss", "gradient", "update")),
            s["reason"],
        )
        for s in data["step_parity"]
    ]
    common.print_table(
        "one training step, relative to the CPU in fp32",
        ("base", "result", "loss", "gradient", "update", ""),
        steps,
    )


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
