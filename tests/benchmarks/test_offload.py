"""benchmarks/offload.py at tiny size."""

import json
from typing import Any

import offload
import pytest

from runtime import device as devices
from runtime.device import Device

CPU = Device(type="cpu", name="x", total_gib=1.0, reason="")


def test_it_tells_each_count(
    call: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "pick", lambda: CPU)
    call(offload.main, "--tiny", "--quantize", "nf4")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["streamed"] for line in lines] == [0, 3]
    assert all(line["same_loss"] and line["same_gradients"] for line in lines)
    block = lines[1]["host_gib"] / 3
    assert [line["copied_gib"] / block for line in lines] == pytest.approx([0, 4])  # 2 n - 2
    for line in lines[1:]:
        assert (
            line["planned_gib"] == pytest.approx(2 * block) and line["h2d_gib_s"] > 0 and line["note"] == ""
        )
        longer = line["step_s"] - lines[0]["step_s"]
        assert line["hidden"] == pytest.approx(1 - longer / line["copying_s"])
