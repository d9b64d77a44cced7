"""Places, references that travel, and evidence."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from runtime import files, workspace
from runtime.data.sample import Settings
from runtime.errors import UserError
from runtime.workspace import Workspace


@pytest.fixture
def made(tmp_path: Path) -> Workspace:
    root = tmp_path / "work"
    root.mkdir()
    return Workspace(root)


def test_what_lies_inside_is_written_relative_with_slashes(made: Workspace) -> None:
    path = made.root / "data" / "pairs"
    path.mkdir(parents=True)
    assert made.refer(path, "dataset") == "data/pairs"
    assert made.resolve("data/pairs") == path.resolve()
    assert not made.local_path.exists()


def test_what_lies_outside_is_named_and_remembered_on_this_machine(made: Workspace, tmp_path: Path) -> None:
    for name in ("model", "dataset"):
        (tmp_path / name).mkdir()
        assert made.refer(tmp_path / name, name) == f"external:{name}"
        assert made.resolve(f"external:{name}") == (tmp_path / name).resolve()
    assert set(made.externals()) == {"model", "dataset"}


def test_an_absolute_path_stays(made: Workspace, tmp_path: Path) -> None:
    assert made.resolve(str(tmp_path)) == tmp_path.resolve()


def test_a_name_that_this_machine_does_not_know(made: Workspace) -> None:
    with pytest.raises(UserError, match="no path for model") as caught:
        made.resolve("external:model")
    assert caught.value.remedy == "finetune init --model PATH"


def test_a_folder_that_is_no_workspace(made: Workspace) -> None:
    with pytest.raises(UserError, match="is not a workspace") as caught:
        made.target()
    assert caught.value.remedy.startswith("finetune init")


def test_evidence_is_incomplete_until_it_is_written(made: Workspace, conforms: Any) -> None:
    recording = made.begin_evidence("02-dataset", "finetune dataset")
    document = files.read_json(made.evidence_path("02-dataset"))
    conforms(document, "evidence")
    assert document["complete"] is False
    assert made.evidence("02-dataset") is None
    data = {
        "layout": "folders",
        "root": "dataset",
        "dataset_file": None,
        "sources": [
            {
                "name": "dataset",
                "kind": "folders",
                "root": "dataset",
                "origin": "dataset",
                "files": [],
                "dropped": 0,
                "settings": asdict(Settings()),
            }
        ],
        "holdout_rule": "",
        "dataset_digest": "0" * 64,
        "samples": [],
        "dropped": [],
        "warnings": [],
    }
    recording.write(inputs={"files": {"config.yaml": "1" * 64}}, data=data)
    document = files.read_json(made.evidence_path("02-dataset"))
    conforms(document, "evidence")
    assert (document["gate"], document["command"]) == ("02", "finetune dataset")
    assert document["inputs"] == {"files": {"config.yaml": "1" * 64}, "config": {}}
    assert made.evidence("02-dataset") == data


def test_a_second_measurement_takes_the_first_away(made: Workspace) -> None:
    first = made.begin_evidence("04-plan", "finetune plan")
    first.write(inputs={}, data={"x": 1})
    second = made.begin_evidence("04-plan", "finetune plan")
    assert made.evidence("04-plan") is None
    assert first.run_id != second.run_id


def test_no_evidence(made: Workspace) -> None:
    assert made.evidence("04-plan") is None


def test_nothing_that_travels_names_this_machine(made: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace.platform, "node", lambda: "alices-laptop")
    made.begin_evidence("04-plan", "finetune plan")
    text = made.evidence_path("04-plan").read_text(encoding="utf-8")
    assert "alices-laptop" not in text and str(made.root) not in text


def test_host_id_tells_machines_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    here = workspace.host_id()
    assert here == workspace.host_id() and len(here) == 64
    monkeypatch.setattr(workspace, "_installation", lambda: "another")
    assert workspace.host_id() != here


def test_host_id_outlives_a_new_name_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_installation", lambda: "0123")
    here = workspace.host_id()
    monkeypatch.setattr(workspace.platform, "node", lambda: "renamed")
    assert workspace.host_id() == here
    monkeypatch.setattr(workspace, "_installation", lambda: "")
    assert workspace.host_id() != here, "without anything better the name has to do"


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"complete": true}', '{"complete": true, "data": 3, "inputs": {}}']
)
def test_damaged_evidence_is_none(tmp_path: Path, text: str) -> None:
    made = Workspace(tmp_path)
    made.evidence_path("04-plan").parent.mkdir(parents=True)
    made.evidence_path("04-plan").write_text(text, encoding="utf-8")
    assert made.evidence("04-plan") is None


def test_a_linked_folder_inside_is_inside(tmp_path: Path) -> None:
    made = Workspace(tmp_path / "work")
    (tmp_path / "disk").mkdir()
    made.root.mkdir()
    (made.root / "outputs").symlink_to(tmp_path / "disk", target_is_directory=True)
    assert made.resolve("outputs/v0").relative_to(made.root).as_posix() == "outputs/v0"
