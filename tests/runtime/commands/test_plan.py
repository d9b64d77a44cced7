import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from runtime import files
from runtime.commands import dataset, recommend
from runtime.commands.plan import command
from runtime.memory import budget
from runtime.memory.plan import EVIDENCE
from runtime.workspace import Workspace

SCHEMAS = Path(__file__).parents[3] / "schemas"


@pytest.fixture
def configured(workspace: Workspace) -> Workspace:
    dataset.scan(workspace)
    recommend.write_config(workspace)
    return workspace


def plan(workspace: Workspace, *arguments: str) -> Result:
    return CliRunner().invoke(command, ["--workspace", str(workspace.root), *arguments])


def test_evidence_is_written_in_its_envelope(configured: Workspace) -> None:
    result = plan(configured, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(configured.evidence_path(EVIDENCE).read_text(encoding="utf-8"))
    jsonschema.validate(document, json.loads((SCHEMAS / "evidence.schema.json").read_text(encoding="utf-8")))
    digest = files.file_digest(configured.config_path)
    assert document["inputs"] == {"files": {"config.yaml": digest}, "config": {}}
    assert document["data"] == json.loads(result.stdout)


def test_table_names_every_component_and_the_largest(configured: Workspace) -> None:
    lines = plan(configured).stdout.splitlines()
    rows = [tuple(line.split()) for line in lines]
    assert {
        ("fit", part) for part in ("denoiser", "adapter", "gradients", "optimizer", "activations", "peak")
    } <= {row[:2] for row in rows}
    assert sum(row[-1:] == ("largest",) for row in rows) == 3
    assert lines[-1].startswith("fits: ") and "the largest part is" in lines[-1]


def test_plan_that_does_not_fit_fails_with_a_remedy_and_is_recorded(
    configured: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "ram_gib", lambda: 0.5)
    result = plan(configured)
    assert result.exit_code == 1
    assert "would not fit" in result.stderr and "next: no setting makes it fit" in result.stderr
    assert "does not fit: " in result.stdout
    data = configured.evidence(EVIDENCE)
    assert data is not None and data["margin_gib"] < 0


def test_every_problem_is_told(configured: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    text = configured.config_path.read_text(encoding="utf-8").replace("[64, 64]", "[60, 60]")
    configured.config_path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(budget, "ram_gib", lambda: 0.5)
    stderr = plan(configured).stderr
    assert "expected multiples of 16" in stderr and "would not fit" in stderr


@pytest.mark.parametrize(("text", "message"), [("model: on", "config.yaml"), (None, "is missing")])
def test_bad_config_leaves_the_evidence_incomplete(
    configured: Workspace, text: str | None, message: str
) -> None:
    plan(configured)
    if text is None:
        configured.config_path.unlink()
    else:
        configured.config_path.write_text(text, encoding="utf-8")
    result = plan(configured)
    assert result.exit_code == 1 and message in result.stderr
    assert configured.evidence(EVIDENCE) is None
