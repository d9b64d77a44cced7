import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from runtime.commands.dataset import command
from runtime.data import manifest
from runtime.workspace import Workspace

SCHEMAS = Path(__file__).parents[3] / "schemas"


def dataset(workspace: Workspace, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--workspace", str(workspace.root), *arguments])


def test_evidence_is_written_in_its_envelope(workspace: Workspace) -> None:
    result = dataset(workspace, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(workspace.evidence_path(manifest.EVIDENCE).read_text(encoding="utf-8"))
    schema = json.loads((SCHEMAS / "evidence.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, schema)
    assert document["complete"] is True and document["inputs"] == {"files": {}, "config": {}}
    assert document["data"] == json.loads(result.stdout)
    assert document["data"]["root"] == "external:dataset"


@pytest.mark.parametrize(("arguments", "held"), [((), 3), (("--holdout", "5"), 5), (("--holdout", "0"), 0)])
def test_holdout_reaches_the_split(workspace: Workspace, arguments: tuple[str, ...], held: int) -> None:
    result = dataset(workspace, *arguments)
    assert len(manifest.load(workspace).of("holdout")) == held
    assert f"held-out samples  {held}" in result.stdout


def test_dropped_files_are_told(workspace: Workspace) -> None:
    root = workspace.resolve("external:dataset")
    (root / "training_images" / "s02.txt").unlink()
    result = dataset(workspace)
    assert result.exit_code == 0
    assert "dropped: training_images/s02.png: no caption" in result.stderr


def test_no_usable_sample_fails_and_is_recorded(workspace: Workspace) -> None:
    for path in (workspace.resolve("external:dataset") / "control_images").iterdir():
        path.unlink()
    result = dataset(workspace)
    assert result.exit_code == 1
    assert "error: the dataset has no usable sample" in result.stderr
    data = workspace.evidence(manifest.EVIDENCE)
    assert data is not None and data["samples"] == [] and len(data["dropped"]) == 12


def test_failed_scan_leaves_no_older_evidence(workspace: Workspace) -> None:
    dataset(workspace)
    (workspace.resolve("external:dataset") / "training_images").rename(workspace.root / "away")
    result = dataset(workspace)
    assert result.exit_code == 1 and "no folder of targets" in result.stderr
    assert workspace.evidence(manifest.EVIDENCE) is None


def test_table_shows_final_sizes_by_defaults_and_by_config(workspace: Workspace) -> None:
    result = dataset(workspace, "--table")
    assert "no config.yaml yet: sizes are those of the defaults" in result.stderr
    assert "384 x 672" in result.stdout
    text = "model: {pretrained_model_name_or_path: external:model}\ntrain: {max_train_steps: 1}\n"
    workspace.config_path.write_text(text + "data: {processor: {target_size: [48, 64]}}\n", encoding="utf-8")
    result = dataset(workspace, "--table")
    rows = [line.split() for line in result.stdout.splitlines() if line.strip().startswith("s0")]
    assert len(rows) == 10 and all(row[6:9] == ["48", "x", "64"] for row in rows)
    assert rows[0][-1] == "25%"


def test_contact_sheet_is_drawn_in_pages(workspace: Workspace, tmp_path: Path) -> None:
    from PIL import Image

    path = tmp_path / "sheet.png"
    assert dataset(workspace, "--contact-sheet", str(path)).exit_code == 0
    with Image.open(path) as sheet:
        assert sheet.format == "PNG" and sheet.width > 400
    refused = dataset(workspace, "--contact-sheet", str(tmp_path / "sheet.jpg"))
    assert refused.exit_code == 1 and "expected a .png" in refused.stderr


def test_no_workspace(tmp_path: Path) -> None:
    result = dataset(Workspace(tmp_path))
    assert result.exit_code == 1 and "next: finetune init" in result.stderr
