"""Gate 01: healthy machines pass, and each planted fault turns its check and no other."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HOST = "01-host"
EVIDENCE = ".gates/evidence/01-host.json"
RECORDED = Path(__file__).resolve().parents[1] / "runtime" / "probes" / "recorded"
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


def _data(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    return lambda made: made.edit(made.evidence(HOST), lambda document: change(document["data"]))


def _set(**values: Any) -> Callable[[Any], None]:
    """Values of the evidence's data; a dictionary is merged into the one that is there."""

    def change(data: dict[str, Any]) -> None:
        for key, value in values.items():
            data[key] = {**data[key], **value} if isinstance(value, dict) else value

    return _data(change)


def _adapter(**values: Any) -> Callable[[Any], None]:
    """The first adapter, where torch can't see it any more."""

    def change(data: dict[str, Any]) -> None:
        data["adapters"][0].update(values)
        data["torch"].update(xpu=NOTHING, cuda=NOTHING)

    return _data(change)


def _real(**values: Any) -> Callable[[Any], None]:
    """The published base, here, on a machine with these values."""

    def spoil(made: Any) -> None:
        _data(lambda data: data["base"].update(components=REAL))(made)
        _set(**values)(made)

    return spoil


def _unseen(**values: Any) -> Callable[[Any], None]:
    """The published base, where torch does not tell the ceiling and the system must."""
    return _real(torch={"xpu": NOTHING}, **values)


def _target(**values: Any) -> Callable[[Any], None]:
    return lambda made: made.edit(".gates/target.json", lambda document: document.update(values))


def _disk(*rows: tuple[str, float, str]) -> list[dict[str, Any]]:
    return [{"place": place, "free_gib": free, "volume": volume} for place, free, volume in rows]


ABSENT = "accelerator-present"
ALL = {"os-supported", "python-supported", "ram-tier", ABSENT, "disk-free", "long-paths"}

