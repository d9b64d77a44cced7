"""gate check 01: can this machine do it: system, memory, device, disk?"""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

from gates import hosts
from gates.checks import Checks, Evidence, Finding, Gate, failed, listing, passed, skipped, verdict_of
from gates.evidence import EvidenceError, MissingEvidenceError, Reading, attempt
from gates.hosts import Ceiling
from gates.verdict import Check, EvidenceRef
from gates.workspace import Workspace

SYSTEMS = {"Windows": ("AMD64", "ARM64"), "Linux": ("x86_64", "aarch64")}
XPU_MACHINES = ("AMD64", "x86_64")  # torch's XPU builds are for these
WINDOWS_BUILD_MIN = 19041  # Windows 10, version 2004: the first that Intel's Arc driver installs on
PYTHON_MIN = (3, 11)  # what the package needs

SYSTEM_GIB = 5.0  # Windows 11 with an editor and a browser tab open
SYSTEM_SHARE_MAX = 1 / 3  # of the RAM: a small machine with a small system is not refused
WORK_GIB = 1.0  # adapter, optimizer and activations at the smallest published size; step 04 counts exactly
DISK_WORK_GIB = 2.0  # cache of 100 samples, ten checkpoints, two resumable ones
SHARD_GIB = 9.4  # the largest file of a published base: diffusers splits at 10 GB, transformers at 5
SHARE_MAX = 87  # percent; where Intel's own slider ends
PAGE = 4096  # bytes of ttm.pages_limit

EVIDENCE = ".gates/evidence/01-host.json"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
PROBE = "finetune probe --host"
SHARE_KEY = r"HKLM\SYSTEM\CurrentControlSet\Control\GraphicsDrivers\MemoryManager"
SHARE_VALUE = "SystemPartitionCommitLimitPercentage"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine(Evidence):
    target: dict[str, Any]
    data: Reading[dict[str, Any]]
    """evidence 01-host"""

    @property
    def wanted(self) -> str:
        """The device that the target resolves to here."""
        return hosts.resolve(self.target["device"], self.data.get())

    @property
    def components(self) -> Mapping[str, Any]:
        """Of the target's base, by name. Raises where another base was looked at, or none was found."""
        base = self.data.get()["base"]
        if base["reference"] != self.target["model"]:
            raise MissingEvidenceError(
                EVIDENCE,
                f"is for the base {base['reference']}, the target is {self.target['model']}",
                remedy=PROBE,
            )
        if not base["components"].get("transformer"):
            raise EvidenceError(
                EVIDENCE,
                f"found no weights in {base['reference']}",
                remedy="finetune init --model FOLDER_OR_HUB_ID",
            )
        components: Mapping[str, Any] = base["components"]
        return components

    @property
    def ceiling(self) -> Ceiling:
        return hosts.xpu_ceiling(self.data.get())


def collect(workspace: Workspace) -> Machine:
    target = workspace.target
    data = attempt(lambda: workspace.evidence("01-host"))
    device = hosts.resolve(target["device"], data.value) if data.value is not None else None
    return Machine(target=target, data=data, device=device, inputs=tuple(workspace.inputs.values()))


CHECKS: Checks[Machine] = Checks()


@CHECKS.check(
    "os-supported",
    title="The system is one that torch is built for",
    section="1.1",
    remedy=f"use a 64-bit machine with Windows 11 or Linux, and there {PROBE}",
    why="torch has no build for others, or none that knows the device",
)
def os_supported(e: Machine) -> Finding:
    """Name, build and processor of the system; XPU needs an x86-64 one."""
    system = e.data.get()["system"]
    name, build, machine = system["name"], system["build"], system["machine"]
    machines: tuple[str, ...] = SYSTEMS.get(name, ())
    if e.wanted == "xpu":
        machines = tuple(item for item in machines if item in XPU_MACHINES)
    old = name == "Windows" and not (build is not None and build >= WINDOWS_BUILD_MIN)
    return verdict_of(
        machine in machines and not old,
        f"{name} {system['release']} on {machine}" + (f", build {build}" if build is not None else ""),
        expected=f"Windows from build {WINDOWS_BUILD_MIN}, or Linux; for {e.wanted} on "
        + " or ".join(machines or XPU_MACHINES),
        observed=f"{name} {machine}",
    )


