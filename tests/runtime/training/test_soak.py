"""The soak of benchmarks/soak.py in short: kills at random moments leave the run that was left alone."""

import importlib.util
import shutil
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest

from runtime import files

STEPS, INTERVAL, KILLS = 40, 4, 3


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    path = Path(__file__).parents[3] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CHANGES = {"train.max_train_steps": STEPS, "train.checkpointing_steps": INTERVAL, "logging.report_to": []}
DROPPING = {
    "data.batch_size": 1,
    "data.caption_dropout_rate": 0.3,
    "model.lora.lora_dropout": 0.2,
    "train.gradient_accumulation_steps": 2,
    "lr_scheduler.scheduler_type": "cosine",
}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_three_kills_change_nothing(
    lab: Any, soak: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soak, "START_S", 3.0)  # forty steps of the small base are done soon after
    changes = {**CHANGES, **DROPPING}
    lab.cache(changes)
    killed = tmp_path / "killed"
    shutil.copytree(lab.root, killed)
    whole = lab.fit(changes).path
    kills = soak.harass(killed, killed / "outputs" / "edit-lora", Random(6), INTERVAL, most=KILLS)
    assert len(kills) == KILLS and {kill.moment for kill in kills} == {"start", "step", "save"}
    assert any(kill.kept for kill in kills)
    newest = soak.newest(killed / "outputs" / "edit-lora")
    found = soak.compare(whole, newest)
    assert found == {"lines": STEPS, "checkpoints": STEPS // INTERVAL, "different": []}
    spoil(newest / "metrics.jsonl")
    assert soak.compare(whole, newest)["different"] == ["metrics"]


def spoil(path: Path) -> None:
    """One number, so that the comparison above is known to see it."""
    *rest, line = files.read_json_lines(path)
    path.unlink()
    for kept in (*rest, {**line, "loss": line["loss"] + 1e-9}):
        files.append_json_line(path, kept)
