import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest

from gates import chain, cli, registry
from gates.commands import check

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def gate(made: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main([*arguments, "--workspace", str(made.root)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def _python(*arguments: str, encoding: str = "utf-8") -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    command = [sys.executable, *arguments]
    return subprocess.run(command, check=False, capture_output=True, env=environment, timeout=120)


def test_check_ends_with_the_verdict_in_one_line(gate: Any) -> None:
    code, out, err = gate("check", "7")
    assert code == 0 and err == ""
    assert out.splitlines()[-1] == (
        "gate 07: PASS, 22 checks passed, 2 skipped [device cpu]; next: finetune validate"
    )
    assert out.isascii() and "\x1b" not in out


def test_a_fail_shows_seen_expected_and_what_to_do(gate: Any, made: Any) -> None:
    made.edit_lines(made.run("full") / "metrics.jsonl", lambda lines: lines[3].update(loss=None))
    code, out, _ = gate("check", "07")
    assert code == 1
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.strip().startswith("loss-finite"))
    assert lines[start].endswith(" FAIL") and len(lines[start]) < 80
    detail = " ".join(" ".join(lines[start + 1 : start + 7]).split())
    for part in ("saw 1 values", "expected 0 values", "namely step 4: loss None", "do set a lower optimizer"):
        assert part in detail
    assert lines[-1].startswith("gate 07: FAIL (failed): full loss-finite, ")


def test_json_is_one_verdict_on_stdout_and_the_line_on_stderr(gate: Any, made: Any) -> None:
    code, out, err = gate("check", "07", "--json")
    document = json.loads(out)
    assert code == 0 and document["gate"] == "07" and err.startswith("gate 07: PASS")
    stored = json.loads((made.root / ".gates/verdicts/07.json").read_text(encoding="utf-8"))
    assert stored["judgement_digest"] == document["judgement_digest"]
    names = {path.name for path in (made.root / ".gates/verdicts").iterdir()}
    phases = {f"07-{phase}.json" for phase in ("cache", "smoke", "full")}
    assert names == {f"{number}.json" for number in registry.up_to("07")} | phases


@pytest.mark.parametrize(("text", "first", "last"), [("all", "01", "08"), ("02..07", "02", "07")])
def test_json_of_several_is_a_list(text: str, first: str, last: str, gate: Any) -> None:
    _, out, _ = gate("check", text, "--json")
    expected = [number for number in registry.numbers() if first <= number <= last]
    assert [document["gate"] for document in json.loads(out)] == expected


def test_a_phase_is_judged_by_itself(gate: Any, made: Any) -> None:
    made.edit_lines(made.run("full") / "metrics.jsonl", lambda lines: lines.pop() and None)
    code, out, _ = gate("check", "07", "--phase", "smoke", "--json")
    document = json.loads(out)
    assert code == 0 and document["phase"] == "smoke"
    assert {check["phase"] for check in document["checks"]} == {"smoke"}
    assert gate("check", "07", "--phase", "full")[0] == 1
    assert gate("check", "07")[0] == 1


def test_junit(gate: Any, made: Any) -> None:
    made.evidence("04-plan").unlink()
    code, out, _ = gate("check", "all", "--format", "junit")
    suites = ElementTree.fromstring(out.encode("utf-8"))
    assert code == 1
    failures = {"gate 01": "0", "gate 02": "0", "gate 03": "0", "gate 04": "4"}
    for suite in suites:
        seen = (suite.get("failures"), suite.get("errors"))
        assert seen == (failures.get(str(suite.get("name")), "1"), "0")
    blocked = suites[-1].findall("testcase")
    assert blocked[-1].get("name") == "verdict" and blocked[-1].find("failure") is not None
    assert all(case.find("skipped") is not None for case in blocked[:-1])


def test_github(gate: Any, made: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    summary = tmp_path / "summary.md"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    made.evidence("04-plan").unlink()
    _, out, _ = gate("check", "04", "--format", "github")
    lines = out.splitlines()
    assert (
        lines[0].startswith("::error title=gate 04 dataset-unchanged::")
        and "%0Ado: finetune plan" in lines[0]
    )
    assert lines[-1].startswith("::error title=gate 04::gate 04: FAIL (failed)")
    assert "| **04** | | **FAIL** |" in summary.read_text(encoding="utf-8")


@pytest.mark.parametrize("form", check.FORMATS)
def test_output_writes_the_same_to_a_file(form: str, gate: Any, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report"
    code, out, _ = gate("check", "02", "--format", form, "--output", str(path))
    assert code == 0 and path.read_text(encoding="utf-8") == out


def test_status(gate: Any, made: Any) -> None:
    code, out, _ = gate("status")
    assert code == 0 and out.splitlines()[0].split()[:4] == ["gate", "skill", "verdict", "outcome"]
    made.evidence("04-plan").unlink()
    code, out, _ = gate("status")
    assert code == 1
    rows = {line.split()[0]: line.split()[1:4] for line in out.splitlines()[1:]}
    assert list(rows) == list(registry.numbers())
    assert rows["02"] == ["dataset", "PASS", "passed"] and rows["04"] == ["config", "FAIL", "failed"]
    assert rows["07"] == ["training", "FAIL", "blocked"]
    assert "finetune plan" in next(line for line in out.splitlines() if line.startswith("04"))
    code, out, _ = gate("status", "--json")
    outcomes = [item["outcome"] for item in json.loads(out)]
    assert outcomes == ["passed"] * 3 + ["failed"] + ["blocked"] * (len(rows) - 4)
    assert not (made.root / ".gates/verdicts").exists()


def test_explain(gate: Any) -> None:
    code, out, _ = gate("explain", "07", "loss-fell")
    assert code == 0 and out.startswith("loss-fell (full): ")
    for word in ("measures", "because", "mend", "needs", "section"):
        assert f"\n  {word}" in out
    _, out, _ = gate("explain", "07", "xpu-alloc", "--json")
    assert [spec["phase"] for spec in json.loads(out)] == ["smoke", "full"]
    _, out, _ = gate("explain", "02")
    assert out.count("measures") == 10 and "advisory" in out


def test_schema(gate: Any) -> None:
    code, out, _ = gate("schema", "verdict")
    assert code == 0 and json.loads(out)["title"] == "Verdict"
    assert "verdict" in gate("schema")[1].split()


USAGE = {
    "no command": [],
    "an unknown command": ["chek"],
    "no gate": ["check"],
    "an unknown gate": ["check", "9"],
    "an unknown phase": ["check", "07", "--phase", "warm"],
    "a phase of a gate without": ["check", "02", "--phase", "cache"],
    "a phase of several": ["check", "all", "--phase", "cache"],
    "an unknown option": ["check", "07", "--force"],
    "two formats": ["check", "07", "--json", "--format", "junit"],
    "a run that is none": ["check", "07", "--run", "nowhere"],
    "an unknown check": ["explain", "07", "loss-rose"],
    "an unknown schema": ["schema", "verdicts"],
}


@pytest.mark.parametrize("name", USAGE)
def test_a_bad_command_line_is_2(name: str, made: Any, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = USAGE[name]
    where = ["--workspace", str(made.root)] if len(arguments) > 0 and name != "an unknown command" else []
    assert cli.main([*arguments, *where]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err
    assert not (made.root / ".gates/verdicts").exists()


def test_what_is_no_workspace_is_2_and_names_init(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["check", "07"], ["status"]):
        assert cli.main([*command, "-w", str(tmp_path)]) == 2
        assert "finetune init" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_uncaught_exception_is_3_and_leaves_a_log(
    made: Any, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("bang")

    monkeypatch.setattr(chain, "judge_up_to", explode)
    code, out, err = gate("check", "07")
    assert code == 3 and out == "" and "gate: error: RuntimeError: bang" in err
    assert "Traceback" not in err
    assert "bang" in (made.root / ".gates/error.log").read_text(encoding="utf-8")


def test_ctrl_c_is_130(gate: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(chain, "judge_up_to", interrupt)
    assert gate("check", "07")[0] == 130


def test_an_unreadable_file_is_3(gate: Any, made: Any) -> None:
    (made.run("full") / "run.json").write_text('{"state": "completed", "state": "failed"}', encoding="utf-8")
    code, out, _ = gate("check", "07")
    assert code == 3 and "has the key 'state' twice" in out


def test_strict_and_require_device(gate: Any, made: Any) -> None:
    assert gate("check", "07", "--require-device", "xpu")[0] == 1
    assert gate("check", "07", "--require-device", "cpu")[0] == 0
    for sample in ("s05", "s06"):
        (made.dataset / f"training_images/{sample}.png").write_bytes(
            (made.dataset / "training_images/s07.png").read_bytes()
        )
    assert gate("check", "02", "--strict")[0] == 1


def test_colour_only_on_a_terminal_and_not_against_the_users_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    from gates.commands import common
    from gates.reports import text

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    assert common.style() is text.coloured
    assert text.coloured("PASS", "green") == "\x1b[32m\x1b[1mPASS\x1b[0m"
    monkeypatch.setenv("NO_COLOR", "1")
    assert common.style() is text.plain


def test_a_cp1252_console_survives_any_caption(made: Any) -> None:
    def change(document: dict[str, Any]) -> None:
        document["data"]["samples"][5]["prompt"] = "другой \U0001f600"

    made.edit(made.evidence("02-dataset"), change)
    made.rescan()
    done = _python("-m", "gates", "check", "02", "-w", str(made.root), encoding="cp1252")
    assert done.returncode == 1 and b"captions-usable" in done.stdout


def test_module_runs_and_imports_neither_torch_nor_runtime() -> None:
    done = _python("-m", "gates", "--help")
    assert done.returncode == 0 and b"check" in done.stdout
    code = (
        "import sys, gates.cli; heavy = {'torch', 'runtime', 'numpy', 'jsonschema', 'PIL', 'yaml', 'rich'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    assert _python("-c", code).stdout.strip() == b"[]"


def test_a_whole_judgement_imports_neither_torch_nor_runtime(made: Any) -> None:
    code = (
        "import sys; from gates.cli import main; code = main(['check', 'all', '--json', '-w', sys.argv[1]]); "
        "sys.exit(code or 9 * bool({'torch', 'runtime'} & set(sys.modules)))"
    )
    assert _python("-c", code, str(made.root)).returncode == 0
