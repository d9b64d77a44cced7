import json
from pathlib import Path
from typing import Any

import pytest

from gates import schema
from runtime import cli
from runtime.commands import init, probe
from runtime.probes import environment, host, torch_facts
from runtime.workspace import Workspace

BOTH = {"01-host.json", "03-environment.json"}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    made = Workspace(tmp_path / "ws")
    model = Path(init.__file__).parents[1] / "demo" / "base"
    init.write_target(made, model=str(model), dataset=str(tmp_path), device="cpu")
    return made


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Children that import torch, replaced by what they found once."""
    monkeypatch.setattr(torch_facts, "collect", lambda: FACTS)
    quantizer = {**FINDING, "device": "cpu", "dequantize_error": 0.092, "quantize_error": None}
    monkeypatch.setattr(environment, "quantizer", lambda device: quantizer)
    monkeypatch.setattr(environment, "imports", lambda: {**FINDING, "modules": {"torch": ""}})


FINDING = {"status": "ok", "seconds": 1.0, "exit": 0, "reason": ""}
NOTHING: dict[str, Any] = {"available": False, "devices": []}
FACTS = {
    **FINDING, "version": "2.13.0+cpu", "built": {"xpu": None, "cuda": None, "hip": None}, "xpu": NOTHING,
    "cuda": NOTHING,
}  # fmt: skip


def _evidence(workspace: Workspace, name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(workspace.evidence_path(name).read_text(encoding="utf-8"))
    return document


@pytest.mark.parametrize(
    ("flags", "written"),
    [([], BOTH), (["--host", "--environment"], BOTH), (["--host"], {"01-host.json"}),
     (["--environment"], {"03-environment.json"})],
)  # fmt: skip
def test_writes_what_is_asked_for(
    flags: list[str], written: set[str], workspace: Workspace, quick: None
) -> None:
    assert cli.main(["probe", *flags, "--workspace", str(workspace.root)]) == 0
    folder = workspace.root / ".gates" / "evidence"
    assert {path.name for path in folder.iterdir()} == written
    for name in written:
        document = _evidence(workspace, name.removesuffix(".json"))
        assert document["complete"] and schema.problems(document, "evidence") == []
        assert str(workspace.root) not in json.dumps(document)


def test_json_is_the_data(workspace: Workspace, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "--json", "--workspace", str(workspace.root)]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        name: _evidence(workspace, name)["data"] for name in (host.EVIDENCE, environment.EVIDENCE)
    }


def test_a_table_for_people(workspace: Workspace, quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "--workspace", str(workspace.root)]) == 0
    out = capsys.readouterr().out
    for text in ("host", "RAM", "free disk", "environment", "2.13.0+cpu, sees no accelerator", "NF4 on cpu"):
        assert text in out


def test_a_probe_that_crashes_leaves_no_evidence_of_yesterday(
    workspace: Workspace, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe.record(workspace, host_too=True, environment_too=False)

    def crash(*args: Any, **options: Any) -> Any:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(host, "collect", crash)
    with pytest.raises(RuntimeError):
        probe.record(workspace, host_too=True, environment_too=False)
    document = _evidence(workspace, host.EVIDENCE)
    assert (document["complete"], document["data"]) == (False, {})


def test_without_a_workspace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["probe", "--workspace", str(tmp_path)]) == 1
    assert "is not a workspace" in capsys.readouterr().err
    assert not (tmp_path / ".gates").exists()
