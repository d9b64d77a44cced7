"""benchmarks/adapter_dtype.py on small blocks on the CPU."""

import json
from typing import Any

import adapter_dtype
import pytest

from runtime import device as devices
from runtime.device import Device
from runtime.training import layers

CPU = Device(type="cpu", name="x", total_gib=1.0, reason="")
MODES = ["ours", "ours, autocast", "peft, autocast", "peft", "bf16"]


@pytest.mark.parametrize(
    ("words", "setup", "apart"),
    [
        ((), {"quantize": "none", "dora": False}, {"peft"}),
        (
            ("--quantize", "nf4", "--dora", "--no-checkpointing"),
            {"quantize": "nf4", "dora": True},
            {"peft", "peft, autocast", "bf16"},  # its norms are computed otherwise
        ),
    ],
)
def test_it_tells_each_way(
    words: tuple[str, ...],
    setup: dict[str, Any],
    apart: set[str],
    call: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "pick", lambda: CPU)
    plain = layers.keep_input_dtype
    call(adapter_dtype.main, "--steps", "1", "--rank", "4", *words)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["mode"] for line in lines] == MODES == list(adapter_dtype.MODES)
    assert all({**line, **setup, "device": "x", "layers": 2} == line and line["step_s"] > 0 for line in lines)
    errors = {line["mode"]: line["error"] for line in lines}
    # Factors that are cast to bf16 are those of a bf16 adapter, under autocast too; peft's own are applied in fp32.
    assert {mode for mode, error in errors.items() if error} == apart and max(errors.values()) < 0.05
    assert layers.keep_input_dtype is plain
