"""`gate check 07 --run DIR` on a run of qflux: outside of the chain, stored nowhere."""

import json
from pathlib import Path
from typing import Any

import pytest

from gates import cli


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def _files(root: Path) -> list[Path]:
    return sorted(root.rglob("*"))


def test_without_a_workspace_and_without_a_trace(
    qflux: Any, gate: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    run = qflux()
    monkeypatch.chdir(tmp_path)
    before = _files(tmp_path)
    code, out, err = gate("check", "07", "--run", "edit/v3")
    assert (code, err) == (0, "") and _files(tmp_path) == before
    assert out.startswith("gate 07-full  training, a run of qflux  v3\n")
    assert "qflux records no digests of dataset, cache and base" in out
    assert out.splitlines()[-1].startswith("gate 07-full: PASS, qflux: core 6 of 6 (")
    run.events([0.1] * 300)
    code, out, _ = gate("check", "7", "--run", str(run.root), "--json")
    assert code == 1 and json.loads(out)["first_failure"] == "loss-fell"


@pytest.mark.parametrize("form", ["junit", "github", "json"])
def test_other_formats(form: str, qflux: Any, gate: Any, tmp_path: Path) -> None:
    output = tmp_path / "out.txt"
    code, _, err = gate("check", "07", "--run", str(qflux().root), "--format", form, "--output", str(output))
    assert code == 0 and output.is_file() and "gate 07-full: PASS" in err


def test_in_a_workspace_nothing_is_stored(make: Any, qflux: Any, gate: Any) -> None:
    made, run = make(), qflux()
    before = _files(made.root)
    assert gate("check", "07", "--run", str(run.root), "-w", str(made.root))[0] == 0
    assert _files(made.root) == before
    run.root.rename(made.root / "theirs")
    assert gate("check", "07", "--run", "theirs", "-w", str(made.root))[0] == 0
    assert not (made.root / ".gates/verdicts").exists()


BAD = {
    "a gate that judges no run": (["08"], [], "only gate 07"),
    "a range": (["all"], [], "only gate 07"),
    "another phase": (["07"], ["--phase", "smoke"], "is a full run of qflux: it has no phase smoke"),
    "the cache phase": (["07"], ["--phase", "cache"], "it has no phase cache"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_command_line(name: str, qflux: Any, gate: Any) -> None:
    numbers, options, message = BAD[name]
    code, out, err = gate("check", *numbers, "--run", str(qflux().root), *options)
    assert (code, out) == (2, "") and message in err.replace("\n", " ")


def test_a_folder_of_no_known_trainer_names_what_one_looks_like(
    gate: Any, tmp_path: Path, qflux: Any
) -> None:
    run = qflux()
    for folder in (tmp_path, run.root.parent, tmp_path / "nowhere"):
        code, _, err = gate("check", "07", "--run", str(folder))
        assert code == 2
        for word in ("run.json", "train_config.yaml", "checkpoint-<epoch>-<step>"):
            assert word in err


def test_a_run_of_ours_is_not_taken_for_one_of_qflux(qflux: Any, gate: Any) -> None:
    run = qflux()
    (run.root / "run.json").write_text("{}", encoding="utf-8")
    code, _, err = gate("check", "07", "--run", str(run.root), "-w", str(run.root))
    assert code == 2 and "is not a workspace" in err


def test_explain_tells_how_it_is_judged(gate: Any) -> None:
    code, out, _ = gate("explain", "07", "loss-fell", "--trainer", "qflux")
    assert code == 0 and "CURVE_T_MIN 2.75" in out and "smooth_loss" in out
    assert gate("explain", "06", "--trainer", "qflux")[0] == 2
