"""The scripts of benchmarks/ for step 06 still run, at tiny size, and what they hold equal is."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime import device

FOLDER = Path(__file__).parents[3] / "benchmarks"


def script(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_throughput(tmp_path: Path) -> None:
    benchmark = script("quantize")
    for text_encoder in (False, True):
        source = tmp_path / ("text_encoder" if text_encoder else "transformer")
        benchmark.write(source, benchmark.shapes(text_encoder, 1, True))
        lines = [
            benchmark.measured(source, tmp_path / f"{source.name}-{count}", count, "cpu") for count in (1, 2)
        ]
        assert {line["sha256"] for line in lines} == {lines[0]["sha256"]}
        assert 0.085 < lines[0]["mean_error"] < 0.1 and all(line["seconds"] > 0 for line in lines)
    block = sum(rows * columns for rows, columns in benchmark.BLOCK.values())
    assert block == 3072 * 3072 * 36  # of a block of the published shape


def test_loaders_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["nf4_loaders.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as caught:
        script("nf4_loaders").main()
    assert not caught.value.code, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and ["skipped" in line for line in lines].count(True) == (
        not device.pick("cpu").is_accelerator
    )