@CHECKS.check(
    "python-supported",
    title="The Python is one that torch is built for",
    section="1.2",
    remedy=f"make an environment with 64-bit CPython 3.12, install there, then {PROBE}",
    why="pip offers another interpreter an old torch, or none, and says so in a way that is hard to read",
)
def python_supported(e: Machine) -> Finding:
    """Version, implementation and word size of the interpreter that probed."""
    python = e.data.get()["python"]
    version = tuple(int(part) for part in python["minor"].split("."))
    fits = version >= PYTHON_MIN and python["bits"] == 64 and python["implementation"] == "CPython"
    told = f"{python['implementation']} {python['version']}, {python['bits']} bit"
    least = ".".join(map(str, PYTHON_MIN))
    return verdict_of(fits, told, expected=f"CPython from {least}, 64 bit", observed=told)


@CHECKS.check(
    "ram-tier",
    title="The RAM holds the base",
    section="1.3",
    remedy="choose a smaller base: finetune init --model FOLDER_OR_HUB_ID",
    why="what does not fit into the RAM is paged, and a step of seconds takes minutes",
)
def ram_tier(e: Machine) -> Finding:
    """The RAM less what the system needs, against the largest part of the base that it must hold at once."""
    host = e.data.get()
    ram = hosts.usable_ram_gib(host)
    name, size = _largest(e)
    needed = size + WORK_GIB + min(SYSTEM_GIB, ram * SYSTEM_SHARE_MAX)
    limited = " that may be used here" if ram < host["ram_gib"] else ""
    return verdict_of(
        ram >= needed,
        f"{ram:.1f} GiB{limited}, a PC of the tier {hosts.tier(ram)}; the {name} takes {size:.2f} as NF4",
        expected=f"at least {needed:.1f}",
        observed=round(ram, 2),
        unit="GiB",
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/ram_gib"),),
    )


def _largest(e: Machine) -> tuple[str, float]:
    """What the RAM must hold of the base at once: with a card of its own memory, not the denoiser."""
    has_card = e.wanted == "cuda" or (e.wanted == "xpu" and not e.ceiling.integrated)
    sizes = {
        name: hosts.smallest_gib(item)
        for name, item in e.components.items()
        if not (has_card and name == "transformer")
    }
    return max(sizes.items(), key=lambda item: item[1], default=("transformer", 0.0))


@CHECKS.check(
    "accelerator-present",
    title="The device of the target is there",
    section="1.4",
    remedy="finetune init --device auto, then finetune probe --host",
    why="a run on the CPU that was meant for the GPU takes days",
)
def accelerator_present(e: Machine) -> Finding:
    """What torch sees, and what the system lists with a driver, against the target's device."""
    host, wanted = e.data.get(), e.wanted
    present = hosts.accelerators(host)
    if wanted == "cpu":
        told = "cpu, as the target says" if e.target["device"] == "cpu" else "cpu: auto found no accelerator"
        return passed(told, expected=e.target["device"], observed="cpu")
    if wanted in present:
        return passed(f"{wanted}: {present[wanted]}", expected=e.target["device"], observed=present)
    broken = any(hosts.suits(item, wanted) for item in host["adapters"])
    return failed(
        f"no {wanted} device: {listing(_absence(host, wanted))}",
        expected=wanted,
        observed=present or [item["name"] for item in host["adapters"]] or "none",
        remedy=f"install the device's driver, then {PROBE}" if broken else None,
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/adapters"),),
    )


def _absence(host: Mapping[str, Any], wanted: str) -> list[str]:
    """Why each adapter is not it, and which probe could not look."""
    told = [f"{item['name']} {_objection(item, wanted)}" for item in host["adapters"]]
    told += [
        f"{name} could not look ({item['reason']})"
        for name, item in sorted(host["probes"].items())
        if item["status"] in ("failed", "timeout")
    ]
    if host["torch"]["status"] in ("failed", "timeout"):
        told.append(f"torch could not look ({host['torch']['reason']})")
    return told or ["the system lists no graphics adapter"]


