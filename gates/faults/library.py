"""All known faults, and which of them a log shows."""

from dataclasses import dataclass

from gates.faults import data, devices, kernels, memory, training, windows
from gates.faults.logs import SPOKEN, Line, Log
from gates.faults.model import Fault

FAULTS: tuple[Fault, ...] = (
    *kernels.FAULTS,
    *memory.FAULTS,
    *devices.FAULTS,
    *data.FAULTS,
    *training.FAULTS,
    *windows.FAULTS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    fault: Fault
    line: Line | None
    """the evidence; None where only the exit code is"""
    note: str
    """what else it rests on"""


def name(log: Log) -> list[Match]:
    """The faults that `log` shows, without those that another one explains."""
    found = [match for fault in FAULTS if (match := _match(fault, log))]
    covered = {other for match in found for other in match.fault.covers}
    left = [match for match in found if match.fault.id not in covered]
    said = [match for match in left if not match.fault.silent]
    return said or left  # where a line says why, the silence says nothing more


def _match(fault: Fault, log: Log) -> Match | None:
    if any(log.find(pattern) for pattern in fault.unless):
        return None
    if not all(log.find(pattern) for pattern in fault.also):
        return None
    if fault.stages and log.stage not in fault.stages:
        return None
    if fault.silent:
        return _vanished(fault, log)
    line = fault.detect(log) if fault.detect else None
    line = line or next((seen for pattern in fault.patterns if (seen := log.find(pattern))), None)
    if line is not None:
        return Match(
            fault=fault, line=line, note=f"the log stops {SPOKEN[log.stage]}" if fault.stages else ""
        )
    if log.silent and log.exit_code is not None and log.exit_code in fault.exit_codes:
        return Match(fault=fault, line=log.last(), note=f"exit code {log.exit_code}, and no word in the log")
    return None


def _vanished(fault: Fault, log: Log) -> Match | None:
    if not log.silent or log.died is False or (fault.needs_exit and not log.died):
        return None
    note = f"no exception, and the log stops {SPOKEN[log.stage]}"
    if log.died is None:
        note += "; it is meant only if the process is gone"
    elif log.exit_code is not None:
        note += f"; exit code {log.exit_code}"
    return Match(fault=fault, line=log.last(), note=note)
