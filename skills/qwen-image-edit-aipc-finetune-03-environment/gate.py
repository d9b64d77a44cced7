"""gate check 03: are the packages the right builds, without a clash, and is the device usable?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gates import hosts, versions
from gates.checks import Checks, Evidence, Finding, Gate, failed, listing, passed, verdict_of
from gates.evidence import MissingEvidenceError, Reading, attempt
from gates.verdict import Check, EvidenceRef
from gates.workspace import Workspace

PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "safetensors")
# All of them hold the package `triton`, so the last one installed lies over the others.
TRITONS = {
    "xpu": ("pytorch-triton-xpu", "triton-xpu"),
    "cuda": ("triton", "pytorch-triton", "triton-windows"),
}
BITSANDBYTES_XPU = ">=0.48.2"  # the first with kernels for XPU
NF4_ERROR_MAX = 0.15  # relative; normal weights have 0.092 in NF4, and a wrong kernel 1 or more
OURS = "aipc-finetune"

EVIDENCE = ".gates/evidence/03-environment.json"
PROBE = "finetune probe --environment"
INSTALL = f'pip install -e ".[train]" -c constraints.txt, then {PROBE}'


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Evidence):
    target: dict[str, Any]
    data: Reading[dict[str, Any]]
    """evidence 03-environment"""
    host: Reading[dict[str, Any]]
    """evidence 01-host: what `auto` could mean here"""

    @property
    def torch(self) -> dict[str, Any]:
        torch: dict[str, Any] = self.data.get()["torch"]
        return torch

    @property
    def wanted(self) -> str:
        if self.target["device"] != "auto":
            return str(self.target["device"])
        return hosts.resolve("auto", {**self.host.get(), "torch": self.torch})

    def version(self, name: str) -> str | None:
        return next((item["version"] for item in self.data.get()["packages"] if item["name"] == name), None)


def collect(workspace: Workspace) -> Environment:
    found = Environment(
        target=workspace.target,
        data=attempt(lambda: workspace.evidence("03-environment")),
        host=attempt(lambda: workspace.evidence("01-host")),
    )
    device = attempt(lambda: found.wanted).value
    return Environment(
        target=found.target,
        data=found.data,
        host=found.host,
        device=device,
        inputs=tuple(workspace.inputs.values()),
    )


CHECKS: Checks[Environment] = Checks()


@CHECKS.check(
    "python-version",
    title="The interpreter is the one that trains",
    section="3.1",
    remedy=f"{PROBE}, with the interpreter that trains; or finetune init, with this one",
    why="packages of one interpreter say nothing about those of another",
)
def python_version(e: Environment) -> Finding:
    """major.minor of the interpreter that probed, against target.json."""
    python = e.data.get()["python"]
    return verdict_of(
        python["minor"] == e.target["python"],
        f"{python['implementation']} {python['version']}, the target names {e.target['python']}",
        expected=e.target["python"],
        observed=python["minor"],
    )


@CHECKS.check(
    "packages-present",
    title="Every package is there, in a version that was tried",
    section="3.2",
    remedy=INSTALL,
    why="the layers of diffusers, transformers and peft that this builds on move with their minor versions",
)
def packages_present(e: Environment) -> Finding:
    """Installed versions against the bounds in the metadata of the installed aipc-finetune."""
    listed = {item["name"]: item for item in e.data.get()["packages"]}
    faults = [fault for name in PACKAGES if (fault := _package_fault(name, listed.get(name)))]
    seen = {name: item["version"] or "absent" for name, item in listed.items()}
    return verdict_of(
        not faults,
        listing(faults, 7) or ", ".join(f"{name} {version}" for name, version in seen.items()),
        expected={name: item["bounds"] or "any" for name, item in listed.items()},
        observed=seen,
        evidence=(EvidenceRef(path=EVIDENCE, locator="/data/packages"),),
    )


def _package_fault(name: str, item: Mapping[str, Any] | None) -> str:
    if item is None:
        return f"{name} was not looked for"
    if item["version"] is None:
        return f"{name} is absent"
    try:
        fits = versions.within(item["version"], item["bounds"])
    except ValueError as error:
        return f"{name}: {error}"
    return "" if fits else f"{name} {item['version']} is not {item['bounds']}"


@CHECKS.check(
    "torch-build-matches-device",
    title="torch is built for the device, and sees it",
    section="3.3",
    remedy=f"{hosts.install_torch('xpu', 'Windows')}, then {PROBE}",
    why="a torch for another device is silent about it and trains on the CPU",
)
def torch_build_matches_device(e: Environment) -> Finding:
    """torch's local version and torch.version, and whether torch sees the device, in a child process."""
    torch, wanted, build = e.torch, e.wanted, build_of(e.torch)
    observed = {"version": torch["version"], "build": build, "sees": hosts.seen_by_torch(torch) or "cpu"}
    if torch["status"] != "ok":
        return failed(f"torch {_told(torch)}", expected=wanted, observed=observed, remedy=_reinstall(torch))
    if wanted == "cpu" or torch[wanted]["available"]:
        devices = [item["name"] for item in torch[wanted]["devices"]] if wanted != "cpu" else []
        told = f"{wanted}: torch {torch['version']}, built for {build}"
        return passed(told + f", sees {listing(devices)}" * bool(devices), expected=wanted, observed=observed)
    beside = f"; {_auto_loss(e, wanted)}" if e.target["device"] == "auto" else ""
    if build != wanted:
        told = f"torch {torch['version']} is built for {build}, the device is {wanted}{beside}"
        return failed(told, expected=wanted, observed=observed, remedy=_right_build(e, wanted))
    return failed(
        f"torch {torch['version']} is built for {wanted} and sees no device{beside}",
        expected=wanted,
        observed=observed,
        remedy=f"install the device's newest driver, restart, then {PROBE}",
    )


