"""Gate 01: healthy machines pass, and each planted fault turns its check and no other."""

from pathlib import Path
from typing import Any

import pytest

from gates.selftest.faults.host import (
    ABSENT,
    NOTHING,
    REAL,
    _data,
    _disk,
    _hub,
    _real,
    _set,
    _target,
    _unseen,
)

RECORDED = Path(__file__).resolve().parents[1] / "runtime" / "probes" / "recorded"


# device of the target, what is spoiled, the checks that fail


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


WAYS = {  # workspace, model cache, one volume for both, what the message names
    "both": (100.0, 100.0, True, "fits whole: 53.7 GiB to fetch"),
    "the cache elsewhere": (17.0, 54.0, False, "fits whole"),
    "no room for all": (60.0, 60.0, True, "fits dropped as it is quantized (finetune quantize --model Qwen/"),
    "a small cache": (26.0, 1.0, False, "9.6 GiB of it at once, 14.1 GiB as NF4"),
}


@pytest.mark.parametrize("case", WAYS)
def test_the_disk_fits_a_base_whole_or_dropped(case: str, made: Any, judge: Any) -> None:
    workspace, cache, one, told = WAYS[case]
    volumes = ("a", "a" if one else "b")
    _hub(disk=_disk(("workspace", workspace, volumes[0]), ("model cache", cache, volumes[1])))(made)
    check = _check(judge(made, "01"), "disk-free")
    assert check.status == "pass" and told in check.message


def _partly(gib: float, **base: Any) -> Any:
    """The published base, all but so much of its denoiser here."""
    components = {name: {**item, "missing_gib": 0.0} for name, item in REAL.items()}
    components["transformer"]["missing_gib"] = gib
    return {"reference": "Qwen/Qwen-Image-Edit", "local": not gib, "components": components, **base}


REST = {  # GiB missing, where it comes to, workspace, model cache, what the message names
    "in the cache": (20.0, "model cache", 17.0, 21.0, "fits the rest of 53.7 GiB: 20.0 GiB to fetch"),
    "in the workspace": (20.0, "workspace", 37.0, 0.1, "fits the rest of 53.7 GiB: 20.0 GiB to fetch"),
    "dropped": (20.0, "workspace", 26.0, 0.1, "9.4 GiB of it at once"),
    "a last shard": (3.0, "workspace", 20.0, 0.1, "fits the rest of 53.7 GiB: 3.0 GiB to fetch"),
    "of a part in the cache nothing is dropped": (3.0, "model cache", 26.0, 0.1, "9.6 GiB of it at once"),
    "all": (0.0, "workspace", 17.0, 0.1, "fits beside the base, which is here"),
}


@pytest.mark.parametrize("case", REST)
def test_of_a_base_that_is_here_in_part_the_rest_counts(case: str, made: Any, judge: Any) -> None:
    gib, place, workspace, cache, told = REST[case]
    _target(model="Qwen/Qwen-Image-Edit")(made)
    disk = _disk(("workspace", workspace, "a"), ("model cache", cache, "b"))
    _set(base=_partly(gib, rest_in=place), disk=disk)(made)
    check = _check(judge(made, "01"), "disk-free")
    assert check.status == "pass" and told in check.message


def test_of_a_folder_of_ones_own_nothing_is_dropped(made: Any, judge: Any) -> None:
    """Its name in the workspace looks like a hub id."""
    disk = _disk(("workspace", 26.0, "a"), ("model cache", 90.0, "b"))
    for from_hub, status in ((True, "pass"), (False, "fail")):
        base = _partly(20.0, reference="models/base", rest_in="workspace", from_hub=from_hub)
        _set(base=base, disk=disk)(made)
        assert _check(judge(made, "01"), "disk-free").status == status


def test_a_disk_too_small_is_told_for_both_ways(made: Any, judge: Any) -> None:
    _hub(disk=_disk(("workspace", 20.0, "a"), ("model cache", 20.0, "a")))(made)
    check = _check(judge(made, "01"), "disk-free")
    assert (
        check.status == "fail" and "69.8 GiB needed" in check.message and "25.7 GiB needed" in check.message
    )


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
