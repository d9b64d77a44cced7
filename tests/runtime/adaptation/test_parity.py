"""The comparison of two steps, and what is told of one that was not taken."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from runtime.adaptation import parity
from runtime.probes.child import Outcome

SETTING = {
    "device": "xpu",
    "precision": "bf16",
    "optimizer": "torch.optim.AdamW",
    "checkpointing": True,
    "masked": True,
}
FACTS = {
    "loss": 2.0, "samples": 2, "compute": "bfloat16", "seconds": 1.0, "devices": {}, "dtypes": {}, "memory": {}
}  # fmt: skip


def tensors(scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    names = ("gradient.a", "gradient.b", "update.a", "update.b")
    return {name: scale * rng.standard_normal((4, 5)).astype(np.float32) for name in names}


def outcome(status: Any = "ok", reason: str = "", **answer: Any) -> Outcome:
    return Outcome(status=status, seconds=1.0, exit=0, reason=reason, answer=answer)


class Children:
    """Two children: what the device's gives, and what the CPU's does."""

    def __init__(self, device: Any, cpu: Any = None) -> None:
        self.device, self.cpu = device, cpu or (lambda orders: answered(orders, tensors()))
        self.orders: dict[str, Any] = {}

    def __call__(self, path: Path, order: str, limit_s: float) -> Outcome:
        orders = json.loads(Path(order).read_text(encoding="utf-8"))
        kind = Path(order).parent.name
        self.orders[kind] = [setup for setup, _ in orders]
        found: Outcome = (self.device if kind == "device" else self.cpu)(orders)
        return found


def answered(orders: Any, arrays: dict[str, Any], **facts: Any) -> Outcome:
    for _, place in orders:
        save_file(arrays, place)
    return outcome(**{setup["base"]: {**FACTS, **facts} for setup, _ in orders})


def compare(device: Any, cpu: Any = None, **setting: Any) -> list[dict[str, Any]]:
    return parity.compare_steps({**SETTING, **setting}, ask=Children(device, cpu))


def test_equal_steps() -> None:
    for record in compare(lambda orders: answered(orders, tensors())):
        assert record["loss_error"] == record["gradient_error"] == record["update_error"] == 0.0
        assert record["gradient_norm"] == pytest.approx(
            math.sqrt(sum((t**2).sum() for n, t in tensors().items() if n.startswith("gradient.")))
        )
        assert (record["status"], record["masked"], record["checkpointing"]) == ("ok", True, True)


def test_the_reference_is_the_cpu_in_fp32() -> None:
    children = Children(lambda orders: answered(orders, tensors()))
    parity.compare_steps(SETTING, ask=children)
    assert children.orders["device"] == [{**SETTING, "base": base} for base in parity.BASES]
    plain = {**SETTING, "device": "cpu", "precision": "no", "checkpointing": False}
    assert children.orders["reference"] == [{**plain, "base": base} for base in parity.BASES]


@pytest.mark.parametrize(
    ("device", "precision", "bases"),
    [("cpu", "no", 1), ("cpu", "bf16", 2), ("xpu", "no", 2), ("cuda", "bf16", 2)],
)
def test_bases(device: str, precision: str, bases: int) -> None:
    assert len(parity.bases_for(device, precision)) == bases


@pytest.mark.parametrize(
    ("scale", "error"), [(1.5, 0.5), (0.0, 1.0), (-1.0, 2.0), (math.nan, None), (math.inf, None)]
)
def test_steps_that_differ(scale: float, error: float | None) -> None:
    first = compare(lambda orders: answered(orders, tensors(scale), loss=2.5))[0]
    assert first["loss_error"] == 0.25
    for name in ("gradient_error", "update_error"):
        assert first[name] is None if error is None else first[name] == pytest.approx(error)


def test_a_loss_that_is_no_number() -> None:
    assert compare(lambda orders: answered(orders, tensors(), loss=None))[0]["loss_error"] is None


def test_a_reference_of_zeros_gives_no_error() -> None:
    zeros = {name: 0 * tensor for name, tensor in tensors().items()}
    first = compare(lambda orders: answered(orders, zeros), lambda orders: answered(orders, zeros))[0]
    assert first["gradient_error"] is None


def test_other_tensors_are_no_match() -> None:
    less = {name: tensor for name, tensor in tensors().items() if name != "gradient.b"}
    assert compare(lambda orders: answered(orders, less))[0]["gradient_error"] is None


def test_a_device_that_aborts() -> None:
    died = outcome("failed", "in the step on the embedded base, xpu: killed by SIGABRT")
    for record in compare(lambda orders: died):
        assert (record["status"], record["loss_error"]) == ("failed", None)
        assert record["reason"] == f"the step ended: {died.reason}"


def test_the_second_base_only() -> None:
    def half(orders: Any) -> Outcome:
        whole = answered(orders[:1], tensors())
        return outcome("timeout", "in the step on the block of true width, xpu: no answer", **whole.answer)

    first, second = compare(half)
    assert (first["status"], second["status"]) == ("ok", "timeout")


def test_a_reference_that_dies_is_told_too() -> None:
    first = compare(
        lambda orders: answered(orders, tensors()), lambda orders: outcome("failed", "MemoryError")
    )[0]
    assert (first["status"], first["reason"]) == ("failed", "the CPU's step ended: MemoryError")