def build_of(torch: Mapping[str, Any]) -> str:
    """xpu, cuda, hip or cpu: by the local version, or, as source builds have none, by torch.version."""
    local = versions.local_part(torch["version"] or "")
    if local.startswith("xpu"):
        return "xpu"
    if local.startswith("cu"):
        return "cuda"
    return next((name for name in ("xpu", "cuda", "hip") if torch["built"][name]), "cpu")


def _told(finding: Mapping[str, Any]) -> str:
    """How a child ended, for a sentence that begins with what it was."""
    words = {"ok": "works", "absent": "is absent", "failed": "failed", "timeout": "hung"}
    return (
        f"{words[finding['status']]}: {finding['reason']}" if finding["reason"] else words[finding["status"]]
    )


def _reinstall(torch: Mapping[str, Any]) -> str | None:
    return INSTALL if torch["status"] == "absent" else None


def _auto_loss(e: Environment, wanted: str) -> str:
    name = hosts.accelerators(e.host.get()).get(wanted, wanted)
    return f"auto would train on the CPU beside {name}"


def _install_torch(e: Environment, device: str) -> str:
    host = e.host.value
    system = host["system"]["name"] if host is not None else ""
    # What was built for another device (ROCm, say) goes with the one that is wanted.
    return f"{hosts.install_torch(device if device in ('xpu', 'cuda', 'cpu') else e.wanted, system)}, then {PROBE}"


def _right_build(e: Environment, wanted: str) -> str:
    build = _install_torch(e, wanted)
    return f"{build}; or finetune init --device cpu" if e.target["device"] == "auto" else build


@CHECKS.check(
    "at-most-one-triton",
    title="There is one triton at most, and it is torch's",
    section="3.4",
    remedy="pip uninstall -y triton triton-xpu pytorch-triton-xpu triton-windows, then "
    f"{hosts.install_torch('xpu', 'Windows')}, then {PROBE}",
    why="they all install one folder: the last one wins, and kernels are compiled for another device",
)
def at_most_one_triton(e: Environment) -> Finding:
    """Installed distributions that hold the package triton, against the build of torch."""
    tritons, build = e.data.get()["tritons"], build_of(e.torch)
    told = [f"{item['name']} {item['version']}" for item in tritons]
    fitting = TRITONS.get(build)
    strange = [item["name"] for item in tritons if fitting is not None and item["name"] not in fitting]
    message = listing(told) or "none"
    if strange:
        message += f"; torch is built for {build}, which goes with {' or '.join(fitting or ())}"
    names = " ".join(item["name"] for item in tritons)
    return verdict_of(
        len(tritons) <= 1 and not strange,
        message,
        expected=f"at most one, of {', '.join(fitting)}" if fitting else "at most one",
        observed=told,
        remedy=f"pip uninstall -y {names}, then {_install_torch(e, build)}",
    )


