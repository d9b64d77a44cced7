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


def test_a_block_is_of_the_published_shape() -> None:
    assert sum(rows * columns for rows, columns in script("quantize").BLOCK.values()) == 3072 * 3072 * 36


def test_loaders_agree(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["nf4_loaders.py", "--device", "cpu"])
    with pytest.raises(SystemExit) as caught:
        script("nf4_loaders").main()
    assert not caught.value.code, capsys.readouterr().out
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and ["skipped" in line for line in lines].count(True) == (
        not device.pick("cpu").is_accelerator
    )
