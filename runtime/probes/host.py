"""Evidence 01-host: the machine as it is. Nothing is judged here, and nothing is changed."""

import platform
import shutil
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from runtime.files import GIB
from runtime.planning.budget import ram_gib
from runtime.probes import adapters, base, child, torch_facts
from runtime.probes.adapters import Adapter
from runtime.probes.child import Outcome
from runtime.probes.parsers import linux, nvidia, windows
from runtime.workspace import Workspace

EVIDENCE = "01-host"
COMMAND_LIMIT_S = 30.0  # a cold PowerShell takes 3 s; a driver that hangs takes all of it
POWERSHELL = ("powershell.exe", "-NoProfile", "-NonInteractive", "-Command", windows.SCRIPT)
LSPCI = ("lspci", "-Dnn")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the operating system told, whichever it is."""

    adapters: tuple[Adapter, ...] = ()
    share_percent: int | None = None
    kernel_limit_gib: float | None = None
    ram_limit_gib: float | None = None
    long_paths: bool | None = None
    probes: dict[str, Outcome] = field(default_factory=dict)


def collect(workspace: Workspace, *, torch: dict[str, Any] | None = None) -> dict[str, Any]:
    """The data of the evidence. `torch`: what its probe gave, where that was asked already."""
    reference = str(workspace.target()["model"])
    found = find_windows() if sys.platform == "win32" else find_linux()
    return {
        "system": system(),
        "python": python(),
        "ram_gib": round(ram_gib(), 3),
        "ram_limit_gib": found.ram_limit_gib,
        "adapters": [adapter.to_json() for adapter in found.adapters],
        "memory": {"share_percent": found.share_percent, "kernel_limit_gib": found.kernel_limit_gib},
        "torch": torch if torch is not None else torch_facts.collect(),
        "base": base.collect(workspace, reference).to_json(),
        "disk": disk({"workspace": workspace.root, "model cache": base.hub_cache()}),
        "long_paths": found.long_paths,
        "probes": {name: outcome.to_json() for name, outcome in found.probes.items()},
    }


def system() -> dict[str, Any]:
    build = getattr(sys, "getwindowsversion", None)
    return {
        "name": platform.system(),
        "release": platform.release(),
        "build": int(build().build) if build is not None else None,
        "machine": platform.machine(),
    }


def python() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "minor": f"{sys.version_info.major}.{sys.version_info.minor}",
        "implementation": platform.python_implementation(),
        "bits": 64 if sys.maxsize > 2**32 else 32,
        "environment": sys.prefix != sys.base_prefix or (Path(sys.prefix) / "conda-meta").is_dir(),
    }


def disk(places: dict[str, Path]) -> list[dict[str, Any]]:
    """Free GiB of each place; equal letters in `volume` are one volume, whose space is shared."""
    letters: dict[int, str] = {}
    rows = []
    for name, path in places.items():
        there = next(folder for folder in (path.resolve(), *path.resolve().parents) if folder.is_dir())
        letter = letters.setdefault(there.stat().st_dev, "abcdefgh"[len(letters)])
        free = round(shutil.disk_usage(there).free / GIB, 3)
        rows.append({"place": name, "free_gib": free, "volume": letter})
    return rows


# ---- Windows


def find_windows() -> Found:
    asked = child.run(POWERSHELL, limit_s=COMMAND_LIMIT_S)
    smi = child.run(nvidia.QUERY, limit_s=COMMAND_LIMIT_S)
    return read_windows(asked, smi)


def read_windows(asked: Outcome, smi: Outcome) -> Found:
    """From what the two commands gave."""
    probes = {"powershell": asked, "nvidia-smi": smi}
    if not asked.ok:
        return Found(probes=probes)
    try:
        facts = windows.parse(asked.stdout)
    except ValueError as error:
        failed = replace(asked, status="failed", reason=child.shorten(f"its output is not JSON: {error}"))
        return Found(probes={**probes, "powershell": failed})
    cards = nvidia.parse(smi.stdout) if smi.ok else []
    named = [_with_nvidia(adapter, cards) for adapter in facts.adapters]
    return Found(
        adapters=tuple(named),
        share_percent=facts.share_percent,
        long_paths=facts.long_paths,
        probes=probes,
    )


def _with_nvidia(adapter: Adapter, cards: Sequence[nvidia.Nvidia]) -> Adapter:
    """The memory that NVIDIA's tool tells, where Windows' own figure is missing."""
    match = next((card for card in cards if card.name in adapter.name), None)
    if adapter.vendor != "nvidia" or match is None:
        return adapter
    return replace(adapter, memory_gib=match.memory_gib, driver_version=match.driver_version)


# ---- Linux


def find_linux(root: Path = Path("/")) -> Found:
    lspci = child.run(LSPCI, limit_s=COMMAND_LIMIT_S)
    smi = child.run(nvidia.QUERY, limit_s=COMMAND_LIMIT_S)
    return read_linux(root, lspci, smi)


def read_linux(root: Path, lspci: Outcome, smi: Outcome) -> Found:
    """From the files under `root` and what the two commands gave."""
    named = linux.parse_lspci(lspci.stdout) if lspci.ok else {}
    cards = {card.slot: card for card in nvidia.parse(smi.stdout)} if smi.ok else {}
    return Found(
        adapters=tuple(_join(_read_drm(root), named, cards)),
        kernel_limit_gib=_limit(linux.parse_pages_limit, root / "sys/module/ttm/parameters/pages_limit"),
        ram_limit_gib=_limit(linux.parse_bytes_limit, root / "sys/fs/cgroup/memory.max"),
        probes={"lspci": lspci, "nvidia-smi": smi},
    )


def _read_drm(root: Path) -> dict[str, dict[str, str]]:
    """slot to the uevent of each card that the kernel has a driver for."""
    found = {}
    for path in sorted((root / "sys/class/drm").glob("card*/device/uevent")):
        with suppress(OSError):
            facts = linux.parse_uevent(path.read_text(encoding="utf-8", errors="replace"))
            if "PCI_ID" in facts:
                found[facts["PCI_SLOT_NAME"].lower()] = facts
    return found


def _join(
    drm: dict[str, dict[str, str]],
    named: dict[str, tuple[str, str]],
    cards: dict[str, nvidia.Nvidia],
) -> list[Adapter]:
    """One adapter per slot, from the three sources; in a container any of them may see nothing."""
    return [
        _adapter(drm.get(slot, {}), named.get(slot), cards.get(slot))
        for slot in sorted({*drm, *named, *cards})
    ]


def _adapter(drm: dict[str, str], named: tuple[str, str] | None, card: nvidia.Nvidia | None) -> Adapter:
    pci, name = named or (drm.get("PCI_ID"), "")
    if card is not None:
        return adapters.make(
            pci=pci,
            name=card.name,
            driver="nvidia",
            driver_version=card.driver_version,
            memory_gib=card.memory_gib,
        )
    # i915 and xe are part of the kernel and have its version
    driver = drm.get("DRIVER")
    version = platform.release() if driver in ("i915", "xe") else None
    return adapters.make(pci=pci, name=name, driver=driver, driver_version=version)


def _limit(parse: Any, path: Path) -> float | None:
    try:
        value: float | None = parse(path.read_text(encoding="utf-8"))
    except OSError:
        return None
    return round(value, 3) if value is not None else None
