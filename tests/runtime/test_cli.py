import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from runtime.cli import COMMANDS, cli
from runtime.workspace import Workspace

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "diffusers", "transformers", "numpy", "PIL", "pydantic", "yaml", "rich.table")


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout


def test_help_lists_every_command_and_imports_none() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom runtime.cli import cli\n"
        "print(CliRunner().invoke(cli, ['--help']).output)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    output = python(code)
    assert output.strip().endswith("[]")
    assert all(f"  {name} " in output and line in output for name, (_, line) in COMMANDS.items())


@pytest.mark.parametrize("name", ["init", "dataset", "recommend", "plan"])
def test_light_command_never_imports_torch(name: str) -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom runtime.cli import cli\n"
        f"result = CliRunner().invoke(cli, [{name!r}, '--help'])\n"
        "print(result.exit_code, 'torch' in sys.modules)"
    )
    assert python(code).split() == ["0", "False"]


@pytest.mark.parametrize("name", ["init", "dataset", "recommend", "plan"])
def test_help_line_is_in_the_command_too(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, click.Command)
    assert command.help
    assert {"workspace", "as_json"} <= {parameter.name for parameter in command.params}


@pytest.mark.parametrize(("given", "hint"), [("plann", "did you mean plan?"), ("zzz", "known: init, demo")])
def test_unknown_command_is_a_bad_command_line(given: str, hint: str) -> None:
    result = CliRunner().invoke(cli, [given])
    assert result.exit_code == 2
    assert hint in result.stderr


def test_module_runs_where_the_script_is_not_on_the_path(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "runtime", "plan", "--workspace", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 1
    assert done.stdout == "" and "Traceback" not in done.stderr


def test_from_nothing_to_a_plan(workspace: Workspace) -> None:
    runner = CliRunner()
    for arguments in (["dataset"], ["recommend"], ["plan"]):
        result = runner.invoke(cli, [*arguments, "--workspace", str(workspace.root)])
        assert result.exit_code == 0, result.output
    assert "fits: " in result.stdout
