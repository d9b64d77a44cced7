import importlib.util
import sys
from typing import Any

import pytest

from runtime.config.model import Hardware
from runtime.errors import UserError
from runtime.planning import budget, machines
from runtime.planning.budget import Budget
from runtime.planning.estimate import Phase
from runtime.planning.machines import MACHINES


def test_cpu_budget_is_a_share_of_the_ram_and_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would raise
    monkeypatch.setattr(budget, "ram_gib", lambda: 32.0)
    found = budget.find(Hardware(device="cpu"))
    assert (found.device, found.reason) == ("cpu", "as configured")
    assert found.gib == pytest.approx(25.6)
    assert "80%" in found.source and "32.0 GiB" in found.source


def test_ram_of_this_machine_is_plausible() -> None:
    assert 0.5 < budget.ram_gib() < 100_000


def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec

    def find(name: str, *rest: Any) -> Any:
        return None if name == "torch" else real(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_light_install_plans_for_the_cpu_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    found = budget.find(Hardware())
    assert found.device == "cpu" and "torch is not installed" in found.reason


def test_accelerator_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    with pytest.raises(UserError, match="torch is not installed") as caught:
        budget.find(Hardware(device="xpu"))
    assert "[train]" in caught.value.remedy


CARD = {"name": "Arc", "xpu_family": True, "kind": "card"}
GRAPHICS = {"name": "Arc 140V", "xpu_family": True, "kind": "integrated"}
OLD = {"name": "UHD", "xpu_family": False, "kind": "integrated"}


@pytest.fixture
def arc(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An XPU of 16 GiB, of which torch says so much."""
    pytest.importorskip("torch")
    from runtime import device

    card = device.Device(type="xpu", name="Arc", total_gib=16.0, reason="auto: torch sees xpu")
    monkeypatch.setattr(device, "pick", lambda requested: card)
    monkeypatch.setattr(device, "memory_budget_gib", lambda kind: (14.4, "90% of Arc"))
    monkeypatch.setattr(budget, "ram_gib", lambda: 30.0)
    return lambda told: monkeypatch.setattr(device, "is_integrated", lambda: told)


def test_accelerator_has_the_budget_that_the_device_module_gives(arc: Any) -> None:
    arc(False)
    found = budget.find(Hardware())
    assert (found.device, found.gib, found.source) == ("xpu", 14.4, "90% of Arc")
    assert found.reason == "auto: torch sees xpu"
    assert (found.host_gib, found.unified) == (24.0, False)


@pytest.mark.parametrize(
    ("configured", "told", "adapters", "unified"),
    [
        ("auto", True, [CARD], True),
        ("auto", False, [GRAPHICS], False),
        ("auto", None, [GRAPHICS, OLD], True),
        ("auto", None, [GRAPHICS, CARD], False),
        ("auto", None, [OLD], False),
        ("auto", None, None, False),
        (True, False, [CARD], True),
        (False, True, [GRAPHICS], False),
    ],
)
def test_unified_memory_is_as_configured_or_seen(
    arc: Any, configured: Any, told: bool | None, adapters: Any, unified: bool
) -> None:
    arc(told)
    host = None if adapters is None else {"adapters": adapters}
    assert budget.find(Hardware(unified_memory=configured), host).unified is unified


@pytest.mark.parametrize(
    ("limit", "gib", "host"),
    [(12.5, 12.5, 12.5), (20.0, 14.4, 20.0), (100.0, 14.4, 24.0), (None, 14.4, 24.0)],
)
def test_a_limit_lowers_what_may_be_filled(arc: Any, limit: float | None, gib: float, host: float) -> None:
    arc(True)
    found = budget.find(Hardware(memory_limit_gib=limit))
    assert (found.gib, found.host_gib) == (gib, host)
    assert ("memory_limit_gib" in found.source) is (limit in (12.5, 20.0))


def test_a_limit_holds_for_a_cpu_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "ram_gib", lambda: 32.0)
    found = budget.find(Hardware(device="cpu", memory_limit_gib=3.0))
    assert (found.gib, found.host_gib) == (3.0, 3.0)


@pytest.mark.parametrize(
    ("device", "unified", "spare"),
    [("xpu", False, 2.0), ("xpu", True, -1.0), ("cpu", True, 2.0)],
    ids=["apart", "one memory", "the host's own"],
)
def test_what_a_phase_leaves_of_the_tightest_limit(device: str, unified: bool, spare: float) -> None:
    found = Budget(device=device, reason="x", gib=9.0, source="x", host_gib=10.0, unified=unified)
    phase = Phase(
        components_gib={"denoiser": 5.0, "activations": 1.0}, reserve_gib=1.0, host_gib={"process": 4.0}
    )
    assert found.spare_gib(phase) == spare


@pytest.mark.parametrize(
    ("name", "device", "together", "unified"),
    [
        ("pc16", 0.57 * 15.6 * 0.95, 12.48, True),
        ("pc16-raised", 0.75 * 15.6 * 0.95, 12.48, True),
        ("pc96-raised", 0.75 * 93.6 * 0.95, 74.88, True),
        ("card24", 22.8, 24.96, False),
        ("card32", 30.4, 24.96, False),
    ],
)
def test_machines_that_are_not_at_hand(name: str, device: float, together: float, unified: bool) -> None:
    found = MACHINES[name].budget()
    assert (found.gib, found.host_gib) == (pytest.approx(device), pytest.approx(together))
    assert found.unified is unified and found.device == "xpu"
    assert found.measured is None and found.probes is None and not found.graphs


def test_every_tier_has_both_ceilings() -> None:
    assert set(MACHINES) == {f"pc{ram}{end}" for ram in (16, 32, 64, 96) for end in ("", "-raised")} | {
        "card24",
        "card32",
    }


def test_share_of_a_device_is_one_number() -> None:
    pytest.importorskip("torch")
    from runtime import device

    assert machines.DEVICE_SHARE == device.ACCELERATOR_SHARE
