"""The thin shells of the training skill: they pass on arguments, environment and exit codes, and no more."""

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runtime import launcher
from runtime.commands import monitor

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "skills" / "qwen-image-edit-aipc-finetune-07-training" / "scripts"
KEEPS = "NoDefaultCurrentDirectoryInExePath"


# ---- runtime.launcher


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["w/config.yaml", "--cache"], ["cache", "--workspace", "w"]),
        (["w/config.yaml"], ["fit", "--workspace", "w"]),
        (["config.yaml", "--smoke"], ["fit", "--smoke", "--workspace", "."]),
        (["config.yaml", "--resume", "latest"], ["fit", "--resume", "latest", "--workspace", "."]),
        (["config.yaml", "--cache", "--json"], ["cache", "--json", "--workspace", "."]),
    ],
)
def test_a_config_becomes_a_workspace(given: list[str], expected: list[str]) -> None:
    assert launcher.command_line(given) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "first argument"),
        (["--cache"], "first argument"),
        (["w/other.yaml"], "not called config.yaml"),
        (["w/config.yaml", "--workspace", "v"], "--workspace"),
    ],
)
def test_what_is_no_config_is_refused_with_2(
    given: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launcher.main(given) == 2
    told = capsys.readouterr().err
    assert said in told and launcher.USAGE in told


def test_the_commands_exit_status_is_the_launchers(tmp_path: Path) -> None:
    assert launcher.main([str(tmp_path / "config.yaml"), "--cache"]) == 1  # no such config: a UserError
    assert launcher.main([str(tmp_path / "config.yaml"), "--nonsense"]) == 2


@pytest.mark.parametrize(
    ("class_path", "needed"),
    [("auto", 1), ("torch.optim.AdamW", 1), ("bitsandbytes.optim.AdamW8bit", 0)],
)
def test_oneapi_is_for_runs_that_compile_kernels(tmp_path: Path, class_path: str, needed: int) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {{pretrained_model_name_or_path: base}}\ntrain: {{max_train_steps: 5}}\n"
        f"optimizer: {{class_path: {class_path}}}\n",
        encoding="utf-8",
    )
    assert launcher.main(["--needs-oneapi", str(config)]) == needed


def test_an_unreadable_config_needs_no_oneapi(tmp_path: Path) -> None:
    assert launcher.main(["--needs-oneapi", str(tmp_path / "config.yaml")]) == 1
    assert launcher.main(["--needs-oneapi"]) == 1


# ---- train_xpu.sh

STUB = """#!{python}
import json, os, pathlib, sys
names = ("PYTHONUTF8", "SYCL_CACHE_PERSISTENT", "ONEAPI_MARK")
line = {{"arguments": sys.argv[1:], "environment": {{name: os.environ.get(name) for name in names}}}}
with pathlib.Path({log!r}).open("a") as handle:
    handle.write(json.dumps(line) + "\\n")
sys.exit({needs} if "--needs-oneapi" in sys.argv else {code})
"""
RUN = ["-P", "-m", "runtime.launcher"]


@dataclass(kw_only=True)
class Shell:
    """train_xpu.sh with a python that writes down how it was called."""

    folder: Path
    status: int = 0
    calls: list[dict[str, Any]] = field(default_factory=list)

    def run(
        self, *arguments: str, code: int = 0, needs: int = 1, setvars: str | None = None, **variables: str
    ) -> "Shell":
        log, python, oneapi = self.folder / "log", self.folder / "python", self.folder / "one api"
        python.write_text(
            STUB.format(python=sys.executable, log=str(log), needs=needs, code=code), encoding="utf-8"
        )
        python.chmod(0o755)
        if setvars is not None:
            oneapi.mkdir()
            (oneapi / "setvars.sh").write_text(setvars, encoding="utf-8")
        environment = {
            "PATH": "/usr/bin:/bin",
            "PYTHON": str(python),
            "ONEAPI_ROOT": str(oneapi),
            **variables,
        }
        command = ["bash", str(SCRIPTS / "train_xpu.sh"), *arguments]
        self.status = subprocess.run(command, env=environment, check=False, capture_output=True).returncode
        lines = log.read_text(encoding="utf-8").splitlines() if log.exists() else []
        self.calls = [json.loads(line) for line in lines]
        return self


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    if sys.platform == "win32":
        pytest.skip("a shell script, for Linux")
    return Shell(folder=tmp_path)


@pytest.mark.parametrize("code", [0, 1, 2, 130])
def test_sh_passes_arguments_environment_and_exit_code(shell: Shell, code: int) -> None:
    shell.run("my work/config.yaml", "--cache", code=code)
    assert shell.status == code
    (call,) = shell.calls
    assert call["arguments"] == [*RUN, "my work/config.yaml", "--cache"]
    assert call["environment"] == {"PYTHONUTF8": "1", "SYCL_CACHE_PERSISTENT": "1", "ONEAPI_MARK": None}


