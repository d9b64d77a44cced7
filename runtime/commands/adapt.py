"""finetune adapt"""

from pathlib import Path
from typing import Any

import click

from runtime.adaptation import measure, scan
from runtime.commands import common
from runtime.commands.detach import LongCommand
from runtime.config.load import load_config
from runtime.workspace import Workspace


@click.command(cls=LongCommand)
@click.option(
    "--scan",
    "checkout",
    metavar="CHECKOUT",
    type=click.Path(path_type=Path),
    help="Read another trainer's source, and list what knows CUDA only and which loops don't stop. Nothing in "
    "it is run. Probes that are on record are kept.",
)
@common.workspace_option
@common.json_option
def command(checkout: Path | None, workspace: Workspace, as_json: bool) -> None:
    """Probe the device, each probe in a process of its own, and compare one training step with the CPU's."""
    data = record(workspace) if checkout is None else record_scan(workspace, checkout)
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


def record_scan(workspace: Workspace, checkout: Path) -> dict[str, Any]:
    """Read the checkout and add it to the evidence that stands; measure first where none does."""
    found = scan.record(workspace, checkout.expanduser().resolve())
    standing = workspace.envelope(measure.EVIDENCE)
    if standing is None:
        record(workspace)
        standing = workspace.envelope(measure.EVIDENCE)
    assert standing is not None
    recording = workspace.begin_evidence(measure.EVIDENCE, "finetune adapt --scan CHECKOUT")
    data = {**standing["data"], "scan": found}
    recording.write(inputs=standing["inputs"], data=data)
    return data


def show(data: dict[str, Any]) -> None:
    if "scan" in data:
        show_scan(data["scan"])
        return
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


def show_scan(found: dict[str, Any]) -> None:
    """A table of places, and what mends each kind once."""
    rows = [(f"{item['file']}:{item['line']}", item["kind"], item["code"][:70]) for item in found["findings"]]
    common.print_table(
        f"{len(rows)} findings in {found['files']} files of {found['checkout']}",
        ("place", "kind", "code"),
        rows,
    )
    mends = sorted({(item["kind"], item["mend"]) for item in found["findings"]})
    common.print_table("mend", ("kind", "write"), mends)
    loops = [
        (
            f"{loop['file']}:{loop['line']}",
            loop["kind"],
            f"line {loop['guard']}" if loop["guard"] else "missing",
        )
        for loop in found["loops"]
    ]
    common.print_table("training loops", ("place", "kind", "guard"), loops)
    for item in found["unread"]:
        click.echo(f"not read: {item['file']}: {item['reason']}", err=True)
