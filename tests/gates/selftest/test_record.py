"""What travels in a recording, and that the one in the package is what its README says."""

import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from gates.selftest import record, recordings
from gates.selftest.healthy import healthy


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """Its base lies outside, as a user's does."""
    made = healthy(tmp_path / "ws")
    outside = tmp_path / "outside"
    (made.root / "models" / "base").rename(outside)
    local = {"external": {"model": str(outside)}}
    (made.root / ".gates/local.json").write_text(json.dumps(local), encoding="utf-8")
    made.edit(".gates/target.json", lambda d: d.update(model="external:model"))
    made.edit_config(lambda c: c["model"].update(pretrained_model_name_or_path="external:model"))
    for path in (".gates/verdicts/01.json", "outputs/edit-lora/v1/probe.png", "cache/.lock"):
        (made.root / path).parent.mkdir(exist_ok=True)
        (made.root / path).write_text("x", encoding="utf-8")
    return made.root


def _names(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_what_travels(workspace: Path, tmp_path: Path) -> None:
    record.pack(workspace, tmp_path / "one.zip")
    record.pack(workspace, tmp_path / "two.zip")
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    names = _names(tmp_path / "one.zip")
    assert {"config.yaml", ".gates/target.json", "base/model_index.json"} <= names
    stays = (".gates/local.json", ".gates/verdicts/", "models/", "cache/.lock")
    assert not [name for name in names if name.startswith(stays) or name.endswith("probe.png")]


def test_a_workspace_that_fails_is_told(
    workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(recordings, "HERE", tmp_path)
    (workspace / ".gates/evidence/01-host.json").unlink()
    assert record.main([str(workspace), "x"]) == 1
    assert "gate 01: failed" in capsys.readouterr().err
    assert record.main([str(workspace)]) == 2


def _texts(path: Path) -> Any:
    with zipfile.ZipFile(path) as archive:
        for name in archive.namelist():
            if name.endswith((".json", ".jsonl", ".yaml", ".txt")):
                yield name, archive.read(name).decode("utf-8")


def test_the_recording_of_the_package() -> None:
    path = recordings.place("demo-cpu")
    assert path.stat().st_size < record.MAX_BYTES
    assert record.judged("demo-cpu") == []
    texts = dict(_texts(path))
    assert not [
        name for name, text in texts.items() if "/home/" in text or "/root/" in text or "/tmp/" in text
    ]
    run = json.loads(texts["outputs/demo/v2/run.json"])
    assert (run["device"]["type"], run["resumed_from"]["step"], run["done_steps"]) == ("cpu", 51, 80)
    assert run["resolved"]["train"]["gradient_accumulation_steps"] == 2
    saves = [json.loads(line) for line in texts["outputs/demo/v2/saves.jsonl"].splitlines()]
    assert ("prune", "checkpoint", 60) in {(line["event"], line["kind"], line["step"]) for line in saves}
    assert json.loads(texts[".gates/skips/06.json"])["reason"]


@pytest.mark.parametrize("name", sorted(recordings.TOLD))
def test_each_recording_passes_and_names_no_place_of_its_machine(name: str) -> None:
    path = recordings.place(name)
    assert path.stat().st_size < record.MAX_BYTES
    assert record.judged(name) == []
    for text in dict(_texts(path)).values():
        assert not any(place in text for place in ("/home/", "/root/", "/tmp/", "/mnt/"))


def test_the_recorded_cuda_run_is_one_and_the_other_mixes_controls() -> None:
    runs = {
        name: json.loads(dict(_texts(recordings.place(name)))["outputs/demo/v1/run.json"])
        for name in ("demo-cuda", "demo-controls")
    }
    assert {run["device"]["type"] for run in runs.values()} == {"cuda"}
    assert runs["demo-controls"]["model"]["family"] == "qwen-image-edit-plus"
    evidence = json.loads(dict(_texts(recordings.place("demo-controls")))[".gates/evidence/02-dataset.json"])
    assert {len(sample["controls"]) for sample in evidence["data"]["samples"]} == {1, 2}
