import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from runtime.commands import common
from runtime.errors import UserError
from runtime.workspace import Workspace


def run(error: BaseException | None, root: Path) -> Result:
    @click.command(cls=common.Command)
    @common.workspace_option
    @common.json_option
    def command(workspace: Workspace, as_json: bool) -> None:
        if error is not None:
            raise error
        common.print_json({"b": "ö", "a": as_json})

    return CliRunner().invoke(command, ["--workspace", str(root), "--json"])


ENDS = [
    (None, 0, []),
    (UserError("no cache", remedy="finetune cache"), 1, ["error: no cache", "next: finetune cache"]),
    (UserError("no cache"), 1, ["error: no cache"]),
    (KeyboardInterrupt(), 130, ["error: interrupted"]),
    (click.UsageError("odd"), 2, ["Error: odd"]),
    (
        ModuleNotFoundError("x", name="torch.nn"),
        1,
        ["error: this command needs torch.nn, which is not installed"],
    ),
]


@pytest.mark.parametrize(("error", "status", "lines"), ENDS)
def test_each_end_has_its_status_and_lines(
    error: BaseException | None, status: int, lines: list[str], tmp_path: Path
) -> None:
    result = run(error, tmp_path)
    assert result.exit_code == status
    seen = [line for line in result.stderr.splitlines() if line]
    assert all(line in seen for line in lines) and bool(seen) == bool(lines)
    assert list(tmp_path.iterdir()) == []


def test_json_is_sorted_and_alone_on_stdout(tmp_path: Path) -> None:
    result = run(None, tmp_path)
    assert json.loads(result.stdout) == {"a": True, "b": "ö"}
    assert result.stdout.index('"a"') < result.stdout.index('"b"')


@pytest.mark.parametrize(
    "error", [ValueError("odd\nsecond line"), RuntimeError(), ModuleNotFoundError("x", name="x")]
)
def test_unexpected_error_is_short_and_its_traceback_is_in_the_log(error: Exception, tmp_path: Path) -> None:
    (tmp_path / ".gates").mkdir()
    result = run(error, tmp_path)
    assert result.exit_code == 1
    assert f"unexpected {type(error).__name__}" in result.stderr and "Traceback" not in result.stderr
    log = (tmp_path / ".gates" / "error.log").read_text(encoding="utf-8")
    assert "Traceback" in log and type(error).__name__ in log
    assert result.stderr.endswith(f"next: gate diagnose {tmp_path / '.gates' / 'error.log'}\n")


def test_unexpected_error_outside_of_a_workspace_leaves_no_trace_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "work").mkdir()
    result = run(ValueError("odd"), tmp_path / "work")
    assert result.exit_code == 1
    assert list((tmp_path / "work").iterdir()) == []
    assert (tmp_path / "temporary" / "finetune-error.log").is_file()


def test_table_is_plain_where_nobody_watches(capsys: pytest.CaptureFixture[str]) -> None:
    common.print_table("title", ("name", "value"), [("a", "[b]1[/b]"), ("longer", "")])
    assert capsys.readouterr().out.splitlines() == [
        "title",
        "  name    value",
        "  a       [b]1[/b]",
        "  longer",
    ]


def test_table_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    common.print_table("title", ("name",), [("[b]1[/b]",)])
    assert "[b]1[/b]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "told"),
    [("a/b.log", "a/b.log"), ("a b.log", '"a b.log"'), ("../c.log", "{}"), ("../c d.log", '"{}"')],
)
def test_a_path_for_a_command_line(
    path: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    whole = tmp_path / path[3:] if path.startswith("..") else here / path
    assert common.from_here(whole) == told.format(whole)
