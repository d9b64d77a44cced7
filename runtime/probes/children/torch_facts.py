"""What torch is built for and sees. Runs by itself, in a process that a driver may end; see ../child.py."""

import json
from typing import Any

GIB = 2**30


def say(**facts: Any) -> None:
    print("@" + json.dumps(facts), flush=True)


def describe(properties: Any) -> dict[str, Any]:
    """What torch.xpu's and torch.cuda's device properties have in common; None where a build lacks it."""
    number = getattr(properties, "device_id", None)  # torch.xpu: the PCI device, since torch 2.9 or so
    integrated = getattr(properties, "is_integrated_gpu", None)  # torch.xpu; torch.cuda: is_integrated
    if integrated is None:
        integrated = getattr(properties, "is_integrated", None)
    return {
        "name": str(properties.name),
        "total_gib": round(properties.total_memory / GIB, 3),
        "driver": getattr(properties, "driver_version", None),
        "integrated": None if integrated is None else bool(integrated),
        "device_id": f"{number:04x}" if isinstance(number, int) else None,
    }


def main() -> None:
    say(stage="import torch")
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        return say(absent="torch")
    built = {name: getattr(torch.version, name, None) for name in ("xpu", "cuda", "hip")}
    say(version=str(torch.__version__), built=built)
    for name in ("xpu", "cuda"):
        backend: Any = getattr(torch, name, None)
        say(stage=f"torch.{name}.is_available")
        available = backend is not None and bool(backend.is_available())
        say(**{name: {"available": available, "devices": []}})
        if not available:
            continue
        # A segfault here is known, where Level Zero's loader and driver are of two ages (pytorch #179891).
        say(stage=f"torch.{name}.get_device_properties")
        devices = [describe(backend.get_device_properties(index)) for index in range(backend.device_count())]
        say(**{name: {"available": True, "devices": devices}})
    say(done=True)


if __name__ == "__main__":
    main()
