"""What evidence 01-host says of devices and memory; gates 01 and 03 read it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Host = Mapping[str, Any]

TIERS = (16, 32, 64, 96)  # GiB as sold
# Firmware and graphics keep a part: a "32 GB" PC tells 31 to 32 GiB, a "16 GB" one down to 14.5.
TIER_TOLERANCE = 0.9

NF4_BYTES = 0.527  # a parameter, double quantization included: 4 bits, and a byte per 64 with its own scale
# Windows' default where the registry value is absent; Intel's driver writes 57 at its installation.
WINDOWS_SHARE = 50  # percent
SHARE_MIN_GIB = 4.0  # what Windows leaves to each side, whatever the value says

TORCH = "2.13.0"  # as constraints.txt: pip would replace another
# Where PyPI's torch is the build for a device; the URL of the others is on PyTorch's "Start locally" page.
ON_PYPI = (("cuda", "Linux"), ("cpu", "Windows"))

NO_DRIVER = "Microsoft Basic Display Adapter"
TYPES = ("xpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceiling:
    """How much the accelerator may hold."""

    gib: float | None
    """None: nobody could tell"""
    source: str
    integrated: bool


def install_torch(device: str, system: str) -> str:
    """The lines that put torch's build for `device` in place of another: pip takes two builds for the same."""
    line = f"pip uninstall -y torch, then pip install torch=={TORCH}"
    if (device, system) in ON_PYPI:
        return line
    url = f"{device.upper()}_INDEX_URL"
    return f"{line} --index-url {url} ({url}: on PyTorch's page Start locally, for {device.upper()})"


def tier(ram_gib: float) -> str:
    """16, 32, 64 or 96 GiB as sold, or what is below."""
    fitting = [size for size in TIERS if ram_gib >= TIER_TOLERANCE * size]
    return f"{fitting[-1]} GiB" if fitting else f"below {TIERS[0]} GiB"


def working(adapter: Mapping[str, Any]) -> bool:
    """Has its driver, and the system has nothing against it."""
    return adapter["problem"] in (None, 0) and adapter["name"] != NO_DRIVER


def suits(adapter: Mapping[str, Any], device: str) -> bool:
    """Is of a kind that torch could use as `device`."""
    return bool(adapter["xpu_family"]) if device == "xpu" else adapter["vendor"] == "nvidia"


def accelerators(host: Host) -> dict[str, str]:
    """xpu and cuda to the name of the device, as torch sees it, or else as the system lists it."""
    found = {
        device: host["torch"][device]["devices"][0]["name"]
        for device in TYPES
        if host["torch"][device]["available"] and host["torch"][device]["devices"]
    }
    for device in TYPES:
        for adapter in host["adapters"]:
            if suits(adapter, device) and working(adapter):
                found.setdefault(device, adapter["name"])
    return found


def seen_by_torch(torch: Mapping[str, Any]) -> str | None:
    return next((device for device in TYPES if torch[device]["available"]), None)


def resolve(wanted: str, host: Host) -> str:
    """The device that `wanted` means on this host; of two kinds of card, the one that torch was built for."""
    if wanted != "auto":
        return wanted
    present = accelerators(host)
    return seen_by_torch(host["torch"]) or next((name for name in ("cuda", "xpu") if name in present), "cpu")


def smallest_gib(component: Mapping[str, Any]) -> float:
    """A component as NF4, or as it is where it is smaller or packed already."""
    parameters, disk = component["parameters"], component["disk_gib"]
    packed = disk * 2**30 <= parameters  # a byte or less for each
    return float(disk if packed else min(disk, parameters * NF4_BYTES / 2**30))


def usable_ram_gib(host: Host) -> float:
    limit = host["ram_limit_gib"]
    return float(host["ram_gib"] if limit is None else min(limit, host["ram_gib"]))


def xpu_ceiling(host: Host) -> Ceiling:
    """From torch where it sees the device, else from what the system says of its adapters."""
    fitting = [item for item in host["adapters"] if suits(item, "xpu")]
    devices = host["torch"]["xpu"]["devices"] if host["torch"]["xpu"]["available"] else []
    if devices:
        device = devices[0]
        known = [item for item in fitting if (item["pci"] or "").endswith(f":{device['device_id']}")]
        integrated = device["integrated"]
        if integrated is None:
            integrated = all(item["kind"] == "integrated" for item in known or fitting)
        return Ceiling(gib=device["total_gib"], source=f"torch on {device['name']}", integrated=integrated)
    cards = [item for item in fitting if item["kind"] == "card"]
    if cards:
        best = max(cards, key=lambda item: item["memory_gib"] or 0.0)
        return Ceiling(gib=best["memory_gib"], source=f"the memory of {best['name']}", integrated=False)
    return _shared(host)


def _shared(host: Host) -> Ceiling:
    memory, ram = host["memory"], host["ram_gib"]
    if host["system"]["name"] == "Windows":
        share = memory["share_percent"]
        told = f"{share} % of the RAM, by the registry"
        if share is None:
            share, told = (
                WINDOWS_SHARE,
                f"{WINDOWS_SHARE} % of the RAM, Windows' default without the registry value",
            )
        gib = min(max(ram * share / 100, SHARE_MIN_GIB), max(ram - SHARE_MIN_GIB, 0.0))
        return Ceiling(gib=gib, source=told, integrated=True)
    limit = memory["kernel_limit_gib"]
    return Ceiling(gib=limit, source="the kernel's limit for graphics, ttm.pages_limit", integrated=True)
