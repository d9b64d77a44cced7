import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from click.testing import CliRunner, Result

from runtime.commands.init import command
from runtime.workspace import Workspace

SCHEMAS = Path(__file__).parents[3] / "schemas"


def init(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_target_is_portable_and_absolute_paths_stay_local(
    tmp_path: Path, make_model: Any, make_dataset: Any
) -> None:
    model, dataset = make_model(), make_dataset()
    result = init(tmp_path / "work", "--model", model, "--dataset", dataset, "--json")
    assert result.exit_code == 0, result.output
    workspace = Workspace(tmp_path / "work")
    document = json.loads(result.stdout)
    assert document == workspace.target()
    jsonschema.validate(document, json.loads((SCHEMAS / "target.schema.json").read_text(encoding="utf-8")))
    assert (document["model"], document["dataset"]) == ("external:model", "external:dataset")
    assert document["device"] == "auto"
    assert workspace.resolve("external:model") == model and workspace.resolve("external:dataset") == dataset


def test_what_lies_inside_is_relative(tmp_path: Path, make_model: Any, make_dataset: Any) -> None:
    make_model(), make_dataset()
    result = init(
        "--workspace", tmp_path, "--model", tmp_path / "base", "--dataset", tmp_path / "pairs", "--json"
    )
    document = json.loads(result.stdout)
    assert (document["model"], document["dataset"]) == ("base", "pairs")
    assert not (tmp_path / ".gates" / "local.json").exists()


def test_hub_id_is_kept(tmp_path: Path, make_dataset: Any) -> None:
    init(tmp_path / "work", "--model", "Qwen/Qwen-Image-Edit-2511", "--dataset", make_dataset())
    assert Workspace(tmp_path / "work").target()["model"] == "Qwen/Qwen-Image-Edit-2511"


def test_existing_target_changes_only_in_what_is_given(workspace: Workspace, make_dataset: Any) -> None:
    before = workspace.target()
    assert init(workspace.root, "--device", "xpu").exit_code == 0
    assert workspace.target() == {**before, "device": "xpu"}
    other = make_dataset(name="other")
    assert init("--workspace", workspace.root, "--dataset", other).exit_code == 0
    assert workspace.target() == {**before, "device": "xpu"}
    assert workspace.resolve("external:dataset") == other


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs --model and --dataset"),
        (["--model", "a/b"], "needs --dataset"),
        (["--model", "no such folder", "--dataset", "."], "neither a folder nor a hub id"),
        (["--model", "a/b", "--dataset", "nowhere"], "is not there"),
    ],
)
def test_missing_parts_are_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = init(tmp_path / "work", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr and "next: finetune init" in result.stderr
    assert not (tmp_path / "work").exists()


def test_unknown_device_is_a_bad_command_line(tmp_path: Path) -> None:
    assert init(tmp_path, "--device", "gpu").exit_code == 2


@pytest.mark.parametrize("name", ["target.json", "local.json"])
def test_a_damaged_file_is_written_anew(
    tmp_path: Path, make_model: Any, make_dataset: Any, name: str
) -> None:
    wish = ("--model", make_model(), "--dataset", make_dataset())
    assert init(tmp_path / "work", *wish).exit_code == 0
    (tmp_path / "work" / ".gates" / name).write_text("{", encoding="utf-8")
    result = init(tmp_path / "work", *wish)
    assert result.exit_code == 0, result.output
    assert Workspace(tmp_path / "work").resolve("external:model").is_dir()
