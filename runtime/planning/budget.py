"""On which device a plan is for, and how much memory it may fill there and in the host's RAM.

For a CPU this needs no torch, so that a plan can be made with the light install.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from runtime.config.model import Hardware
from runtime.errors import UserError
from runtime.files import GIB

if TYPE_CHECKING:
    from runtime.planning.choice import Choice
    from runtime.planning.estimate import Phase

RAM_SHARE = 0.8  # the system and what else is open live in the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    device: str
    """cpu, xpu or cuda."""
    reason: str
    """Why this device."""
    gib: float
    """On the device, reserves included."""
    source: str
    """What the budget was measured from."""
    host_gib: float
    """Of the host's RAM; with unified memory, of device and host together. On a CPU the same as `gib`."""
    unified: bool = False
    """The device has no memory of its own: it shares the host's."""
    graphs: bool = False
    """Whether the device records and replays whole steps."""
    measured: "Mapping[str, Choice] | None" = None
    """By dotted config key, what step 05 settled for this device; None where it has not."""
    probes: Mapping[str, Mapping[str, Any]] | None = None
    """By name, the probes of step 05 on this device."""

    def spare_gib(self, phase: "Phase") -> float:
        """What `phase` leaves of the tightest limit; below zero it does not fit."""
        spare = self.gib - phase.needed_gib
        if self.device == "cpu":
            return spare
        together = phase.host_peak_gib + (phase.needed_gib if self.unified else 0.0)
        return min(spare, self.host_gib - together)


def find(hardware: Hardware, host: Mapping[str, Any] | None = None) -> Budget:
    """For what `hardware` asks; `host` is evidence 01, if any. Raises UserError for a device that is absent."""
    found = _find(hardware.device, hardware.unified_memory, host)
    limit = hardware.memory_limit_gib
    if limit is None or limit >= max(found.gib, found.host_gib):
        return found
    return replace(
        found,
        gib=min(found.gib, limit),
        host_gib=min(found.host_gib, limit),
        source=f"hardware.memory_limit_gib: {limit:g}; without it {found.source}",
    )


def _find(requested: str, unified: str | bool, host: Mapping[str, Any] | None) -> Budget:
    if requested == "cpu":
        return _cpu("as configured")
    if importlib.util.find_spec("torch") is None:
        if requested == "auto":
            return _cpu("auto: torch is not installed here, so no accelerator could be looked for")
        raise UserError(
            f"hardware.device is {requested}, but torch is not installed here",
            remedy='pip install -e ".[train]" -c constraints.txt',
        )
    from runtime import device

    picked = device.pick(requested)
    if picked.type == "cpu":
        return _cpu(picked.reason)
    gib, source = device.memory_budget_gib(picked.type)
    return Budget(
        device=picked.type,
        reason=picked.reason,
        gib=gib,
        source=source,
        host_gib=ram_gib() * RAM_SHARE,
        unified=_shared(device.is_integrated(), host) if unified == "auto" else bool(unified),
        graphs=device.has_graphs(picked.type),
    )


def _shared(integrated: bool | None, host: Mapping[str, Any] | None) -> bool:
    """What torch says of the device; else, where step 01 saw graphics that torch uses, whether all are integrated."""
    if integrated is not None:
        return integrated
    usable = [item for item in (host or {}).get("adapters", ()) if item["xpu_family"]]
    return bool(usable) and all(item["kind"] == "integrated" for item in usable)


def _cpu(reason: str) -> Budget:
    total = ram_gib()
    return Budget(
        device="cpu",
        reason=reason,
        gib=total * RAM_SHARE,
        source=f"{RAM_SHARE:.0%} of this machine's RAM ({total:.1f} GiB)",
        host_gib=total * RAM_SHARE,
        unified=True,
    )


def ram_gib() -> float:
    if sys.platform == "win32":
        return _windows_ram() / GIB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB


def _windows_ram() -> int:
    """ullTotalPhys of GlobalMemoryStatusEx: the second 8 bytes of 64, whose first hold that length."""
    import ctypes

    status = (ctypes.c_uint64 * 8)(64)
    kernel = getattr(ctypes, "windll").kernel32  # noqa: B009  # exists on Windows only
    if not kernel.GlobalMemoryStatusEx(ctypes.byref(status)):
        raise UserError("Windows does not tell the size of the RAM", remedy="finetune plan")
    return int(status[1])
