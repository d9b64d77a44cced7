"""benchmarks/quantize.py at tiny size, its processes within this one."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import quantize


@pytest.mark.parametrize(
    ("words", "component", "source"),
    [
        (("--blocks", "2"), "transformer", 2 * 36 * 384**2),
        # Embedding and output head, the MLP, and attention.
        (("--text-encoder",), "text_encoder", 2 * 19008 * 448 + 3 * 2368 * 448 + 2 * (448 + 64) * 448),
    ],
)
def test_any_number_of_workers_makes_the_same(
    words: tuple[str, ...],
    component: str,
    source: int,
    call: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    commands: list[list[str]] = []

    def within(line: list[str], *, check: bool) -> None:
        assert check and line[:2] == [sys.executable, quantize.__file__]
        commands.append(line[2:])
        monkeypatch.setattr(sys, "argv", line[1:])
        quantize.main()

    monkeypatch.setattr(subprocess, "run", within)
    call(quantize.main, "--tiny", "--workers", "1", "2", *words)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["component"], line["device"], line["workers"]) for line in lines] == [
        (component, "cpu", 1),
        (component, "cpu", 2),
    ]
    assert len({line["sha256"] for line in lines}) == 1
    assert not any(Path(word).exists() for line in commands for word in line if component in word)
    largest = max(
        rows * columns for rows, columns in quantize.shapes(component == "text_encoder", 1, True).values()
    )
    for line in lines:
        assert line["source_gib"] == round(2 * source / 2**30, 3)
        assert line["largest_gib"] == round(2 * largest / 2**30, 3)
        assert line["gib_per_s"] == pytest.approx(line["source_gib"] / line["seconds"], rel=0.5)  # rounded
        assert 0.085 < line["mean_error"] < 0.1
