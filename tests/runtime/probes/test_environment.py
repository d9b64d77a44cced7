"""The environment's evidence: what children find, and what is made of it."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.probes import child, environment, torch_facts
from runtime.probes.child import Outcome

ROOT = environment.ROOT
B580 = {"name": "Intel(R) Arc(TM) B580 Graphics", "total_gib": 11.597, "driver": "1.15.38308"}


def _facts(**answer: Any) -> dict[str, Any]:
    return torch_facts.to_json(Outcome(status="ok", seconds=1.0, exit=0, reason="", answer=answer))


def test_auto_is_what_torch_sees() -> None:
    sees = _facts(xpu={"available": True, "devices": [B580]})
    assert [environment.resolve(name, sees) for name in ("auto", "cpu", "cuda")] == ["xpu", "cpu", "cuda"]
    assert environment.resolve("auto", _facts()) == "cpu"


def test_torch_that_dies_leaves_what_it_had_said() -> None:
    """pytorch #179891: a segfault in get_device_properties."""
    answer = {"version": "2.13.0+xpu", "built": {"xpu": "20260000", "cuda": None, "hip": None}}
    facts = torch_facts.to_json(
        Outcome(status="failed", seconds=2.0, exit=-11, reason="killed by SIGSEGV", answer=answer)
    )
    assert (facts["version"], facts["status"]) == ("2.13.0+xpu", "failed")
    assert facts["xpu"] == {"available": False, "devices": []}


def test_torch_here() -> None:
    import torch

    facts = torch_facts.collect()
    assert (facts["status"], facts["version"]) == ("ok", str(torch.__version__))


def test_a_torch_that_takes_too_long_is_a_finding() -> None:
    facts = torch_facts.collect(limit_s=0.05)
    assert facts["status"] == "timeout" and facts["version"] is None


def test_probing_imports_no_torch() -> None:
    script = (
        "import sys; from runtime.commands import probe; from runtime.probes import environment;"
        "environment.packages(); print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, encoding="utf-8"
    )
    assert done.stdout.strip() == "False"


def test_packages_have_the_bounds_of_our_own_metadata() -> None:
    found = {item["name"]: item for item in environment.packages()}
    assert set(found) == set(environment.PACKAGES)
    assert found["torch"]["bounds"] == ">=2.9,<3"
    assert found["bitsandbytes"]["bounds"].startswith(">=0.48.2")
    assert all(item["version"] for item in found.values())


def test_a_package_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    assert environment.packages() == [{"name": "no-such-package", "bounds": "", "version": None}]


@pytest.mark.slow
def test_the_quantizer_on_a_device_that_is_not_there() -> None:
    found = environment.quantizer("xpu")
    if found["status"] == "ok":
        pytest.skip("this machine has an XPU")
    assert found["status"] == "failed" and found["reason"].startswith("in dequantize_4bit on xpu")
    assert found["dequantize_error"] is None


def test_imports_go_on_after_one_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_one.py").write_text("raise OSError('DLL load failed')", encoding="utf-8")
    (tmp_path / "leaving_one.py").write_text("import os; os._exit(127)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = environment.imports(("broken_one:x", "json:loads", "json:no_such"))
    assert found["status"] == "ok"
    assert found["modules"]["broken_one"] == "OSError: DLL load failed"
    assert found["modules"]["json"].startswith("AttributeError")
    left = environment.imports(("json:loads", "leaving_one:x", "csv:reader"))
    assert (left["status"], left["exit"], left["modules"]) == ("failed", 127, {"json": ""})
    assert left["reason"] == "in import leaving_one: exit 127"


def test_names_are_ours_here() -> None:
    found = environment.names()
    assert found["status"] == "ok"
    assert [(item["name"], item["ours"]) for item in found["packages"]] == [
        ("gates", True),
        ("runtime", True),
    ]


def test_a_foreign_distribution_of_our_names_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package `gates` and a command `finetune` of somebody else, first on the path."""
    (tmp_path / "gates").mkdir()
    (tmp_path / "gates" / "__init__.py").write_text("", encoding="utf-8")
    info = tmp_path / "Gates_Of_Logic-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: Gates_Of.Logic\nVersion: 1.0\n", encoding="utf-8"
    )
    (info / "RECORD").write_text("gates/__init__.py,,\n", encoding="utf-8")
    (info / "entry_points.txt").write_text("[console_scripts]\nfinetune = gates:main\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = environment.names()
    assert found["packages"][0]["ours"] is False
    assert found["packages"][0]["where"].endswith("gates/__init__.py")
    assert {"name": "gates", "distribution": "gates-of-logic"} in found["distributions"]
    assert found["scripts"] == [{"name": "finetune", "distribution": "gates-of-logic"}]


def test_no_ipex_here() -> None:
    assert environment.ipex() is None


def test_ipex_that_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "intel_extension_for_pytorch.py").write_text("import os; os._exit(127)", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(environment, "_version", lambda name: "2.8.0")
    found = environment.ipex()
    assert found is not None
    assert (found["status"], found["exit"], found["version"]) == ("failed", 127, "2.8.0")


@pytest.mark.parametrize("name", sorted(path.stem for path in child.CHILDREN.glob("*.py")))
def test_children_import_nothing_of_ours(name: str) -> None:
    text = (child.CHILDREN / f"{name}.py").read_text(encoding="utf-8")
    assert "import runtime" not in text and "from runtime" not in text
