import pytest

from runtime.commands.dataset import scan
from runtime.config.load import apply_overrides, parse
from runtime.config.model import Config
from runtime.planning import limit, plan
from runtime.planning.budget import Budget
from runtime.planning.choice import Case
from runtime.planning.estimate import CONTEXT_GIB
from runtime.workspace import Workspace

pytest.importorskip("torch")


@pytest.fixture
def capped(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the allocator of a pretended XPU was held to."""
    from runtime import device

    scan(workspace)
    gibs: list[float] = []
    card = device.Device(type="xpu", name="Arc", total_gib=16.0, reason="x")
    monkeypatch.setattr(device, "pick", lambda kind: card)
    monkeypatch.setattr(device, "limit_memory", lambda where, gib: gibs.append(gib) or "")
    return gibs


def config(limit_gib: float | None) -> Config:
    raw = {"model": {"pretrained_model_name_or_path": "external:model"}, "train": {"max_train_steps": 4}}
    return parse(apply_overrides(raw, {"hardware.memory_limit_gib": limit_gib}))


@pytest.mark.parametrize(("unified", "beside"), [(True, 1.7), (False, 0.0)])
def test_the_allocator_gets_what_host_and_context_leave(
    workspace: Workspace, capped: list[float], monkeypatch: pytest.MonkeyPatch, unified: bool, beside: float
) -> None:
    found = Budget(device="xpu", reason="x", gib=12.5, source="x", host_gib=12.5, unified=unified)
    monkeypatch.setattr(plan, "look", lambda workspace, config: found)
    said: list[str] = []
    limit.enforce(workspace, config(12.5), "fit", said.append)
    assert capped == [pytest.approx(12.5 - beside - CONTEXT_GIB, abs=0.01)] and said == []


def test_nothing_is_capped_without_a_limit(workspace: Workspace, capped: list[float]) -> None:
    limit.enforce(workspace, config(None), "fit", pytest.fail)
    assert capped == []


def test_a_cpu_says_that_nothing_holds_it(workspace: Workspace) -> None:
    scan(workspace)
    said: list[str] = []
    asked = parse(
        {**config(3.0).model_dump(mode="json"), "hardware": {"device": "cpu", "memory_limit_gib": 3.0}}
    )
    limit.enforce(workspace, asked, "cache", said.append)
    assert len(said) == 1 and "nothing holds the run to it" in said[0]
    case, _ = plan.at_hand(workspace, asked)
    assert isinstance(case, Case) and case.found.gib == 3.0