@pytest.mark.parametrize(
    ("needs", "variables", "mark"),
    [(0, {}, "--force"), (1, {}, None), (0, {"SETVARS_COMPLETED": "1"}, None)],
    ids=["needed", "not needed", "active already"],
)
def test_sh_takes_oneapis_variables_where_they_are_needed(
    shell: Shell, needs: int, variables: dict[str, str], mark: str | None
) -> None:
    shell.run("config.yaml", needs=needs, setvars='export ONEAPI_MARK="$*"\n', **variables)
    assert shell.calls[-1]["environment"]["ONEAPI_MARK"] == mark
    assert shell.calls[-1]["arguments"] == [*RUN, "config.yaml"]
    assert shell.status == 0


def test_sh_stops_where_setvars_fails(shell: Shell) -> None:
    shell.run("config.yaml", needs=0, setvars="return 7\n")
    assert shell.status == 7
    assert len(shell.calls) == 1  # only the question


# ---- train_xpu.bat, in an interpreter of the few lines that it is made of


class UnknownLineError(Exception):
    pass


@dataclass(kw_only=True)
class Batch:
    """Runs the lines of a batch file; each must be of a kind known here, or it raises."""

    lines: list[str]
    variables: dict[str, str]
    """by lower-case name, as cmd has it"""
    exists: Callable[[str], bool]
    execute: Callable[[str, Mapping[str, str]], int]
    arguments: str = ""
    errorlevel: int = 0
    seen: set[int] = field(default_factory=set)

    def run(self) -> int:
        at = 0
        while at < len(self.lines):
            self.seen.add(at)
            outcome = self.line(self.lines[at])
            if isinstance(outcome, int):
                return outcome
            at = self.label(outcome) if outcome else at + 1
        return self.errorlevel

    def label(self, name: str) -> int:
        return next(index for index, line in enumerate(self.lines) if line.lower() == f":{name.lower()}")

    def expand(self, text: str) -> str:
        text = text.replace("%*", self.arguments)
        known = {**self.variables, "errorlevel": str(self.errorlevel)}
        return re.sub(r"%([^%\s]+)%", lambda match: known.get(match[1].lower(), ""), text)

    def line(self, text: str) -> int | str | None:
        """An int ends the file with that status, a text jumps to that label."""
        if not text.strip() or text.lower().startswith((":", "rem ")) or text == "@echo off":
            return None
        return self.command(self.expand(text))

    def command(self, text: str) -> int | str | None:
        if text == "setlocal" or text.startswith("echo "):
            return None
        if found := re.fullmatch(r'set "(\w+)=([^"]*)"', text):
            self.variables.pop(found[1].lower(), None)
            if found[2]:
                self.variables[found[1].lower()] = found[2]
            return None
        if found := re.fullmatch(r"if (not )?defined (\w+) (.+)", text):
            return self.command(found[3]) if (found[2].lower() in self.variables) != bool(found[1]) else None
        if found := re.fullmatch(r'if not exist "([^"]+)" (.+)', text):
            return None if self.exists(found[1]) else self.command(found[2])
        if found := re.fullmatch(r'if not "([^"]*)"=="([^"]*)" (.+)', text):
            return self.command(found[3]) if found[1] != found[2] else None
        if found := re.fullmatch(r"goto (\w+)", text):
            return found[1]
        if found := re.fullmatch(r"exit /b (-?\d+)", text):
            return int(found[1])
        if found := re.fullmatch(r'(?:call )?("[^"]+" .+)', text):
            self.errorlevel = self.execute(found[1], dict(self.variables))
            return None
        raise UnknownLineError(text)


SETVARS = r"C:\Program Files (x86)\Intel\oneAPI\setvars.bat"


@dataclass(kw_only=True)
class Windows:
    """What the batch file met: each command with the variables that it saw."""

    codes: dict[str, int]
    calls: list[tuple[str, Mapping[str, str]]] = field(default_factory=list)

    def execute(self, text: str, variables: Mapping[str, str]) -> int:
        self.calls.append((text, variables))
        kind = "setvars" if "setvars.bat" in text else "needs" if "--needs-oneapi" in text else "run"
        return self.codes[kind]


def batch_lines() -> list[str]:
    return (SCRIPTS / "train_xpu.bat").read_bytes().decode("ascii").split("\r\n")


def run_bat(
    arguments: str = "config.yaml",
    *,
    oneapi: bool = True,
    variables: dict[str, str] | None = None,
    **codes: int,
) -> tuple[int, Windows, Batch]:
    windows = Windows(codes={"run": 0, "needs": 0, "setvars": 0, **codes})
    batch = Batch(
        lines=batch_lines(),
        variables={"programfiles(x86)": r"C:\Program Files (x86)", **(variables or {})},
        exists=lambda path: oneapi and path == SETVARS,
        execute=windows.execute,
        arguments=arguments,
    )
    return batch.run(), windows, batch


