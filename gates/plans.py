"""Whether the memory plan of evidence 04-plan fits; gates 04 and 06 judge by the same."""

from collections.abc import Iterator
from typing import Any

PHASES = ("cache", "fit", "validate")  # what the plan must cover
SPARE_DISK_GIB = 1.0  # logs, samples and other programs write too; `finetune plan` asks for as much


def overfull(name: str, plan: dict[str, Any]) -> Iterator[str]:
    """A line for each limit that the phase `name` breaks: the device's, the host's, or the one that they share."""
    budget, host_budget = plan["budget_gib"], plan["host_budget_gib"]
    device, host = needed_gib(plan["phases"][name])
    if not device <= budget:
        yield f"{name}: {device:.2f} GiB at its peak with its reserve, the budget is {budget:.2f}"
    if not host <= host_budget:
        yield f"{name}: {host:.2f} GiB of the host's memory, its budget is {host_budget:.2f}"
    if plan["unified_memory"] and not device + host <= host_budget:
        yield f"{name}: {device + host:.2f} GiB of the memory that device and host share, of {host_budget:.2f}"


def needed_gib(phase: dict[str, Any]) -> tuple[float, float]:
    """On the device with its reserve, and in host memory: the larger of what is told and what adds up."""
    device = max(sum(phase["components_gib"].values()), phase["peak_gib"]) + phase["reserve_gib"]
    return device, max(sum(phase["host_gib"].values()), phase["host_peak_gib"])


def limits(plan: dict[str, Any]) -> str:
    """What a phase may take, for a check's `expected`."""
    beside = "host included" if plan["unified_memory"] else f"{plan['host_budget_gib']:.2f} of the host"
    return f"at most {plan['budget_gib']:.2f} ({plan['budget_source']}), {beside}"
