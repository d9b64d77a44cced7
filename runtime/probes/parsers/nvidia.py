"""`nvidia-smi`, the same on both systems."""

from dataclasses import dataclass

MIB_IN_GIB = 1024
QUERY = (
    "nvidia-smi",
    "--query-gpu=name,driver_version,memory.total,pci.bus_id",
    "--format=csv,noheader,nounits",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Nvidia:
    name: str
    driver_version: str
    memory_gib: float
    slot: str
    """0000:01:00.0, as Linux writes it"""


def parse(text: str) -> list[Nvidia]:
    """From the output of QUERY; lines that are no GPU (a driver's complaint) are passed over."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 4 and cells[2].isdigit():
            name, driver, memory, bus = cells
            domain, _, rest = bus.lower().partition(":")
            slot = f"{domain[-4:]}:{rest}"
            gib = round(int(memory) / MIB_IN_GIB, 3)
            found.append(Nvidia(name=name, driver_version=driver, memory_gib=gib, slot=slot))
    return found
