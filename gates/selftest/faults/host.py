"""Faults of gate 01: the machine."""

from collections.abc import Callable
from typing import Any

from gates.selftest.faults.row import Fault, Spoil, fault

HOST = "01-host"
REAL = {  # Qwen-Image-Edit in bf16
    "transformer": {"parameters": 20_430_000_000, "disk_gib": 38.05},
    "text_encoder": {"parameters": 8_290_000_000, "disk_gib": 15.44},
    "vae": {"parameters": 127_000_000, "disk_gib": 0.24},
}
UHD = {
    "name": "Intel(R) UHD Graphics 770", "vendor": "intel", "kind": "integrated", "xpu_family": False,
    "pci": "8086:a780", "driver": "display driver", "driver_version": "32.0.101.6557", "memory_gib": None,
    "problem": 0,
}  # fmt: skip
NOTHING = {"available": False, "devices": []}


def _data(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit(made.evidence(HOST), lambda document: change(document["data"]))


def _set(**values: Any) -> Spoil:
    """Values of the evidence's data; a dictionary is merged into the one that is there."""

    def change(data: dict[str, Any]) -> None:
        for key, value in values.items():
            data[key] = {**data[key], **value} if isinstance(value, dict) else value

    return _data(change)


def _adapter(**values: Any) -> Spoil:
    """The first adapter, where torch can't see it any more."""

    def change(data: dict[str, Any]) -> None:
        data["adapters"][0].update(values)
        data["torch"].update(xpu=NOTHING, cuda=NOTHING)

    return _data(change)


def _real(**values: Any) -> Spoil:
    """The published base, here, on a machine with these values."""

    def spoil(made: Any) -> None:
        _data(lambda data: data["base"].update(components=REAL))(made)
        _set(**values)(made)

    return spoil


def _hub(reference: str = "Qwen/Qwen-Image-Edit", **values: Any) -> Spoil:
    """The published base, which is yet to come."""

    def spoil(made: Any) -> None:
        _target(model=reference)(made)
        _real(base={"reference": reference, "local": False}, **values)(made)

    return spoil


def _begun(missing_gib: float, rest_in: str, **values: Any) -> Spoil:
    """The published base, whose denoiser is here in part, in a folder that no hub completes."""
    transformer = {**REAL["transformer"], "missing_gib": missing_gib}
    components = {**REAL, "transformer": transformer}
    base = {"local": False, "from_hub": False, "rest_in": rest_in, "components": components}
    return _set(base=base, **values)


def _unseen(**values: Any) -> Spoil:
    """The published base, where torch does not tell the ceiling and the system must."""
    return _real(torch={"xpu": NOTHING}, **values)


def _target(**values: Any) -> Spoil:
    return lambda made: made.edit(".gates/target.json", lambda document: document.update(values))


def _disk(*rows: tuple[str, float, str]) -> list[dict[str, Any]]:
    return [{"place": place, "free_gib": free, "volume": volume} for place, free, volume in rows]


ABSENT = "accelerator-present"
ALL = {"os-supported", "python-supported", "ram-tier", ABSENT, "disk-free", "long-paths"}

FAULTS: tuple[Fault, ...] = (
    fault("not probed", ALL, lambda m: m.evidence(HOST).unlink()),
    fault(
        "a probe that did not end",
        ALL,
        lambda m: m.edit(m.evidence(HOST), lambda d: d.update(complete=False, data={})),
    ),
    fault("macOS", {"os-supported"}, _set(system={"name": "Darwin", "machine": "arm64"})),
    fault("an old Windows", {"os-supported"}, _set(system={"build": 18363}), shape="xpu"),
    fault("a Windows without a build", {"os-supported"}, _set(system={"build": None}), shape="xpu"),
    fault("XPU on Arm", {"os-supported"}, _set(system={"machine": "ARM64"}), shape="xpu"),
    fault("32-bit Linux", {"os-supported"}, _set(system={"machine": "i686"})),
    fault("Python 3.10", {"python-supported"}, _set(python={"minor": "3.10", "version": "3.10.9"})),
    fault("32-bit Python", {"python-supported"}, _set(python={"bits": 32})),
    fault("PyPy", {"python-supported"}, _set(python={"implementation": "PyPy"})),
    fault("16 GB for the published base", {"ram-tier"}, _real(ram_gib=15.6)),
    fault("32 GB of which 8 may be used", {"ram-tier"}, _real(ram_limit_gib=8.0)),
    fault("8 GB beside a card", {"ram-tier"}, _real(ram_gib=7.4), shape="cuda"),
    fault("probed for another base", {"ram-tier", "disk-free"}, _target(model="models/other")),
    fault("xpu wanted, none there", {ABSENT}, _target(device="xpu")),
    fault("xpu wanted, NVIDIA there", {ABSENT}, _target(device="xpu"), shape="cuda"),
    fault("cuda wanted, Arc there", {ABSENT}, _target(device="cuda"), shape="xpu"),
    fault("graphics before XPU", {ABSENT}, _set(adapters=[UHD], torch={"xpu": NOTHING}), shape="xpu"),
    fault("Arc without its driver", {ABSENT}, _adapter(name="Microsoft Basic Display Adapter"), shape="xpu"),
    fault("Arc with code 43", {ABSENT}, _adapter(problem=43), shape="xpu"),
    fault("a share too small", {"memory-ceiling"}, _unseen(memory={"share_percent": 30}), shape="xpu"),
    fault(
        "16 GB, Intel's share",
        {"ram-tier", "memory-ceiling"},
        _unseen(ram_gib=15.6, memory={"share_percent": 57}),
        shape="xpu",
    ),
    fault(
        "torch sees too little",
        {"memory-ceiling"},
        _real(
            torch={
                "xpu": {
                    "available": True,
                    "devices": [
                        {
                            "name": "Arc",
                            "total_gib": 7.5,
                            "driver": "1",
                            "integrated": True,
                            "device_id": "64a0",
                        }
                    ],
                }
            }
        ),
        shape="xpu",
    ),
    fault(
        "a card of 8 GiB",
        {"memory-ceiling"},
        lambda m: (_real()(m), _adapter(name="Arc A750", kind="card", memory_gib=7.9)(m)),
        shape="xpu",
    ),
    fault("a disk that is full", {"disk-free"}, _set(disk=_disk(("workspace", 0.5, "a")))),
    fault(
        "no room to fetch the base, nor to drop it as it is quantized",
        {"disk-free"},
        _hub(disk=_disk(("workspace", 25.0, "a"), ("model cache", 50.0, "b"))),
    ),
    fault(
        "one volume for both, and room for neither way",
        {"disk-free"},
        _hub(disk=_disk(("workspace", 25.0, "a"), ("model cache", 25.0, "a"))),
    ),
    fault(
        "a workspace too full for what stays there",
        {"disk-free"},
        _hub(disk=_disk(("workspace", 15.0, "a"), ("model cache", 500.0, "b"))),
    ),
    fault(
        "no hub id, so nothing to drop",
        {"disk-free"},
        _hub("external:model", disk=_disk(("workspace", 60.0, "a"), ("model cache", 60.0, "a"))),
    ),
    fault(
        "a base fetched in part, and no room for the rest",
        {"disk-free"},
        _begun(20.0, "model cache", disk=_disk(("workspace", 25.0, "a"), ("model cache", 15.0, "b"))),
    ),
    fault(
        "a base begun in the workspace, and no room for the rest beside NF4",
        {"disk-free"},
        _begun(20.0, "workspace", disk=_disk(("workspace", 30.0, "a"), ("model cache", 90.0, "b"))),
    ),
    fault("no disk was looked at", {"disk-free"}, _set(disk=[])),
    fault("no version of the driver", {"driver-recorded"}, _adapter(driver_version=None), shape="xpu"),
    fault("short paths", {"long-paths"}, _set(long_paths=False), shape="xpu"),
    fault("paths not known", {"long-paths"}, _set(long_paths=None), shape="xpu"),
)