def _objection(adapter: Mapping[str, Any], wanted: str) -> str:
    if not hosts.suits(adapter, wanted):
        older = wanted == "xpu" and adapter["vendor"] == "intel"
        return "is of a generation without XPU" if older else f"is no {wanted} device"
    if adapter["name"] == hosts.NO_DRIVER:
        return f"stands for {adapter['pci']}, whose driver is not installed"
    return f"has code {adapter['problem']} in Device Manager"


@CHECKS.check(
    "memory-ceiling",
    title="The accelerator may hold the base",
    section="1.5",
    remedy="choose a smaller base: finetune init --model FOLDER_OR_HUB_ID",
    needs=("accelerator-present",),
    may_skip="the target is cpu or cuda, where there is no share of the RAM to set",
    why="integrated graphics may fill a set share of the RAM only, and die beyond it without a clear message",
)
def memory_ceiling(e: Machine) -> Finding:
    """What torch may allocate, or the share of the RAM that the system grants, against the denoiser as NF4."""
    if e.wanted != "xpu":
        return skipped(f"the device is {e.wanted}")
    found, size = e.ceiling, hosts.smallest_gib(e.components["transformer"])
    needed = size + WORK_GIB
    if found.gib is None:
        raise EvidenceError(
            EVIDENCE,
            "nobody could tell how much memory the accelerator may fill",
            remedy=f"{hosts.install_torch('xpu', e.data.get()['system']['name'])}, then {PROBE}",
        )
    return verdict_of(
        found.gib >= needed,
        f"{found.gib:.1f} GiB ({found.source}); the transformer takes {size:.2f} as NF4",
        expected=f"at least {needed:.1f}",
        observed=round(found.gib, 2),
        unit="GiB",
        remedy=_raise_ceiling(e.data.get(), needed) if found.integrated else None,
    )


def _raise_ceiling(host: Mapping[str, Any], needed: float) -> str | None:
    """The setting that makes room; None where the RAM has none to give."""
    percent = ceil(100 * needed / host["ram_gib"])
    if percent > SHARE_MAX:
        return None
    if host["system"]["name"] == "Windows":
        value = max(75, percent)  # what the published recipe sets
        return f"set {SHARE_VALUE} under {SHARE_KEY} to {value} (DWORD, decimal), reboot, then {PROBE}"
    return f"boot with ttm.pages_limit={ceil(needed * 2**30 / PAGE)}, then {PROBE}"


@CHECKS.check(
    "disk-free",
    title="The disk has room for the base and the runs",
    section="1.6",
    remedy="free disk space, or set HF_HOME to another disk, then finetune probe --host",
    why="a disk that fills up during a download or a save leaves a torn file",
)
def disk_free(e: Machine) -> Finding:
    """Free space on each volume against the base as it is fetched, whole or in part, its NF4 copy, caches and runs."""
    host, ways = e.data.get(), _ways(e)
    free: dict[str, float] = {}
    for place in host["disk"]:
        free[place["volume"]] = min(place["free_gib"], free.get(place["volume"], place["free_gib"]))
    needs = {way: _by_volume(host, places) for way, places in ways.items()}
    short = {
        way: [
            f"{_places(host, volume)}: {gib:.1f} GiB needed, {free[volume]:.1f} free"
            for volume, gib in needed.items()
            if not free[volume] >= gib
        ]
        for way, needed in needs.items()
    }
    fitting = next((way for way in ways if free and not short[way]), None)
    counted = needs[fitting or list(ways)[-1]]
    return verdict_of(
        fitting is not None,
        f"fits {fitting}" if fitting else "; ".join(f"{way}: {listing(short[way])}" for way in ways),
        expected={_places(host, volume): round(gib, 1) for volume, gib in counted.items()},
        observed={_places(host, volume): gib for volume, gib in free.items()},
        unit="GiB",
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/disk"),),
    )


