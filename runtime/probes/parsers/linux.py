"""What Linux tells: uevent files of /sys/class/drm, lspci, two limits of the kernel's."""

import re

from runtime.files import GIB

PAGE = 4096  # bytes; Intel's graphics sit in x86 machines
# 0000:00:02.0 VGA compatible controller [0300]: Intel Corporation Lunar Lake [...] [8086:64a0] (rev 04)
_LSPCI = re.compile(
    r"^(?P<slot>[0-9a-f:.]+) [^\[]*\[03[0-9a-f]{2}\]: (?P<name>.+) \[(?P<pci>[0-9a-f]{4}:[0-9a-f]{4})\]",
    re.IGNORECASE,
)


def parse_uevent(text: str) -> dict[str, str]:
    """DRIVER, PCI_ID, PCI_SLOT_NAME and the like; empty for what is no device file."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def parse_lspci(text: str) -> dict[str, tuple[str, str]]:
    """slot to (vendor:device, name) of the display controllers that `lspci -Dnn` lists."""
    found = {}
    for line in text.splitlines():
        match = _LSPCI.match(line)
        if match:
            found[match["slot"].lower()] = (match["pci"].lower(), match["name"].strip())
    return found


def parse_bytes_limit(text: str) -> float | None:
    """A cgroup's memory.max in GiB, None for `max`."""
    return int(text) / GIB if text.strip().isdigit() else None


def parse_pages_limit(text: str) -> float | None:
    """/sys/module/ttm/parameters/pages_limit in GiB: what the kernel lets graphics pin of the RAM.

    0 before a driver sets it. xe draws from it; i915 does not, so this is a bound and not a promise.
    """
    return int(text) * PAGE / GIB if text.strip().isdigit() and int(text) else None
