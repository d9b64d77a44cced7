import importlib.util
import sys
from typing import Any

import pytest

from runtime.errors import UserError
from runtime.memory import budget


def test_cpu_budget_is_a_share_of_the_ram_and_needs_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would raise
    monkeypatch.setattr(budget, "ram_gib", lambda: 32.0)
    found = budget.find("cpu")
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
    found = budget.find("auto")
    assert found.device == "cpu" and "torch is not installed" in found.reason


def test_accelerator_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    without_torch(monkeypatch)
    with pytest.raises(UserError, match="torch is not installed") as caught:
        budget.find("xpu")
    assert "[train]" in caught.value.remedy


def test_accelerator_has_the_budget_that_the_device_module_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from runtime import device

    card = device.Device(type="xpu", name="Arc", total_gib=16.0, reason="auto: torch sees xpu")
    monkeypatch.setattr(device, "pick", lambda requested: card)
    monkeypatch.setattr(device, "memory_budget_gib", lambda kind: (14.4, "90% of Arc"))
    found = budget.find("auto")
    assert (found.device, found.gib, found.source) == ("xpu", 14.4, "90% of Arc")
    assert found.reason == "auto: torch sees xpu"
