"""finetune probe [--host] [--environment]"""

from typing import Any

import click

from runtime.commands import common
from runtime.probes import environment, host, torch_facts
from runtime.workspace import Workspace


@click.command(cls=common.Command)
@click.option("--host", "only_host", is_flag=True, help="Look at the machine: evidence 01-host.")
@click.option(
    "--environment", "only_environment", is_flag=True, help="Look at the packages: evidence 03-environment."
)
@common.workspace_option
@common.json_option
def command(only_host: bool, only_environment: bool, workspace: Workspace, as_json: bool) -> None:
    """Look at the machine and its packages, and record both; what is found, the gates judge."""
    both = only_host == only_environment
    found = record(workspace, host_too=both or only_host, environment_too=both or only_environment)
    if as_json:
        common.print_json(found)
        return
    if host.EVIDENCE in found:
        show_host(found[host.EVIDENCE])
    if environment.EVIDENCE in found:
        show_environment(found[environment.EVIDENCE])


def record(workspace: Workspace, *, host_too: bool, environment_too: bool) -> dict[str, Any]:
    """Write the evidence asked for, and return its data by name; torch is asked once for both."""
    workspace.target()
    wanted = [(host, "finetune probe --host")] if host_too else []
    wanted += [(environment, "finetune probe --environment")] if environment_too else []
    recordings = [workspace.begin_evidence(probe.EVIDENCE, line) for probe, line in wanted]
    torch = torch_facts.collect()
    found = {}
    for (probe, _), recording in zip(wanted, recordings, strict=True):
        found[probe.EVIDENCE] = probe.collect(workspace, torch=torch)
        recording.write(inputs={}, data=found[probe.EVIDENCE])
    return found


def show_host(data: dict[str, Any]) -> None:
    system, memory = data["system"], data["memory"]
    rows = [
        ("system", f"{system['name']} {system['release']}, {system['machine']}"),
        ("python", _python(data["python"])),
        ("RAM", f"{data['ram_gib']:.1f} GiB" + _limited(data["ram_limit_gib"])),
        *[("adapter", _adapter(item)) for item in data["adapters"] or [{"name": "none"}]],
        ("torch", _torch(data["torch"])),
        *[("free disk", f"{item['place']}: {item['free_gib']:.1f} GiB") for item in data["disk"]],
        ("base", _base(data["base"])),
    ]
    if memory["share_percent"] is not None:
        rows.append(("share for graphics", f"{memory['share_percent']} % of the RAM"))
    if memory["kernel_limit_gib"] is not None:
        rows.append(("limit for graphics", f"{memory['kernel_limit_gib']:.1f} GiB"))
    rows += [("probe " + name, _finding(item)) for name, item in data["probes"].items()]
    common.print_table("host", ("what", "found"), rows)


def show_environment(data: dict[str, Any]) -> None:
    rows = [("python", _python(data["python"])), ("device", data["device"])]
    rows += [
        (item["name"], f"{item['version'] or 'absent'}  ({item['bounds'] or 'any'})")
        for item in data["packages"]
    ]
    rows += [("triton", f"{item['name']} {item['version']}") for item in data["tritons"]]
    rows += [
        ("torch", _torch(data["torch"])),
        ("NF4 on " + data["quantizer"]["device"], _finding(data["quantizer"])),
        ("imports", _finding(data["imports"])),
        ("names", _finding(data["names"])),
    ]
    if data["ipex"] is not None:
        rows.append(("IPEX", f"{data['ipex']['version']}: {_finding(data['ipex'])}"))
    common.print_table("environment", ("what", "found"), rows)


def _python(facts: dict[str, Any]) -> str:
    return f"{facts['implementation']} {facts['version']}, {facts['bits']} bit"


def _limited(limit_gib: float | None) -> str:
    return f", of which {limit_gib:.1f} may be used here" if limit_gib is not None else ""


def _adapter(item: dict[str, Any]) -> str:
    parts = [item["name"]]
    if item.get("driver"):
        parts.append(f"{item['driver']} {item['driver_version'] or ''}".strip())
    if item.get("memory_gib") is not None:
        parts.append(f"{item['memory_gib']:.1f} GiB of its own")
    elif item.get("kind") == "integrated":
        parts.append("shares the RAM")
    return ", ".join(parts)


def _torch(facts: dict[str, Any]) -> str:
    seen = torch_facts.accelerator(facts)
    devices = (
        [f"{item['name']} ({item['total_gib']:.1f} GiB)" for item in facts[seen]["devices"]] if seen else []
    )
    sees = f"sees {seen}: {', '.join(devices)}" if seen else "sees no accelerator"
    return f"{facts['version'] or '?'}, {sees}" if facts["status"] == "ok" else _finding(facts)


def _base(facts: dict[str, Any]) -> str:
    total = sum(item["disk_gib"] for item in facts["components"].values())
    return f"{facts['reference']}, {total:.2f} GiB ({facts['source']})"


def _finding(item: dict[str, Any]) -> str:
    told = f"{item['status']} after {item['seconds']:.1f} s"
    return f"{told}: {item['reason']}" if item["reason"] else told
