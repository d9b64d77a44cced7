"""benchmarks/dataset_scale.py with a handful of pairs: each phase does what its name says."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import dataset_scale
import pytest

from runtime import files
from runtime.workspace import Workspace

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_spawn"), reason="the script needs a POSIX system")

SAMPLES = 5
PHASES = [
    "dataset, first",
    "dataset, nothing changed",
    "filling, without encoders",
    "cache, full: digests taken",
    "cache, nothing changed",
]


@pytest.mark.slow
def test_it_tells_each_phase(
    call: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []  # files that need not be read again, after each phase
    rows: list[dataset_scale.Row] = []
    run, workspace = dataset_scale.run, Workspace(tmp_path / str(SAMPLES) / "work")

    def spy(count: int, phase: str, *line: str) -> dataset_scale.Row:
        rows.append(run(count, phase, *line))
        known.append(len(files.read_json(workspace.index_path)))
        return rows[-1]

    monkeypatch.setattr(dataset_scale, "run", spy)
    call(dataset_scale.main, "--samples", str(SAMPLES), "--keep", str(tmp_path))
    head, *printed = capsys.readouterr().out.splitlines()
    assert "s per 1,000" in head and printed == [str(row) for row in rows]
    assert [row.phase for row in rows] == PHASES
    assert all(row.samples == SAMPLES and row.seconds > 0 and row.peak_mib > 20 for row in rows)
    assert [size // SAMPLES for size in known] == [2, 2, 3, 4, 4], "pictures, captions, entries"
    store = workspace.root / "cache"
    entries = files.read_json(store / "manifest.json")["entries"]
    assert {entry["folder"] for entry in entries} == {
        path.parent.name for path in store.glob("*/*.safetensors")
    }
    assert len(entries) == SAMPLES


def test_the_peak_is_that_of_the_process() -> None:
    """From one that is small itself, as the script's own is."""
    code = f"""
import sys
sys.path.append({str(Path(dataset_scale.__file__).parent)!r})
from dataset_scale import run
print(*(run(1, "x", "-c", f"bytearray({{mib}} << 20)").peak_mib for mib in (0, 256)))
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    small, large = map(float, done.stdout.split())
    assert large == pytest.approx(256, rel=0.2) and 0 < small < 128


def test_a_process_that_fails_is_told() -> None:
    with pytest.raises(RuntimeError, match=r"a phase: -c import sys; sys.exit\(3\) ended with 3"):
        dataset_scale.run(1, "a phase", "-c", "import sys; sys.exit(3)")


def test_a_row() -> None:
    row = dataset_scale.Row(samples=2000, phase="x", seconds=3.0, peak_mib=64.4)
    assert str(row).split() == ["2,000", "x", "3.00", "1.500", "64"]
