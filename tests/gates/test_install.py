"""Copies of the skills: complete, whole, never judging, and taken away without a trace."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gates import cli, index, install, packaged, registry
from gates.evidence import file_digest

PLACE = ".claude/skills"
TRAINING = f"{registry.SERIES}07-training"
BAT, TEXT = f"{TRAINING}/scripts/train_xpu.bat", f"{TRAINING}/SKILL.md"


def tree(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): file_digest(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def states(outcome: install.Outcome) -> dict[str, int]:
    assert not outcome.problems
    return outcome.counts()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package whose skills a test may change, as an upgrade does."""
    root = tmp_path / "package"
    shutil.copytree(packaged.data_dir("skills"), root, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(index, "skills_dir", lambda: root)
    return root


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "my project"
    folder.mkdir()
    return folder


@pytest.fixture
def gate(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["install", *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


# ---- where, and what


@pytest.mark.parametrize(
    ("agent", "project_place", "user_place"),
    [
        ("claude", ".claude/skills", ".claude/skills"),
        ("codex", ".agents/skills", ".agents/skills"),
        ("gemini", ".gemini/skills", ".gemini/skills"),
        ("copilot", ".github/skills", ".copilot/skills"),
        ("cursor", ".cursor/skills", ".cursor/skills"),
        ("agents", ".agents/skills", ".agents/skills"),
    ],
)
def test_each_agent_finds_the_eight_skills(
    agent: str, project_place: str, user_place: str, project: Path, gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = project.parent / "home"
    home.mkdir()
    monkeypatch.setattr(Path, "home", lambda: home)
    assert gate(agent, str(project))[0] == gate(agent, "--user")[0] == 0
    for folder in (project / project_place, home / user_place):
        found = [path.name for path in sorted(folder.iterdir()) if path.is_dir()]
        assert found == list(registry.SKILLS)
        assert all((folder / name / "SKILL.md").is_file() for name in found)


def test_the_command_knows_the_agents() -> None:
    from gates.commands.install import command

    (argument, *_) = command.params
    assert tuple(argument.type.choices) == tuple(install.AGENTS)  # type: ignore[attr-defined]


def test_a_copy_has_what_the_skill_has_but_what_judges_and_what_tests(package: Path, project: Path) -> None:
    (package / TRAINING / "scripts" / "__pycache__").mkdir()
    (package / TRAINING / "scripts" / "__pycache__" / "run.pyc").write_bytes(b"x")
    install.install(project, PLACE)
    left_out = ("gate.py", "evals/", "__pycache__")
    expected = {path: d for path, d in tree(package).items() if not any(part in path for part in left_out)}
    copied = tree(project / PLACE)
    manifest = copied.pop(install.MANIFEST)
    assert copied == expected and manifest
    assert {Path(path).name for path in copied} >= {
        "SKILL.md",
        "run.py",
        "train_xpu.bat",
        "troubleshooting.md",
    }
    assert not [path for path in (project / PLACE).rglob("*") if path.is_symlink()]


def test_every_path_that_a_copy_names_is_in_it(project: Path) -> None:
    install.install(project, PLACE)
    assert not [line for skill in registry.SKILLS for line in install.skill_faults(project / PLACE / skill)]
    texts = list((project / PLACE).rglob("*.md"))
    assert len(texts) > len(registry.SKILLS)
    assert not [path for path in texts if "gate.py" in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize(
    ("line", "seen"),
    [
        ("see [x](references/none.md)", "references/none.md"),
        ("run `python scripts/none.py`", "scripts/none.py"),
        ("see [x](../../README.md)", "../../README.md"),
        (f"see [x](../{registry.SERIES}01-host/SKILL.md)", f"../{registry.SERIES}01-host/SKILL.md"),
    ],
)
def test_a_path_that_the_copy_lacks_is_named(line: str, seen: str, package: Path, project: Path) -> None:
    with (package / TEXT).open("a", encoding="utf-8") as handle:
        handle.write(line + "\n")
    problems = install.install(project, PLACE).problems
    assert problems == (f"{TRAINING}/SKILL.md names {seen}, which the copy does not have",)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("# no front matter\n", "does not start with front matter"),
        ("---\nname: other\ndescription: x\n---\n", "its name is 'other'"),
        (f"---\nname: {TRAINING}\ndescription: ''\n---\n", "1 to 1024 characters"),
        (f"---\nname: {TRAINING}\ndescription: {'x' * 1025}\n---\n", "1 to 1024 characters"),
        (f"---\nname: {TRAINING}\ndescription: [x\n---\n", "while parsing"),
    ],
)
def test_a_skill_that_no_agent_would_load_is_seen(text: str, said: str, package: Path, project: Path) -> None:
    (package / TEXT).write_text(text, encoding="utf-8")
    (problem,) = install.install(project, PLACE).problems
    assert said in problem


# ---- again, upgraded, changed, removed


def test_a_second_run_changes_nothing(project: Path) -> None:
    count = len(install.sources())
    assert states(install.install(project, PLACE)) == {"added": count}
    before = {path: path.stat().st_mtime_ns for path in project.rglob("*")}
    assert states(install.install(project, PLACE)) == {"unchanged": count}
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_an_upgrade_brings_new_files_and_takes_old_ones_away(package: Path, project: Path) -> None:
    install.install(project, PLACE)
    (package / BAT).write_bytes(b"new\r\n")
    (package / TRAINING / "references" / "new.md").write_text("# new\n", encoding="utf-8")
    (package / TRAINING / "scripts" / "train_xpu.sh").rename(package / TRAINING / "scripts" / "train.sh")
    (package / TEXT).write_text(
        (package / TEXT).read_text(encoding="utf-8").replace("train_xpu.sh", "train.sh"), encoding="utf-8"
    )
    outcome = install.install(project, PLACE)
    changed = {path: state for path, state in outcome.files.items() if state != "unchanged"}
    assert not outcome.problems
    assert changed == {
        BAT: "updated",
        TEXT: "updated",
        f"{TRAINING}/references/new.md": "added",
        f"{TRAINING}/scripts/train.sh": "added",
        f"{TRAINING}/scripts/train_xpu.sh": "removed",
    }
    assert (project / PLACE / BAT).read_bytes() == b"new\r\n"
    assert not (project / PLACE / TRAINING / "scripts" / "train_xpu.sh").exists()
    assert states(install.install(project, PLACE)) == {"unchanged": len(install.sources())}


def test_a_changed_file_is_kept_and_named(package: Path, project: Path) -> None:
    install.install(project, PLACE)
    mine = project / PLACE / BAT
    mine.write_bytes(b"mine")
    (package / BAT).write_bytes(b"new\r\n")
    for _ in range(2):  # it stays mine, however often
        outcome = install.install(project, PLACE)
        assert outcome.files[BAT] == "kept" and mine.read_bytes() == b"mine"
        assert len(outcome.problems) == 1 and BAT in outcome.problems[0]
    outcome = install.remove(project, PLACE)
    assert outcome.files[BAT] == "kept" and tree(project / PLACE).keys() == {BAT, install.MANIFEST}
    mine.unlink()
    assert states(install.install(project, PLACE))["added"] == len(install.sources())


def test_a_file_of_another_hand_is_neither_overwritten_nor_removed(project: Path) -> None:
    theirs = project / PLACE / TEXT
    theirs.parent.mkdir(parents=True)
    theirs.write_text("theirs", encoding="utf-8")
    assert install.install(project, PLACE).files[TEXT] == "kept"
    outcome = install.remove(project, PLACE)
    assert TEXT not in outcome.files and not outcome.problems
    assert tree(project) == {f"{PLACE}/{TEXT}": file_digest(theirs)}


def test_copies_made_by_hand_are_recognised(project: Path) -> None:
    install.install(project, PLACE)
    (project / PLACE / install.MANIFEST).unlink()
    assert set(states(install.install(project, PLACE))) == {"unchanged"}
    assert set(states(install.remove(project, PLACE))) == {"removed"}


def test_remove_leaves_no_trace_and_what_was_there(project: Path) -> None:
    other = project / PLACE / "another-skill" / "SKILL.md"
    other.parent.mkdir(parents=True)
    other.write_text("x", encoding="utf-8")
    install.install(project, PLACE)
    install.install(project, ".agents/skills")
    assert states(install.remove(project, PLACE)) == {"removed": len(install.sources())}
    assert states(install.remove(project, ".agents/skills")) == {"removed": len(install.sources())}
    assert sorted(path.relative_to(project).as_posix() for path in project.rglob("*")) == [
        ".claude", PLACE, f"{PLACE}/another-skill", f"{PLACE}/another-skill/SKILL.md"
    ]  # fmt: skip
    assert states(install.remove(project, PLACE)) == {}


@pytest.mark.parametrize("action", [install.install, install.remove])
def test_a_dry_run_does_nothing(action: Any, package: Path, project: Path) -> None:
    assert action(project, PLACE, dry_run=True).dry_run
    assert not any(project.iterdir())
    install.install(project, PLACE)
    (package / BAT).write_bytes(b"new")
    before = tree(project)
    planned = action(project, PLACE, dry_run=True).files
    assert tree(project) == before
    assert action(project, PLACE).files == planned


def test_a_copy_cut_short_is_seen(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "write_bytes", _write_half)
    problems = install.install(project, PLACE).problems
    assert any(line.startswith(f"{BAT} is not what was written") for line in problems)


def _write_half(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content[: len(content) // 2] if path.suffix == ".bat" else content)


# ---- what is refused


@pytest.mark.parametrize("linked", [".claude", PLACE, f"{PLACE}/{TRAINING}", f"{PLACE}/{TEXT}"])
def test_nothing_is_written_or_removed_through_a_link(linked: str, project: Path) -> None:
    elsewhere = project.parent / "elsewhere"
    elsewhere.mkdir()
    install.install(elsewhere, PLACE)
    install.install(project, PLACE)
    source, link = elsewhere / linked, project / linked
    shutil.rmtree(link) if link.is_dir() else link.unlink()
    link.symlink_to(source, target_is_directory=source.is_dir())
    before = tree(elsewhere)
    for action in (install.install, install.remove):
        with pytest.raises(install.InstallError, match="is a link to"):
            action(project, PLACE)
    assert tree(elsewhere) == before


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"files": []}', '{"files": {"../x": "0"}}', '{"files": {"/etc/x": "0"}}',
     f'{{"files": {{"{TRAINING}/../../x": "0"}}}}',
     '{"files": {"other/SKILL.md": "0"}}', f'{{"files": {{"{TEXT}": 1}}}}'],
)  # fmt: skip
def test_a_damaged_list_removes_nothing(content: str, project: Path) -> None:
    install.install(project, PLACE)
    (project / PLACE / install.MANIFEST).write_text(content, encoding="utf-8")
    before = tree(project)
    for action in (install.install, install.remove):
        with pytest.raises(install.InstallError, match="delete it and run `gate install` again"):
            action(project, PLACE)
    assert tree(project) == before


# ---- a copy never judges


def test_a_gate_in_a_copy_is_never_loaded(project: Path) -> None:
    """Not even by the copy's own script, run in the copy's folder: the package judges."""
    install.install(project, PLACE)
    copy = project / PLACE / f"{registry.SERIES}01-host"
    mark = project / "judged"
    (copy / "gate.py").write_text(f"open({str(mark)!r}, 'w').close()\nGATE = None\n", encoding="utf-8")
    loaded = "from gates import registry; print(registry.load_module(registry.SKILLS[0]).__file__)"
    for line in (["-c", loaded], [str(copy / "scripts" / "run.py"), "--workspace", str(project)]):
        environment = {**os.environ, "PYTHONPATH": str(packaged.data_dir("skills").parent)}
        done = subprocess.run(
            [sys.executable, *line], cwd=copy, env=environment, check=False, capture_output=True, timeout=120
        )
        assert not mark.exists(), done
        if line[0] == "-c":
            said = done.stdout.decode().strip()
            assert Path(said) == packaged.data_dir("skills") / copy.name / "gate.py", done.stderr
        else:
            assert done.returncode == 1 and b"is not a workspace" in done.stderr, done


# ---- the command


def test_the_command_says_what_it_did(project: Path, gate: Any) -> None:
    code, out, err = gate("claude", str(project), "--dry-run")
    count = len(install.sources())
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"{PLACE}: {count} added (dry run: nothing was done)"
    assert f"added     {BAT}" in gate("claude", str(project))[1].splitlines()
    assert gate("claude", str(project))[1] == f"{PLACE}: {count} unchanged\n"
    assert gate("claude", str(project), "--remove")[1].endswith(f"{PLACE}: {count} removed\n")
    assert gate("claude", str(project), "--remove") == (0, f"{PLACE}: nothing installed\n", "")


def test_the_command_in_json(project: Path, gate: Any) -> None:
    gate("claude", str(project))
    (project / PLACE / BAT).write_bytes(b"mine")
    code, out, err = gate("claude", str(project), "--json")
    document = json.loads(out)
    assert code == 1 and BAT in err
    assert document["counts"] == {"unchanged": len(install.sources()) - 1, "kept": 1}
    assert (document["action"], document["agent"], document["folder"]) == ("install", "claude", PLACE)
    assert document["files"][BAT] == "kept" and document["problems"] == [err.strip()]


@pytest.mark.parametrize("arguments", [["vim"], ["claude", "none"], []])
def test_a_wrong_line_is_refused(arguments: list[str], project: Path, gate: Any) -> None:
    given = [str(project / part) if part == "none" else part for part in arguments]
    code, out, err = gate(*given)
    assert (code, out) == (2, "") and err