def _ways(e: Machine) -> dict[str, dict[str, float]]:
    """GiB by place, for each way that the base may come here, by its name; the one that leaves more first."""
    base, sizes = e.data.get()["base"], {name: item["disk_gib"] for name, item in e.components.items()}
    quantized = sum(hosts.smallest_gib(item) for name, item in e.components.items() if name != "vae")
    kept = quantized + DISK_WORK_GIB
    told = f"{quantized:.1f} GiB as NF4, {DISK_WORK_GIB:g} for cache and runs"
    missing = {name: _missing_gib(base, item) for name, item in e.components.items()}
    whole, rest, place = sum(sizes.values()), sum(missing.values()), base.get("rest_in", "model cache")
    if not rest:
        return {f"beside the base, which is here: {told}": {"workspace": kept}}
    part = "whole: " if missing == sizes else f"the rest of {whole:.1f} GiB: "
    together = {"workspace": kept + rest} if place == "workspace" else {"workspace": kept, place: rest}
    ways = {f"{part}{rest:.1f} GiB to fetch, {told}": together}
    if HUB_ID.fullmatch(base["reference"]) and base.get("from_hub", True):
        # In the workspace: the file at work, and what stays plain. Of a part in the model cache nothing is taken.
        coming = missing if place == "workspace" else sizes
        at_once = coming.get("vae", 0.0) + min(SHARD_GIB, max(coming.values()))
        name = f"dropped as it is quantized (finetune quantize --model {base['reference']} --drop-fetched)"
        ways[f"{name}: {at_once:.1f} GiB of it at once, {told}"] = {"workspace": kept + at_once}
    return ways


def _missing_gib(base: Mapping[str, Any], component: Mapping[str, Any]) -> float:
    """Yet to be fetched; evidence of earlier versions tells of the whole base only."""
    return float(component.get("missing_gib", 0.0 if base["local"] else component["disk_gib"]))


def _by_volume(host: Mapping[str, Any], places: Mapping[str, float]) -> dict[str, float]:
    needed: dict[str, float] = defaultdict(float)
    for place in host["disk"]:
        needed[place["volume"]] += places.get(place["place"], 0.0)
    return needed


def _places(host: Mapping[str, Any], volume: str) -> str:
    return " and ".join(item["place"] for item in host["disk"] if item["volume"] == volume)


@CHECKS.check(
    "driver-recorded",
    title="The driver's version is on record",
    section="1.7",
    remedy="install the device's driver, then finetune probe --host",
    required=False,
    needs=("accelerator-present",),
    may_skip="the device is the cpu",
    why="most faults of these devices are of one driver version, and go with the next",
)
def driver_recorded(e: Machine) -> Finding:
    """The version of the adapter's driver, or of Level Zero as torch tells it."""
    host, wanted = e.data.get(), e.wanted
    if wanted == "cpu":
        return skipped("the device is cpu")
    versions = {
        item["name"]: item["driver_version"] for item in host["adapters"] if hosts.suits(item, wanted)
    }
    versions |= {f"torch on {item['name']}": item["driver"] for item in host["torch"][wanted]["devices"]}
    known = {name: version for name, version in versions.items() if version}
    told = listing([f"{name}: {version}" for name, version in known.items()])
    return verdict_of(bool(known), told or "no version is known", expected="a version", observed=known)


@CHECKS.check(
    "long-paths",
    title="Windows takes long paths",
    section="1.8",
    remedy="set HKLM\\SYSTEM\\CurrentControlSet\\Control\\FileSystem LongPathsEnabled to 1, then " + PROBE,
    required=False,
    may_skip="the system is not Windows",
    why="files of a model cache deep in a user's folder pass 260 characters",
)
def long_paths(e: Machine) -> Finding:
    """The registry value LongPathsEnabled."""
    host = e.data.get()
    if host["system"]["name"] != "Windows":
        return skipped(f"{host['system']['name']} has no such limit")
    enabled = host["long_paths"]
    told = {True: "enabled", False: "paths end at 260 characters", None: "the registry could not be read"}
    return verdict_of(enabled is True, told[enabled], expected=True, observed=enabled)


def judge(evidence: Machine) -> list[Check]:
    return CHECKS.run(evidence)


GATE = Gate(
    number="01",
    name="host",
    skill="qwen-image-edit-aipc-finetune-01-host",
    purpose="the machine: device, driver, memory ceiling, disk",
    collect=collect,
    judge=judge,
    specs=tuple(CHECKS.specs),
    next_commands={None: "finetune dataset"},
)
