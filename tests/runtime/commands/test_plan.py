import json
import sys
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner, Result

from runtime import files
from runtime.commands import dataset, recommend
from runtime.commands.plan import command
from runtime.planning import budget
from runtime.planning import plan as planning
from runtime.planning.machines import MACHINES
from runtime.planning.plan import EVIDENCE
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


@pytest.mark.parametrize("works", [True, False])
def test_a_technique_that_does_nothing_here_is_told(
    configured: Workspace, monkeypatch: pytest.MonkeyPatch, works: bool
) -> None:
    facts = {"math": True, "flash_attention": works}
    monkeypatch.setattr(planning, "probed", lambda *given: {"attention-backends": {"facts": facts}})
    text = configured.config_path.read_text(encoding="utf-8")
    text = text.replace('gradient_checkpointing: "auto"', "gradient_checkpointing: selective")
    configured.config_path.write_text(text, encoding="utf-8")
    notes = [line for line in plan(configured).stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == (0 if works else 1) and all("selective keeps no more" in note for note in notes)


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


def test_a_plan_for_another_machine_is_shown_and_not_recorded(configured: Workspace) -> None:
    result = plan(configured, "--for", "pc16-raised")
    assert result.exit_code == 0, result.output
    assert "the graphics of pc16-raised may fill" in result.stdout
    assert any(line.split()[:2] == ["pc16-raised", "yes"] for line in result.stdout.splitlines())
    assert configured.evidence(EVIDENCE) is None
    refused = plan(configured, "--for", "pc8")
    assert refused.exit_code == 2 and "pc16-raised" in refused.output


def test_all_machines_have_a_row_whatever_config_says_of_this_one(
    configured: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without torch, which only a plan for this machine asks for; and a limit of this machine is no other's."""
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would raise
    text = configured.config_path.read_text(encoding="utf-8").replace(
        "hardware:", "hardware:\n  memory_limit_gib: 0.1\n  unified_memory: true"
    )
    configured.config_path.write_text(text, encoding="utf-8")
    answers = json.loads(plan(configured, "--for", "all", "--json").stdout)
    assert [answer["machine"] for answer in answers] == list(MACHINES)
    assert all(answer["fits"] and answer["changes"] == {} for answer in answers)
    card, shared = (next(a["plan"] for a in answers if a["machine"] == name) for name in ("card24", "pc32"))
    assert (card["unified_memory"], shared["unified_memory"]) == (False, True)
    assert card["device"] == "xpu" and card["budget_gib"] == pytest.approx(22.8)


def test_what_has_to_change_elsewhere_is_told(configured: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine so small that the embedded base is too large for it."""
    text = configured.config_path.read_text(encoding="utf-8")
    text = text.replace('gradient_checkpointing: "auto"', "gradient_checkpointing: false")
    text = text.replace("[64, 64]", "[256, 256]").replace("batch_size: 1 ", "batch_size: 8 ")
    configured.config_path.write_text(
        text.replace('streamed_blocks: "auto"', "streamed_blocks: 0"), encoding="utf-8"
    )
    (answer,) = json.loads(plan(configured, "--for", "card24", "--json").stdout)
    without = answer["plan"]["phases"]["fit"]
    small = replace(
        MACHINES["card24"], offered_gib=0.97 * (without["peak_gib"] + without["reserve_gib"]) / 0.95
    )
    monkeypatch.setitem(MACHINES, "card24", small)
    (answer,) = json.loads(plan(configured, "--for", "card24", "--json").stdout)
    assert answer["fits"] and answer["changes"] and answer["plan"]["margin_gib"] >= 0
    assert answer["plan"]["phases"]["fit"]["peak_gib"] < without["peak_gib"]
    shown = plan(configured, "--for", "card24").stdout
    assert all(f"{key}: " in shown for key in answer["changes"])


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
