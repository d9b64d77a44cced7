import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from runtime.commands import dataset
from runtime.commands.init import write_target
from runtime.commands.recommend import command
from runtime.config.load import load_config
from runtime.errors import UserError
from runtime.planning import ladder, plan
from runtime.planning.ladder import Rung
from runtime.workspace import Workspace


def recommend(workspace: Workspace, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--workspace", str(workspace.root), *arguments])


def test_config_is_written_from_target_and_dataset(workspace: Workspace) -> None:
    dataset.scan(workspace)
    result = recommend(workspace)
    assert result.exit_code == 0, result.output
    config = load_config(workspace.config_path).config
    assert config.model.pretrained_model_name_or_path == "external:model"
    assert config.hardware.device == "cpu"
    assert config.data.processor.target_size == (64, 64)
    assert result.stdout == workspace.config_path.read_text(encoding="utf-8")


def test_existing_config_is_kept_without_force(workspace: Workspace) -> None:
    dataset.scan(workspace)
    workspace.config_path.write_text("mine", encoding="utf-8")
    result = recommend(workspace)
    assert result.exit_code == 1 and "--force" in result.stderr
    assert workspace.config_path.read_text(encoding="utf-8") == "mine"
    assert recommend(workspace, "--force", "--steps", "7").exit_code == 0
    assert load_config(workspace.config_path).config.train.max_train_steps == 7


def test_keep_is_content_with_what_is_there(workspace: Workspace) -> None:
    dataset.scan(workspace)
    assert recommend(workspace, "--keep", "--steps", "7").exit_code == 0  # nothing there: it is written
    before = workspace.config_path.read_bytes()
    result = recommend(workspace, "--keep", "--steps", "9")
    assert result.exit_code == 0 and result.stdout == "" and "is kept" in result.stderr
    assert workspace.config_path.read_bytes() == before
    assert (
        json.loads(recommend(workspace, "--keep", "--json").stdout)["config"]["train"]["max_train_steps"] == 7
    )
    assert recommend(workspace, "--keep", "--force", "--steps", "9").exit_code == 0
    assert load_config(workspace.config_path).config.train.max_train_steps == 9


def test_json_has_the_document_and_its_digest(workspace: Workspace) -> None:
    dataset.scan(workspace)
    document = json.loads(recommend(workspace, "--json").stdout)
    loaded = load_config(workspace.config_path)
    assert document["config"] == loaded.raw and document["config_digest"] == loaded.digest


def test_unscanned_dataset_is_refused(workspace: Workspace) -> None:
    result = recommend(workspace)
    assert result.exit_code == 1 and "next: finetune dataset" in result.stderr
    assert not workspace.config_path.exists()


def test_a_dataset_files_cache_directory_becomes_the_cache(workspace: Workspace, make_dataset: Any) -> None:
    listed = make_dataset(name="other").parent / "sets.toml"
    listed.write_text('[[datasets]]\nfolder = "other"\ncache_directory = "disk/c"\n', encoding="utf-8")
    write_target(workspace, model=None, dataset=str(listed), device=None)
    dataset.scan(workspace)
    assert recommend(workspace).exit_code == 0
    kept = load_config(workspace.config_path).config.cache.cache_dir
    assert workspace.resolve(kept) == listed.parent / "disk" / "c"


def test_what_the_machines_memory_asks_for_is_written_with_its_reason(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A key that is written anyhow is changed where it stands; another comes to the end of its section."""
    dataset.scan(workspace)
    rungs = [
        Rung(key="train.gradient_checkpointing", value=2, cost="several at once"),
        Rung(key="cache.vae", value="folded", cost="equal to rounding"),
    ]
    monkeypatch.setattr(ladder, "recommended", lambda *given: rungs)
    text = recommend(workspace).stdout
    config = load_config(workspace.config_path).config
    assert config.train.gradient_checkpointing == 2 and config.cache.vae == "folded"
    assert text.count("gradient_checkpointing") == 1 and text.count("\ncache:") == 1
    assert text.count("or it would not fit into") == 2 and "; equal to rounding" in text


def test_a_machine_that_is_not_at_hand_is_left_to_the_plan(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset.scan(workspace)

    def absent(*given: Any) -> Any:
        raise UserError("device xpu is not there", remedy="install torch")

    monkeypatch.setattr(plan, "look", absent)
    assert recommend(workspace).exit_code == 0
    assert "would not fit" not in workspace.config_path.read_text(encoding="utf-8")
