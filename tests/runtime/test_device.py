"""One shim over cpu, xpu and cuda; accelerators are pretended, for a test machine has none."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime import device
from runtime.device import GIB, Device
from runtime.errors import UserError

CPU = Device(type="cpu", name="x", total_gib=1.0, reason="")
XPU = Device(type="xpu", name="Arc", total_gib=16.0, reason="")


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "accelerator_type", lambda: None)


@pytest.fixture
def arc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """An Arc card of 16 GiB; returns the names of the calls that reached it."""
    calls: list[str] = []

    def answer(name: str, value: Any) -> Any:
        return lambda *given: (calls.append(name), value)[1]

    monkeypatch.setattr(device, "accelerator_type", lambda: "xpu")
    fake = SimpleNamespace(
        current_device_index=answer("index", 0),
        memory_allocated=answer("allocated", 3 * GIB),
        memory_reserved=answer("reserved", 4 * GIB),
        max_memory_allocated=answer("peak", 5 * GIB),
        reset_peak_memory_stats=answer("reset", None),
        synchronize=answer("synchronize", None),
        empty_cache=answer("empty", None),
    )
    monkeypatch.setattr(torch, "accelerator", fake)
    properties = SimpleNamespace(name="Intel Arc B580", total_memory=16 * GIB)
    monkeypatch.setattr(torch.xpu, "get_device_properties", answer("properties", properties))
    return calls


@pytest.mark.usefixtures("no_accelerator")
def test_without_accelerator() -> None:
    found = device.pick("auto")
    assert (found.type, found.reason, found.is_accelerator) == (
        "cpu",
        "auto: torch sees no accelerator",
        False,
    )
    assert device.pick("cpu").reason == "as configured"
    for kind in ("xpu", "cuda"):
        with pytest.raises(UserError, match=rf"device {kind} is not there: .* sees no accelerator") as caught:
            device.pick(kind)
        assert "hardware.device: auto" in caught.value.remedy


def test_with_an_arc_card(arc: list[str]) -> None:
    found = device.pick("auto")
    assert found == Device(type="xpu", name="Intel Arc B580", total_gib=16.0, reason="auto: torch sees xpu")
    assert device.pick("xpu").reason == "as configured"
    assert device.pick("cpu").type == "cpu"
    with pytest.raises(UserError, match=r"device cuda is not there: .* sees xpu"):
        device.pick("cuda")


def test_memory_is_the_allocators_on_an_accelerator(arc: list[str]) -> None:
    used = device.memory(XPU)
    assert (used.alloc_gib, used.reserved_gib, used.peak_gib) == (3.0, 4.0, 5.0)
    assert used.rss_gib > 0.01


def test_the_cpu_never_asks_the_accelerator(arc: list[str]) -> None:
    used = device.memory(CPU)
    assert (used.alloc_gib, used.reserved_gib, used.peak_gib) == (0.0, 0.0, 0.0)
    for call in (device.reset_peak, device.synchronize, device.free_cached):
        call(CPU)
    assert arc == []
    for call in (device.reset_peak, device.synchronize, device.free_cached):
        call(XPU)
    assert arc == ["reset", "synchronize", "empty"]


@pytest.mark.parametrize(
    ("told", "integrated"),
    [
        ({"is_integrated_gpu": True}, True),
        ({"is_integrated_gpu": False, "is_integrated": True}, False),
        ({"is_integrated": 1}, True),
        ({"is_integrated": 0}, False),
        ({}, None),
    ],
)
def test_whether_a_device_shares_the_hosts_memory(
    arc: list[str], monkeypatch: pytest.MonkeyPatch, told: dict[str, Any], integrated: bool | None
) -> None:
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda index: SimpleNamespace(**told))
    assert device.is_integrated() is integrated


def test_the_allocator_is_held_to_a_share_where_the_backend_can(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[float] = []
    backend = SimpleNamespace(set_per_process_memory_fraction=shares.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: backend)
    assert device.limit_memory(XPU, 4.0) == "" and device.limit_memory(XPU, 40.0) == ""
    assert shares == [0.25, 1.0]
    monkeypatch.setattr(torch, "get_device_module", lambda kind: SimpleNamespace())
    assert "has no limit for xpu" in device.limit_memory(XPU, 4.0)
    assert "CPU" in device.limit_memory(CPU, 4.0)


def test_budget_is_a_share_of_what_is_there(arc: list[str]) -> None:
    gib, why = device.memory_budget_gib("auto")
    assert gib == pytest.approx(0.95 * 16) and why == "95% of what Intel Arc B580 offers (16.0 GiB)"
    gib, why = device.memory_budget_gib("cpu")
    assert gib == pytest.approx(0.8 * device.ram_gib()) and why.startswith("80% of this machine's RAM")


@pytest.mark.parametrize(
    ("on", "precision", "dtype"),
    [
        (CPU, "auto", torch.float32),
        (XPU, "auto", torch.bfloat16),
        (CPU, "bf16", torch.bfloat16),
        (XPU, "no", torch.float32),
    ],
)
def test_compute_dtype(on: Device, precision: str, dtype: torch.dtype) -> None:
    assert device.compute_dtype(on, precision) is dtype


def test_seeded_depends_on_the_seed_alone() -> None:
    drawn = []
    for seed in (1, 2, 1, 1 + 2**63):
        torch.rand(3)
        with device.seeded(seed):
            drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_what_torch_sees_here() -> None:
    kind = device.accelerator_type()
    assert kind in (None, "cuda", "xpu", "mps")
    assert (kind is None) == (not torch.accelerator.is_available())
