"""What Windows tells of its adapters and of two registry values: one PowerShell script, one JSON."""

import json
import re
from dataclasses import dataclass
from typing import Any

from runtime.files import GIB
from runtime.probes import adapters
from runtime.probes.adapters import Adapter

# The share of the RAM that integrated graphics may fill, in percent; Intel's slider "Shared GPU
# Memory Override" writes it. OpenVINO's "GPU Plugin Debugging Guide" documents key, name and range.
SHARE_KEY = r"HKLM:\SYSTEM\CurrentControlSet\Control\GraphicsDrivers\MemoryManager"
SHARE_VALUE = "SystemPartitionCommitLimitPercentage"
PATHS_KEY = r"HKLM:\SYSTEM\CurrentControlSet\Control\FileSystem"
CLASS_KEY = r"HKLM:\SYSTEM\CurrentControlSet\Control\Class\{4d36e968-e325-11ce-bfc1-08002be10318}"
# Win32_VideoController.AdapterRAM is a uint32 and stops at 4 GiB; the driver's own value does not.
MEMORY_VALUE = "HardwareInformation.qwMemorySize"

# Single quotes only, so that it survives as one argument. $null becomes null.
SCRIPT = f"""
$ErrorActionPreference = 'SilentlyContinue'
[Console]::OutputEncoding = [Text.Encoding]::UTF8
$video = @(Get-CimInstance Win32_VideoController |
  Select-Object Name, PNPDeviceID, DriverVersion, ConfigManagerErrorCode)
$class = @(Get-ChildItem '{CLASS_KEY}' | Where-Object {{ $_.PSChildName -match '^\\d{{4}}$' }} |
  Get-ItemProperty | Select-Object MatchingDeviceId, @{{ n = 'memory'; e = {{ $_.'{MEMORY_VALUE}' }} }})
@{{
  video = $video
  class = $class
  share = (Get-ItemProperty '{SHARE_KEY}').{SHARE_VALUE}
  long_paths = (Get-ItemProperty '{PATHS_KEY}').LongPathsEnabled
}} | ConvertTo-Json -Depth 4 -Compress
""".strip()

_PCI = re.compile(r"PCI\\VEN_([0-9A-F]{4})&DEV_([0-9A-F]{4})", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowsFacts:
    adapters: tuple[Adapter, ...]
    share_percent: int | None
    """None: the registry has no such value, and Windows takes its own default"""
    long_paths: bool


def parse(text: str) -> WindowsFacts:
    """From what SCRIPT printed. Raises ValueError where that is not its JSON."""
    document = json.loads(text.lstrip("\ufeff"))
    if not isinstance(document, dict) or "video" not in document:
        raise ValueError("PowerShell printed something else than the facts that were asked for")
    memory = {
        _pci(item.get("MatchingDeviceId")): _bytes(item.get("memory")) for item in _items(document, "class")
    }
    share = document.get("share")
    return WindowsFacts(
        adapters=tuple(_adapters(_items(document, "video"), memory)),
        share_percent=share if isinstance(share, int) else None,
        long_paths=document.get("long_paths") == 1,
    )


def _adapters(controllers: list[dict[str, Any]], memory: dict[str | None, int | None]) -> list[Adapter]:
    """Those on the PCI bus: remote desktops and virtual displays have other ids."""
    found = []
    for item in controllers:
        pci = _pci(item.get("PNPDeviceID"))
        if pci is not None:
            size = memory.get(pci)
            found.append(
                adapters.make(
                    pci=pci,
                    name=str(item.get("Name") or ""),
                    driver="display driver",
                    driver_version=item.get("DriverVersion"),
                    memory_gib=round(size / GIB, 3) if size else None,
                    problem=item.get("ConfigManagerErrorCode"),
                )
            )
    return found


def _items(document: dict[str, Any], key: str) -> list[dict[str, Any]]:
    """PowerShell may unwrap a list of one, and says null for an empty one."""
    value = document.get(key)
    items = value if isinstance(value, list) else [value]
    return [item for item in items if isinstance(item, dict)]


def _pci(device: Any) -> str | None:
    match = _PCI.match(device) if isinstance(device, str) else None
    return f"{match[1]}:{match[2]}".lower() if match else None


def _bytes(value: Any) -> int | None:
    """A REG_QWORD, or, of some drivers, its bytes as REG_BINARY."""
    if isinstance(value, list) and value and all(isinstance(item, int) and 0 <= item < 256 for item in value):
        return int.from_bytes(bytes(value), "little")
    return value if isinstance(value, int) else None
