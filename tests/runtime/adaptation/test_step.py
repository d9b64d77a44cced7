"""One training step as the fit takes it, and what is seen of it."""

import contextlib
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime import device as devices
from runtime.adaptation import parity, step
from runtime.adaptation.step import Setup, Taken, take

SETUP = Setup(
    base=parity.EMBEDDED_BASE,
    device="cpu",
    precision="no",
    optimizer="torch.optim.AdamW",
    checkpointing=False,
    masked=True,
)
PLACES = ("activations", "adapter", "base", "gradients", "optimizer_state")


@pytest.fixture(scope="module")
def exact() -> Taken:
    return take(SETUP)


def error(found: Taken, exact: Taken, kind: str) -> float | None:
    here, there = ({n: t.numpy() for n, t in taken.tensors.items()} for taken in (found, exact))
    return parity.relative_error(here, there, kind)


def test_what_is_seen_in_fp32(exact: Taken) -> None:
    assert exact.facts["devices"] == {name: ["cpu"] for name in PLACES}
    assert exact.facts["dtypes"] == {
        "base": ["float32"],
        "adapter": ["float32"],
        "optimizer_state": ["float32"],
        "attention": [["float32"]],
    }
    assert (exact.facts["samples"], exact.facts["compute"]) == (2, "float32")
    gradients = [tensor for name, tensor in exact.tensors.items() if name.startswith("gradient.")]
    updates = [tensor for name, tensor in exact.tensors.items() if name.startswith("update.")]
    assert len(gradients) == len(updates) and all(tensor.norm() > 0 for tensor in gradients)


def test_it_repeats(exact: Taken) -> None:
    again = take(replace(SETUP, checkpointing=True))
    assert again.facts["loss"] == exact.facts["loss"]
    assert error(again, exact, "gradient.") == error(again, exact, "update.") == 0.0


def test_bf16_is_near(exact: Taken) -> None:
    found = take(replace(SETUP, precision="bf16", checkpointing=True))
    assert found.facts["dtypes"] == {
        "base": ["bfloat16"],
        "adapter": ["float32"],
        "optimizer_state": ["float32"],
        "attention": [["bfloat16"]],
    }
    assert found.facts["loss"] == pytest.approx(exact.facts["loss"], rel=0.01)
    assert (error(found, exact, "gradient.") or 1.0) < 0.08
    assert (error(found, exact, "update.") or 1.0) < 0.4


def test_without_a_mask_there_is_one_sample() -> None:
    assert take(replace(SETUP, masked=False)).facts["samples"] == 1


def test_a_mask_matters(exact: Taken, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or parity would not see a device that ignores it."""
    attention = torch.nn.functional.scaled_dot_product_attention

    def without(*args: Any, attn_mask: Any = None, **kwargs: Any) -> Any:
        assert attn_mask is not None
        return attention(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without)
    assert (error(take(SETUP), exact, "gradient.") or 0.0) > 0.02


def test_mixed_types_do_not_reach_attention_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = torch.nn.Sequential(torch.nn.Linear(2, 2))
    watch = step.Watch(blocks)
    query = torch.ones(1, 1, 2, 4)
    with watch, contextlib.suppress(RuntimeError):
        torch.nn.functional.scaled_dot_product_attention(query, query, query.bfloat16())
    assert watch.attention == {("bfloat16", "float32")}


def test_an_adapter_that_is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = step.Predictor

    def cut(*args: Any) -> Any:
        predict = predictor(*args)
        return lambda *inputs: predict(*inputs).detach()

    monkeypatch.setattr(step, "Predictor", cut)
    with pytest.raises(RuntimeError, match="does not require grad"):
        take(SETUP)


def test_an_optimizer_with_8_bit_state_is_seen() -> None:
    found = take(replace(SETUP, optimizer="bitsandbytes.optim.Adam8bit"))
    assert set(found.facts["dtypes"]["optimizer_state"]) <= {"float32", "uint8"}


def test_the_wide_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """In its own shape but narrow: the weights are noise, the same for every device and dtype."""
    shape = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 128, "joint_attention_dim": 64}
    monkeypatch.setattr(step, "POOL", 10_007)
    monkeypatch.setattr(step, "WIDE", shape)
    setup = replace(SETUP, base=parity.TRUE_WIDTH)
    exact, again, rounded = take(setup), take(setup), take(replace(setup, precision="bf16"))
    assert error(again, exact, "gradient.") == 0.0
    assert 0.0 < (error(rounded, exact, "gradient.") or 1.0) < 0.1
    block = step.make_block(shape, "cpu", torch.float32)
    weights = dict(block.named_parameters())
    norm = weights["txt_norm.weight"]
    assert abs(float(norm.mean()) - 1) < 0.1
    assert len({float(p.flatten()[0]) for p in weights.values()}) > 0.9 * len(weights)
    assert not any(p.is_meta or p.requires_grad for p in weights.values())


def test_the_published_width() -> None:
    assert step.WIDE["num_attention_heads"] * step.WIDE["attention_head_dim"] == 3072
    assert all(torch.tensor(s).bfloat16().item() == s for s in step.SIGMAS)


def test_memory_is_read_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    used = devices.Memory(alloc_gib=0.5, reserved_gib=0.6, peak_gib=0.7, rss_gib=1.0)
    monkeypatch.setattr(devices, "memory", lambda where: used)
    memory = take(SETUP).facts["memory"]
    assert (memory["alloc_gib"], memory["peak_gib"]) == (0.5, 0.7) and memory["base_gib"] > 0