@CHECKS.check(
    "quantizer-backend",
    title="NF4 weights can be used on the device",
    section="3.5",
    remedy=f'pip install "bitsandbytes{BITSANDBYTES_XPU}", then {PROBE}',
    needs=("packages-present", "torch-build-matches-device"),
    why="the denoiser fits an AI PC as NF4 only, and a version without kernels for XPU says so at the first step",
)
def quantizer_backend(e: Environment) -> Finding:
    """bitsandbytes' version, and a small weight quantized on the CPU and read back on the device, in a child."""
    found, wanted, version = e.data.get()["quantizer"], e.wanted, e.version("bitsandbytes")
    if found["device"] != wanted:
        raise MissingEvidenceError(
            EVIDENCE, f"tried the quantizer on {found['device']}, the device is {wanted}", remedy=PROBE
        )
    if wanted == "xpu" and not (version and versions.within(version, BITSANDBYTES_XPU)):
        return failed(
            f"bitsandbytes {version} has no XPU backend", expected=BITSANDBYTES_XPU, observed=version
        )
    error = found["dequantize_error"]
    details: dict[str, Any] = {
        "expected": f"at most {NF4_ERROR_MAX}",
        "observed": error,
        "unit": "relative error",
        "evidence": (EvidenceRef(path=EVIDENCE, locator="/data/quantizer"),),
    }
    if error is None:
        remedy = f"update the device's driver and bitsandbytes, then {PROBE}"
        return failed(f"NF4 on {wanted} {_told(found)}", remedy=remedy, **details)
    told = f"bitsandbytes {version} on {wanted}"
    if found["status"] != "ok":
        told += f"; quantizing there {_told(found)}: quantize on the CPU"
    return verdict_of(error <= NF4_ERROR_MAX, told, **details)


@CHECKS.check(
    "imports-clean",
    title="What training imports imports, and is what it is called",
    section="3.6",
    remedy=INSTALL,
    needs=("packages-present",),
    why="a package that is there and does not import stops a run minutes later, after the models are loaded",
)
def imports_clean(e: Environment) -> Finding:
    """Each training package imported in a child; our own names not taken by another distribution."""
    data = e.data.get()
    broken, foreign = _import_faults(data["imports"]), _name_faults(data["names"])
    owners = sorted(
        {item["distribution"] for kind in ("distributions", "scripts") for item in data["names"][kind]}
    )
    remedy = f"pip uninstall -y {' '.join(owners)}, then {INSTALL}" if owners and not broken else None
    return verdict_of(
        not broken and not foreign,
        listing([*broken, *foreign]) or f"{len(data['imports']['modules'])} packages import",
        expected=0,
        observed=len(broken) + len(foreign),
        unit="faults",
        remedy=remedy,
    )


def _import_faults(found: Mapping[str, Any]) -> list[str]:
    faults = [f"{name}: {reason}" for name, reason in found["modules"].items() if reason]
    if found["status"] != "ok":
        return [*faults, f"the imports {_told(found)}"]
    return faults + [f"{name} was not imported" for name in PACKAGES if name not in found["modules"]]


def _name_faults(found: Mapping[str, Any]) -> list[str]:
    if found["status"] != "ok":
        return [f"the search for foreign packages {_told(found)}"]
    faults = [
        f"`{item['name']}` is another package: {item['where']}"
        for item in found["packages"]
        if not item["ours"]
    ]
    faults += [
        f"{item['distribution']} installs a package `{item['name']}`"
        for item in _of_others(found["distributions"])
    ]
    return faults + [
        f"{item['distribution']} installs a command `{item['name']}`" for item in _of_others(found["scripts"])
    ]


def _of_others(items: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [item for item in items if item["distribution"] != OURS]


@CHECKS.check(
    "ipex-not-mixed",
    title="No Intel extension for another torch",
    section="3.7",
    remedy=f"pip uninstall -y intel-extension-for-pytorch, then {PROBE}",
    why="it is retired; beside another torch its import ends the process, and torch has its own XPU backend",
)
def ipex_not_mixed(e: Environment) -> Finding:
    """intel-extension-for-pytorch absent, or of torch's minor version and importable in a child."""
    found, torch = e.data.get()["ipex"], e.torch["version"]
    if found is None:
        return passed("absent, as it should be", expected="absent", observed="absent")
    same = torch is not None and versions.minor(found["version"]) == versions.minor(torch)
    told = f"intel-extension-for-pytorch {found['version']} beside torch {torch}"
    return verdict_of(
        same and found["status"] == "ok",
        told if found["status"] == "ok" else f"{told}: its import {_told(found)}",
        expected="absent, or of torch's minor version",
        observed=found["version"],
    )


def judge(evidence: Environment) -> list[Check]:
    return CHECKS.run(evidence)


GATE = Gate(
    number="03",
    name="environment",
    skill="qwen-image-edit-aipc-finetune-03-environment",
    purpose="the packages: right builds, no clash, device usable",
    collect=collect,
    judge=judge,
    specs=tuple(CHECKS.specs),
    next_commands={None: "finetune recommend"},
)