# device of the target, what is spoiled, the checks that fail
FAULTS: dict[str, tuple[str, Callable[[Any], Any], set[str]]] = {
    "not probed": ("cpu", lambda m: m.evidence(HOST).unlink(), ALL),
    "a probe that did not end": (
        "cpu", lambda m: m.edit(m.evidence(HOST), lambda d: d.update(complete=False, data={})), ALL
    ),
    "macOS": ("cpu", _set(system={"name": "Darwin", "machine": "arm64"}), {"os-supported"}),
    "an old Windows": ("xpu", _set(system={"build": 18363}), {"os-supported"}),
    "a Windows without a build": ("xpu", _set(system={"build": None}), {"os-supported"}),
    "XPU on Arm": ("xpu", _set(system={"machine": "ARM64"}), {"os-supported"}),
    "32-bit Linux": ("cpu", _set(system={"machine": "i686"}), {"os-supported"}),
    "Python 3.10": ("cpu", _set(python={"minor": "3.10", "version": "3.10.9"}), {"python-supported"}),
    "32-bit Python": ("cpu", _set(python={"bits": 32}), {"python-supported"}),
    "PyPy": ("cpu", _set(python={"implementation": "PyPy"}), {"python-supported"}),
    "16 GB for the published base": ("cpu", _real(ram_gib=15.6), {"ram-tier"}),
    "32 GB of which 8 may be used": ("cpu", _real(ram_limit_gib=8.0), {"ram-tier"}),
    "8 GB beside a card": ("cuda", _real(ram_gib=7.4), {"ram-tier"}),
    "probed for another base": ("cpu", _target(model="models/other"), {"ram-tier", "disk-free"}),
    "xpu wanted, none there": ("cpu", _target(device="xpu"), {ABSENT}),
    "xpu wanted, NVIDIA there": ("cuda", _target(device="xpu"), {ABSENT}),
    "cuda wanted, Arc there": ("xpu", _target(device="cuda"), {ABSENT}),
    "graphics before XPU": ("xpu", _set(adapters=[UHD], torch={"xpu": NOTHING}), {ABSENT}),
    "Arc without its driver": ("xpu", _adapter(name="Microsoft Basic Display Adapter"), {ABSENT}),
    "Arc with code 43": ("xpu", _adapter(problem=43), {ABSENT}),
    "a share too small": ("xpu", _unseen(memory={"share_percent": 30}), {"memory-ceiling"}),
    "16 GB, Intel's share": (
        "xpu", _unseen(ram_gib=15.6, memory={"share_percent": 57}), {"ram-tier", "memory-ceiling"}
    ),
    "torch sees too little": (
        "xpu",
        _real(torch={"xpu": {"available": True, "devices": [{
            "name": "Arc", "total_gib": 7.5, "driver": "1", "integrated": True, "device_id": "64a0"}]}}),
        {"memory-ceiling"},
    ),
    "a card of 8 GiB": (
        "xpu",
        lambda m: (_real()(m), _adapter(name="Arc A750", kind="card", memory_gib=7.9)(m)),
        {"memory-ceiling"},
    ),
    "a disk that is full": ("cpu", _set(disk=_disk(("workspace", 0.5, "a"))), {"disk-free"}),
    "no room to fetch the base": (
        "cpu",
        _real(base={"local": False}, disk=_disk(("workspace", 90.0, "a"), ("model cache", 40.0, "b"))),
        {"disk-free"},
    ),
    "one volume for both": (
        "cpu",
        _real(base={"local": False}, disk=_disk(("workspace", 60.0, "a"), ("model cache", 60.0, "a"))),
        {"disk-free"},
    ),
    "no disk was looked at": ("cpu", _set(disk=[]), {"disk-free"}),
    "no version of the driver": (
        "xpu", _adapter(driver_version=None), {"driver-recorded"}
    ),
    "short paths": ("xpu", _set(long_paths=False), {"long-paths"}),
    "paths not known": ("xpu", _set(long_paths=None), {"long-paths"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_its_check(fault: str, make: Any, judge: Any, assert_turned: Any) -> None:
    device, spoil, expected = FAULTS[fault]
    made = make(device)
    spoil(made)
    assert_turned(judge(made, "01"), fail=expected)


@pytest.mark.parametrize(("device", "passed", "skipped"), [("cpu", 5, 3), ("xpu", 8, 0), ("cuda", 6, 2)])
def test_healthy(device: str, passed: int, skipped: int, make: Any, judge: Any) -> None:
    verdict = judge(make(device), "01")
    assert verdict.passes and verdict.device == device
    assert (verdict.counts["pass"], verdict.counts["skip"]) == (passed, skipped)


def _check(verdict: Any, name: str) -> Any:
    return next(check for check in verdict.checks if check.id == name)


TIERS = [
    (14.0, "below 16 GiB"),
    (15.6, "16 GiB"),
    (23.5, "16 GiB"),
    (31.2, "32 GiB"),
    (32.0, "32 GiB"),
    (47.0, "32 GiB"),
    (63.4, "64 GiB"),
    (94.9, "96 GiB"),
    (127.0, "96 GiB"),
]


@pytest.mark.parametrize(("ram_gib", "tier"), TIERS)
def test_a_tier_is_what_the_pc_was_sold_with(ram_gib: float, tier: str, made: Any, judge: Any) -> None:
    _set(ram_gib=ram_gib)(made)
    check = _check(judge(made, "01"), "ram-tier")
    assert check.status == "pass" and f"a PC of the tier {tier};" in check.message


@pytest.mark.parametrize(
    ("device", "ram_gib", "passes"),
    [
        ("cpu", 15.6, False),
        ("cpu", 31.2, True),
        ("xpu", 31.2, True),
        ("cuda", 15.6, True),
        ("cpu", 3.8, False),
    ],
)
def test_the_published_base_needs_32_gib_where_memory_is_shared(
    device: str, ram_gib: float, passes: bool, make: Any, judge: Any
) -> None:
    made = make(device)
    _real(ram_gib=ram_gib)(made)
    assert (_check(judge(made, "01"), "ram-tier").status == "pass") == passes


def test_a_tiny_base_needs_no_tier(made: Any, judge: Any) -> None:
    _set(ram_gib=3.8)(made)
    assert judge(made, "01").passes


@pytest.mark.parametrize(
    ("ram_gib", "share", "needs_reboot"),
    [(31.6, 20, "to 75 (DWORD"), (12.8, 57, "to 87 (DWORD"), (11.0, 57, "")],
)
def test_the_remedy_names_the_registry_value(
    ram_gib: float, share: int, needs_reboot: str, make: Any, judge: Any
) -> None:
    made = make("xpu")
    _unseen(ram_gib=ram_gib, memory={"share_percent": share})(made)
    check = _check(judge(made, "01"), "memory-ceiling")
    assert check.status == "fail"
    if needs_reboot:
        assert "SystemPartitionCommitLimitPercentage" in check.remedy and "reboot" in check.remedy
        assert needs_reboot in check.remedy
    else:
        assert check.remedy.startswith("choose a smaller base")


def test_without_the_registry_value_windows_grants_half(make: Any, judge: Any) -> None:
    made = make("xpu")
    _unseen(memory={"share_percent": None})(made)
    check = _check(judge(made, "01"), "memory-ceiling")
    assert (check.status, check.observed) == ("pass", 15.8)
    assert "Windows' default" in check.message


@pytest.mark.parametrize(("limit", "status"), [(15.5, "pass"), (7.75, "fail"), (None, "error")])
def test_linux_integrated_graphics(limit: float | None, status: str, make: Any, judge: Any) -> None:
    made = make("xpu")
    _unseen(system={"name": "Linux", "machine": "x86_64", "build": None}, memory={"kernel_limit_gib": limit})(
        made
    )
    check = _check(judge(made, "01"), "memory-ceiling")
    assert check.status == status
    if status == "fail":
        assert check.remedy.startswith("boot with ttm.pages_limit=")
    if status == "error":
        assert "pip install torch==" in check.remedy and "XPU_INDEX_URL" in check.remedy


def test_a_torch_that_died_is_told_and_the_adapter_counts(make: Any, judge: Any) -> None:
    made = make("xpu")
    died = {"status": "failed", "exit": -11, "reason": "killed by SIGSEGV", "xpu": NOTHING}
    _set(torch=died)(made)
    assert judge(made, "01").passes
    _set(adapters=[])(made)
    check = _check(judge(made, "01"), ABSENT)
    assert check.status == "fail" and "torch could not look (killed by SIGSEGV)" in check.message


def test_a_powershell_that_hung_is_told(make: Any, judge: Any) -> None:
    made = make("xpu")
    hung = {"status": "timeout", "seconds": 30.0, "exit": None, "reason": "no answer within 30 s"}
    _set(adapters=[], torch={"xpu": NOTHING}, probes={"powershell": hung})(made)
    check = _check(judge(made, "01"), ABSENT)
    assert "powershell could not look (no answer within 30 s)" in check.message


@pytest.mark.parametrize(("device", "resolved"), [("cpu", "cpu"), ("xpu", "xpu"), ("cuda", "cuda")])
def test_auto(device: str, resolved: str, make: Any, judge: Any) -> None:
    made = make(device)
    _target(device="auto")(made)
    verdict = judge(made, "01")
    assert verdict.passes and verdict.device == resolved
    if device == "cpu":
        assert _check(verdict, ABSENT).message == "cpu: auto found no accelerator"


def test_a_base_of_packed_weights_is_not_packed_again(make: Any, judge: Any) -> None:
    made = make("xpu")
    packed = {"transformer": {"parameters": 20_430_000_000, "disk_gib": 10.6}}
    _data(lambda data: data["base"].update(components=packed))(made)
    assert "takes 10.60 as NF4" in _check(judge(made, "01"), "memory-ceiling").message


def test_a_base_without_weights_is_an_error(made: Any, judge: Any, assert_turned: Any) -> None:
    _data(lambda data: data["base"].update(components={}))(made)
    assert_turned(judge(made, "01"), error={"ram-tier", "disk-free"})


# ---- from recorded outputs to the verdict: target, RAM, checks that fail for the published base

MACHINES = {
    "windows-lunar-lake": ("xpu", 31.6, set()),
    "windows-meteor-lake": ("xpu", 15.5, {"ram-tier", "memory-ceiling", "long-paths"}),
    "windows-b580": ("xpu", 31.8, set()),
    "windows-nvidia": ("cuda", 31.2, {"long-paths"}),
    "windows-none": ("xpu", 31.2, {ABSENT}),
    "windows-no-driver": ("xpu", 31.6, {ABSENT}),
    "linux-lunar-lake": ("xpu", 31.0, set()),
    "linux-a770": ("xpu", 62.5, set()),
    "linux-h200": ("cuda", 128.0, set()),
    "linux-none": ("xpu", 31.0, {ABSENT}),
}
UNKNOWN = {"linux-a770": {"memory-ceiling"}}  # Linux tells no size of a card's memory; torch does
KINDS = {
    "windows-lunar-lake": "xpu: Intel(R) Arc(TM) 140V GPU (16GB)",
    "windows-b580": "xpu: Intel(R) Arc(TM) B580 Graphics",
    "windows-nvidia": "cuda: NVIDIA GeForce RTX 4070 Laptop GPU",
    "linux-lunar-lake": "xpu: Intel Corporation Lunar Lake [Intel Arc Graphics 130V / 140V]",
    "linux-a770": "xpu: Intel Corporation DG2 [Arc A770]",
    "linux-h200": "cuda: NVIDIA H200",
}


def _found(name: str) -> Any:
    from runtime.probes import host
    from runtime.probes.child import Outcome

    def printed(path: Path) -> Outcome:
        if not path.is_file():
            return Outcome(status="absent", seconds=0.0, exit=None, reason="not there")
        text = path.read_text(encoding="utf-8")
        return Outcome(status="ok", seconds=0.1, exit=0, reason="", stdout=text)

    if name.startswith("windows"):
        return host.read_windows(printed(RECORDED / f"{name}.json"), printed(RECORDED / f"{name}.smi.csv"))
    root = RECORDED / name
    return host.read_linux(root, printed(root / "lspci.txt"), printed(root / "nvidia-smi.csv"))


@pytest.mark.parametrize("name", MACHINES)
def test_recorded_machines(name: str, make: Any, judge: Any, assert_turned: Any) -> None:
    device, ram_gib, expected = MACHINES[name]
    found, windows = _found(name), name.startswith("windows")
    made = make(device)
    _real(
        torch={"xpu": NOTHING, "cuda": NOTHING},
        ram_gib=ram_gib,
        adapters=[adapter.to_json() for adapter in found.adapters],
        memory={"share_percent": found.share_percent, "kernel_limit_gib": found.kernel_limit_gib},
        long_paths=found.long_paths,
        system={
            "name": "Windows" if windows else "Linux",
            "build": 26100 if windows else None,
            "machine": "AMD64" if windows else "x86_64",
        },
        probes={probe: outcome.to_json() for probe, outcome in found.probes.items()},
    )(made)
    verdict = judge(made, "01")
    assert_turned(verdict, fail=expected, error=UNKNOWN.get(name, set()))
    if name in KINDS:
        assert _check(verdict, ABSENT).message == KINDS[name]


def test_torch_tells_what_linux_does_not(make: Any, judge: Any) -> None:
    made = make("xpu")
    device = {
        "name": "Intel(R) Arc(TM) A770 Graphics", "total_gib": 15.11, "driver": "1.6.32567+18",
        "integrated": None, "device_id": None,
    }  # fmt: skip
    adapters = [adapter.to_json() for adapter in _found("linux-a770").adapters]
    _real(adapters=adapters, torch={"xpu": {"available": True, "devices": [device]}})(made)
    check = _check(judge(made, "01"), "memory-ceiling")
    assert check.status == "pass" and check.observed == 15.11
