"""benchmarks/soak.py as a command, without kills, which tests/runtime/training/test_soak.py has: what it tells."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import soak
import true_size
import yaml
from safetensors.torch import load_file, save_file

from runtime import cli, files
from runtime.demo import series
from runtime.training import checkpoints
from runtime.training.trainables import WEIGHTS

STEPS, INTERVAL = 4, 2
LENGTH = {"train.max_train_steps": STEPS, "train.checkpointing_steps": INTERVAL}
KILLS = [soak.Kill(moment="step", seen=7, kept=4), soak.Kill(moment="save", seen=4, kept=4)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two workspaces alike, a fit in each."""
    out = tmp_path_factory.mktemp("soak")
    changes = {**soak.RECIPE, **LENGTH, "hardware.device": "cpu", "logging.tracker_project_name": "demo"}
    true_size.make(out / "killed", series.BASE, true_size.TINY, changes)
    shutil.copytree(out / "killed", out / "whole")
    for name in ("killed", "whole"):
        assert cli.main(["fit", "--workspace", str(out / name)]) == 0
    return out


def intact(run: Path) -> None:
    pass


def line(name: str, key: str) -> Callable[[Path], None]:
    """One number of the last line another."""

    def spoil(run: Path) -> None:
        *rest, last = files.read_json_lines(run / name)
        (run / name).unlink()
        for kept in (*rest, {**last, key: last[key] + 1e-9}):
            files.append_json_line(run / name, kept)

    return spoil


def weight(find: Callable[[Path], Path]) -> Callable[[Path], None]:
    """One number of one tensor another."""

    def spoil(run: Path) -> None:
        held = load_file(find(run))
        next(iter(held.values())).view(-1)[0] += 1
        save_file(held, find(run))

    return spoil


def last(run: Path) -> Path:
    return checkpoints.lasts(run)[-1] / "model.safetensors"


def first_saved(run: Path) -> Path:
    return sorted(run.glob(f"checkpoint-*/{WEIGHTS}"))[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "verdict", "different", "status"),
    [
        (intact, "PASS", [], 0),
        (intact, "FAIL", [], 1),
        (line("metrics.jsonl", "loss"), "PASS", ["metrics"], 1),
        (line("probe.jsonl", "step"), "PASS", ["probes"], 1),
        (weight(last), "PASS", ["adapter"], 1),
        (weight(first_saved), "PASS", ["checkpoints"], 1),
    ],
)
def test_what_it_tells(
    damage: Callable[[Path], None],
    verdict: str,
    different: list[str],
    status: int,
    trained: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def prepare(root: Path, changes: dict[str, Any]) -> None:
        assert changes == LENGTH
        shutil.copytree(trained / "killed", root)

    def fit(root: Path, *words: str) -> None:
        assert (root, words) == (tmp_path / "out" / "whole", ("fit",))
        shutil.rmtree(root)
        shutil.copytree(trained / "whole", root)

    def harass(root: Path, project: Path, random: Any, interval: int) -> list[soak.Kill]:
        assert (project, interval) == (root / "outputs" / "demo", INTERVAL)
        damage(soak.newest(project))
        return KILLS

    for name, stand_in in {"prepare": prepare, "call": fit, "harass": harass}.items():
        monkeypatch.setattr(soak, name, stand_in)
    monkeypatch.setattr(soak, "verdict", lambda root: verdict)
    words = [str(tmp_path / "out"), "--steps", str(STEPS), "--interval", str(INTERVAL)]
    monkeypatch.setattr(sys, "argv", ["soak.py", *words])
    assert soak.main() == status
    told = json.loads(capsys.readouterr().out)
    assert told.pop("wall_s") >= 0
    assert told == {
        "steps": STEPS,
        "kills": 2,
        "moments": {"step": 1, "save": 1},
        "lost_steps": 3,
        "lines": STEPS,
        "checkpoints": STEPS // INTERVAL,
        "different": different,
        "gate_07": verdict,
    }


@pytest.mark.slow
def test_the_verdict_is_the_judges(trained: Path) -> None:
    """No step before was judged, and four steps teach nothing."""
    assert soak.verdict(trained / "killed") == "FAIL"


def test_a_workspace_goes_through_the_steps_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six scripts, cache and smoke fit, with the recipe; a script that fails is told."""
    ran: list[Any] = []
    numbers = {path: number for number, path in enumerate(series.scripts(), 1)}
    failing = {6: 1}

    def script(path: Path) -> Any:
        def main(words: list[str]) -> int:
            ran.append(numbers[path])
            return failing.get(numbers[path], 0)

        return SimpleNamespace(main=main)

    monkeypatch.setattr(series, "load_script", script)
    monkeypatch.setattr(soak, "call", lambda root, *words: ran.append(words))
    with pytest.raises(soak.SoakError, match="06-"):
        soak.prepare(tmp_path / "one", LENGTH)
    failing.clear()
    ran.clear()
    soak.prepare(tmp_path / "other", LENGTH)
    assert ran == [1, 2, 3, 4, 5, 6, ("cache",), ("fit", "--smoke")]
    written = yaml.safe_load((tmp_path / "other" / "config.yaml").read_text(encoding="utf-8"))
    assert written["train"]["max_train_steps"] == STEPS and written["model"]["lora"]["lora_dropout"] == 0.1
    assert (tmp_path / "other" / "dataset").is_dir()