@pytest.mark.parametrize("code", [0, 1, 2, 130, -1073741819])
def test_bat_passes_arguments_environment_and_exit_code(code: int) -> None:
    status, windows, _ = run_bat(r'"C:\my work\config.yaml" --cache', oneapi=False, run=code)
    ((line, variables),) = windows.calls
    assert status == code
    assert line == r'"python" -P -m runtime.launcher "C:\my work\config.yaml" --cache'
    assert (variables["pythonutf8"], variables["sycl_cache_persistent"]) == ("1", "1")


@pytest.mark.parametrize("kept", ["1", None])
def test_bat_clears_one_variable_around_setvars_and_restores_it(kept: str | None) -> None:
    given = {KEEPS.lower(): kept} if kept else {}
    status, windows, _ = run_bat(variables=given)
    asked, setvars, last = windows.calls
    assert status == 0
    assert asked[0] == '"python" -P -m runtime.launcher --needs-oneapi config.yaml >nul 2>nul'
    assert setvars[0] == f'"{SETVARS}" --force'
    assert KEEPS.lower() not in setvars[1]
    assert last[1].get(KEEPS.lower()) == kept


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({"needs": 1}, 2),
        ({"needs": -1073741819}, 2),
        ({"oneapi": False}, 1),
        ({"variables": {"setvars_completed": "1"}}, 1),
    ],
    ids=["not needed", "the question crashed", "not there", "active already"],
)
def test_bat_leaves_setvars_alone_where_it_is_not_needed(options: dict[str, Any], count: int) -> None:
    status, windows, _ = run_bat(**options, run=3)
    assert status == 3
    assert len(windows.calls) == count
    assert not any("setvars.bat" in line for line, _ in windows.calls)


def test_bat_stops_where_setvars_fails() -> None:
    status, windows, _ = run_bat(setvars=5)
    assert status == 5
    assert "--needs-oneapi" not in windows.calls[-1][0] and "setvars.bat" in windows.calls[-1][0]


def test_every_line_of_the_bat_is_understood_and_reached() -> None:
    reached = run_bat()[2].seen | run_bat(setvars=1)[2].seen
    assert batch_lines()[-2:] == ["exit /b %ERRORLEVEL%", ""]
    assert reached == set(range(len(batch_lines()) - 1))  # the last is what follows the last line's end


def test_an_unknown_line_is_not_passed_over() -> None:
    with pytest.raises(UnknownLineError):
        Batch(lines=["start /b python"], variables={}, exists=bool, execute=lambda *_: 0).run()


def test_the_bat_has_the_line_ends_that_cmd_expects() -> None:
    source = (SCRIPTS / "train_xpu.bat").read_bytes()
    assert source.count(b"\n") == source.count(b"\r\n") and source.endswith(b"\r\n")
    assert b"\r" not in (SCRIPTS / "train_xpu.sh").read_bytes()


# ---- monitor_xpu_memory.py


@pytest.fixture
def memory() -> Any:
    spec = importlib.util.spec_from_file_location("monitor_xpu_memory", SCRIPTS / "monitor_xpu_memory.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


READING = {"device": "xpu", "alloc_gib": 11.5, "reserved_gib": 12.25, "rss_gib": 3.0, "capacity_gib": 18.2}
READING |= {"step": 7, "planned_steps": 100, "state": "running"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "xpu alloc: 11.50 GiB reserved: 12.25 GiB (18.2 GiB) step 7/100 running"),
        ({"device": "cpu"}, "cpu process: 3.00 GiB (18.2 GiB) step 7/100 running"),
        ({"rss_gib": None, "alloc_gib": None}, "xpu no step yet (18.2 GiB) step 7/100 running"),
    ],
)
def test_a_line_of_the_memory_monitor(memory: Any, changes: dict[str, Any], expected: str) -> None:
    line = memory.spoken({**READING, **changes}, datetime(2026, 1, 2, 3, 4, 5))
    assert line == f"[03:04:05] {expected}"


@pytest.mark.parametrize(
    ("states", "options", "lines"),
    [
        (["running", "running", "completed"], [], 3),
        (["running"] * 5, ["--count", "2"], 2),
        (["failed"], ["--count", "9"], 1),
    ],
)
def test_the_memory_monitor_reads_the_runs_record(
    memory: Any, monkeypatch: pytest.MonkeyPatch, states: list[str], options: list[str], lines: int
) -> None:
    readings = iter({**READING, "state": state} for state in states)
    monkeypatch.setattr(monitor, "newest", lambda workspace: workspace.root / "v0")
    monkeypatch.setattr(monitor, "read", lambda path: next(readings))
    result = CliRunner().invoke(memory.main, ["--interval", "0", *options])
    assert result.exit_code == 0, result.output
    assert len(result.output.splitlines()) == lines


def test_the_memory_monitor_says_where_there_is_no_run(memory: Any, tmp_path: Path) -> None:
    result = CliRunner().invoke(memory.main, ["--workspace", str(tmp_path)])
    assert result.exit_code == 1
    assert "next: " in result.stderr
