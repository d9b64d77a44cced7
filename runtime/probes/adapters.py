"""A graphics adapter as the operating system tells it, and what its PCI numbers mean."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Vendor = Literal["intel", "nvidia", "amd", "other"]
Kind = Literal["integrated", "card"]

VENDORS: dict[str, Vendor] = {"8086": "intel", "10de": "nvidia", "1002": "amd"}
# Beginnings of Intel's PCI device numbers. Cards: Data Center Max, DG1, Arc A and Flex, Arc B.
# Everything else of theirs sits in the processor.
INTEL_CARDS = ("0bd", "490", "56", "e2")
# Graphics before Xe-LPG (Meteor Lake, 2023) and DG1, for which torch's XPU backend is not offered:
# Broadwell, Skylake, Apollo Lake, Kaby/Coffee/Comet/Ice/Tiger/Rocket/Alder/Raptor/Elkhart Lake, DG1.
INTEL_BEFORE_XPU = (
    "16", "19", "5a8", "318", "59", "3e", "87", "9b", "8a", "9a", "4c", "46", "a7", "45", "4e", "490"
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    name: str
    vendor: Vendor
    kind: Kind
    xpu_family: bool
    """An Intel GPU of a generation for which torch's XPU backend is offered"""
    pci: str | None
    """vendor:device, four hex digits each"""
    driver: str | None
    driver_version: str | None
    memory_gib: float | None
    """Its own memory; None where it shares the system's, or the system does not tell"""
    problem: int | None
    """What Windows' Device Manager has against it (43: the driver stopped); 0 is nothing"""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def make(
    *,
    pci: str | None,
    name: str = "",
    driver: str | None = None,
    driver_version: str | None = None,
    memory_gib: float | None = None,
    problem: int | None = None,
) -> Adapter:
    """The adapter with these numbers; `pci` as 8086:64a0, None only for what names itself NVIDIA."""
    vendor_id, _, device_id = (pci or "10de:").lower().partition(":")
    vendor = VENDORS.get(vendor_id, "other")
    kind = kind_of(vendor, device_id)
    return Adapter(
        name=name or f"{vendor} GPU {device_id}",
        vendor=vendor,
        kind=kind,
        xpu_family=vendor == "intel" and not device_id.startswith(INTEL_BEFORE_XPU),
        pci=pci.lower() if pci else None,
        driver=driver,
        driver_version=driver_version,
        memory_gib=memory_gib if kind == "card" else None,
        problem=problem,
    )


def kind_of(vendor: Vendor, device_id: str) -> Kind:
    if vendor == "intel":
        return "card" if device_id.startswith(INTEL_CARDS) else "integrated"
    return "card"
