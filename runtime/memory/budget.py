"""On which device a plan is for, and how much memory it may fill there.

For a CPU this needs no torch, so that a plan can be made with the light install.
"""

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from runtime.errors import UserError
from runtime.files import GIB

if TYPE_CHECKING:
    from runtime.memory.choices import Choice

RAM_SHARE = 0.8  # the system and what else is open live in the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    device: str
    """cpu, xpu or cuda."""
    reason: str
    """Why this device."""
    gib: float
    source: str
    """What the budget was measured from."""
    measured: "Mapping[str, Choice] | None" = None
    """By dotted config key, what step 05 settled for this device; None where it has not."""


def find(requested: str) -> Budget:
    """For `auto`, `cpu`, `xpu` or `cuda`. Raises UserError where that device is absent."""
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
    return Budget(device=picked.type, reason=picked.reason, gib=gib, source=source)


def _cpu(reason: str) -> Budget:
    total = ram_gib()
    return Budget(
        device="cpu",
        reason=reason,
        gib=total * RAM_SHARE,
        source=f"{RAM_SHARE:.0%} of this machine's RAM ({total:.1f} GiB)",
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
