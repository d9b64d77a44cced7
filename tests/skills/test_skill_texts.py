"""The eight SKILL.md: valid, short, and true: every command parses, every check has a remedy, every link resolves."""

import importlib
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from skills_ref import validate

from gates import advice, index, registry
from gates import cli as gate_cli
from runtime.cli import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
SKILLS = ROOT / "skills"
NUMBERS = tuple(f"{number:02}" for number in range(1, 9))
FOLDERS = sorted(path for path in SKILLS.iterdir() if path.is_dir())
TEXTS = sorted(path for folder in FOLDERS for path in folder.rglob("*.md"))

LINES_MAX, TOKENS_MAX, CHARACTERS_PER_TOKEN = (
    250,
    5000,
    4,
)  # the specification's advice, and a common estimate


def _name(path: Path) -> str:
    return path.relative_to(SKILLS).as_posix()


def _number(folder: Path) -> str:
    return folder.name.removeprefix(registry.SERIES)[:2]


def _read(folder: Path) -> str:
    return (folder / "SKILL.md").read_text(encoding="utf-8")


def _specs(folder: Path) -> list[Any]:
    return list(registry.load_module(folder.name).GATE.specs)


skills = pytest.mark.parametrize("folder", FOLDERS, ids=_name)
texts = pytest.mark.parametrize("path", TEXTS, ids=_name)


# ---- form


def test_there_are_eight_skills_and_their_texts() -> None:
    assert tuple(map(_number, FOLDERS)) == NUMBERS
    assert [path.name for path in TEXTS].count("SKILL.md") == len(NUMBERS)


@skills
def test_the_skill_is_valid(folder: Path) -> None:
    assert validate(folder) == []


@skills
def test_the_front_matter_obeys_every_agents_rules(folder: Path) -> None:
    front = index.front_matter(_read(folder))
    assert front["name"] == folder.name
    assert len(front["description"]) <= 1024 and not set("<>") & set(front["description"])
    assert index.use_when(front["description"])
    assert len(front["compatibility"]) <= 500
    assert 'pip install -e ".[train]" -c constraints.txt' in front["compatibility"]
    assert front["license"] == "Apache-2.0"
    assert all(isinstance(value, str) for value in front["metadata"].values())
    head = _read(folder).split("---\n", 2)[1]
    assert head.isascii()


def test_the_skills_are_one_chain() -> None:
    fronts = [index.front_matter(_read(folder))["metadata"] for folder in FOLDERS]
    assert [front["gate"] for front in fronts] == list(NUMBERS)
    assert [front["requires"] for front in fronts] == ["", *NUMBERS[:-1]]


@skills
def test_each_skill_says_what_comes_before_and_after(folder: Path) -> None:
    text, number = _read(folder), int(_number(folder))
    if number > 1:
        assert f"gate check {number - 1:02}\n" in _section(text, "Before you start")
    if number < len(NUMBERS):
        assert f"`{FOLDERS[number].name}`" in _section(text, "Next")


@skills
def test_each_skill_has_its_sections(folder: Path) -> None:
    found = re.findall(r"^## (.+)$", _read(folder), re.MULTILINE)
    for title in ("Before you start", "The steps", "The gate", "If FAIL", "Not a pass", "Pitfalls", "Next"):
        assert found.count(title) == 1, title


@skills
def test_the_commands_come_before_the_script(folder: Path) -> None:
    steps = _section(_read(folder), "The steps")
    number = _number(folder)
    assert 0 < steps.index("finetune ") < steps.index(f"gate check {number}") < steps.index("scripts/run.py")


def _section(text: str, title: str) -> str:
    return text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


@skills
def test_the_skill_fits_an_agents_context(folder: Path) -> None:
    text = _read(folder)
    assert text.count("\n") < LINES_MAX
    assert len(text) / CHARACTERS_PER_TOKEN < TOKENS_MAX


@texts
def test_the_file_is_plain(path: Path) -> None:
    source = path.read_bytes()
    assert not source.startswith(b"\xef\xbb\xbf") and b"\r" not in source and source.endswith(b"\n")
    assert source.isascii()  # a console in any code page shows it


@texts
def test_sizes_are_in_gib(path: Path) -> None:
    assert not re.search(r"\b[GM]B\b", path.read_text(encoding="utf-8"))


@texts
def test_links_stay_in_the_skill_and_resolve(path: Path) -> None:
    skill = SKILLS / path.relative_to(SKILLS).parts[0]
    text = path.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)]+)\)", text):
        target = (path.parent / link).resolve()
        assert target.is_file() and target.is_relative_to(skill), link
        assert len(Path(link).parts) <= 2, link
    for mentioned in re.findall(r"\b((?:scripts|references)/[\w.-]+\.\w+)", text):
        assert (skill / mentioned).is_file(), mentioned
    if path.name != "SKILL.md":
        assert f"references/{path.name}" in _read(skill)


# ---- the gate of each skill


@skills
def test_every_check_has_a_remedy(folder: Path) -> None:
    rows = re.findall(
        r"^\| `([a-z0-9-]+)`( \(advisory\))? \| (.+) \|$", _section(_read(folder), "If FAIL"), re.M
    )
    told = {name: bool(advisory) for name, advisory, _ in rows}
    assert len(told) == len(rows)
    assert told == {spec.id: not spec.required for spec in _specs(folder)}


@skills
def test_every_remedy_names_a_command_that_parses(folder: Path) -> None:
    """What `gate next` cuts out of a remedy is what a user types; pip's lines are not ours to parse."""
    for spec in _specs(folder):
        found = advice.command_in(spec.remedy)
        assert found or "pip " in spec.remedy, (spec.id, spec.remedy)
        if found:
            parse(found)


@skills
def test_every_section_that_a_check_names_is_there(folder: Path) -> None:
    numbers = set(re.findall(r"^## (\d\.\d) ", _read(folder), re.MULTILINE))
    assert {spec.section for spec in _specs(folder)} <= numbers


def test_the_thresholds_that_the_text_tells_are_the_gates() -> None:
    training = registry.load_module(f"{registry.SERIES}07-training")
    validation = registry.load_module(f"{registry.SERIES}08-validation")
    text, last = " ".join(_read(FOLDERS[6]).split()), " ".join(_read(FOLDERS[7]).split())
    for told in (
        f"fell by at least {training.LOSS_DROP_MIN:.0%}, with a paired t above {training.LOSS_T_MIN:g}",
        f"stay below {training.ADAPTER_SHARE_MAX:.0%} of the base's size",
        f"at least {training.LEARNED_SHARE_MIN:.0%} of the `lora_B` tensors moved",
    ):
        assert told in text
    assert training.RESIDENT_SHARE_MIN == 0.5 and "at least half of the resident memory" in text
    assert f"at least {validation.DRAWS_MIN} for each held-out sample" in last
    assert f"better with t above {validation.LOSS_T_MIN:g}" in last
    assert f"at least {validation.CHANGE_MIN:g} of 255" in last


def test_the_smoke_fit_has_the_steps_that_the_text_tells() -> None:
    from runtime.training.prepared import SMOKE_STEPS

    assert f"trains {SMOKE_STEPS} steps with one checkpoint at step {SMOKE_STEPS}" in _read(FOLDERS[6])


# ---- commands


COMMAND = re.compile(r"^(finetune|gate) [a-z].*$")


def command_lines(text: str) -> Iterator[str]:
    """Each `finetune` and `gate` line of the fenced blocks and of the inline code."""
    fenced = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
    candidates = [*(line.strip() for block in fenced for line in block.splitlines()), *spans]
    yield from (line for line in candidates if COMMAND.match(line))


def _commands(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8")
    if path.name != "SKILL.md":
        return list(command_lines(text))
    metadata = index.front_matter(text)["metadata"]
    return [*command_lines(text), *(part.strip() for part in metadata["commands"].split(";"))]


def parse(line: str) -> None:
    """Raises click's UsageError where the real command would not take the line."""
    program, name, *arguments = shlex.split(line)
    found = {"finetune": _finetune, "gate": _gate}[program](name)
    if found is None:
        raise click.UsageError(f"{program} has no command {name}")
    found.make_context(name, arguments)


def _gate(name: str) -> click.Command | None:
    return gate_cli.cli.get_command(click.Context(gate_cli.cli), name)


def _finetune(name: str) -> click.Command | None:
    if name not in COMMANDS:
        return None
    command: click.Command = importlib.import_module(COMMANDS[name][0]).command
    return command


@texts
def test_every_command_parses(path: Path) -> None:
    wrong = {}
    for line in dict.fromkeys(_commands(path)):
        try:
            parse(line)
        except click.ClickException as error:
            wrong[line] = error.format_message()
    assert not wrong


@skills
def test_each_skill_teaches_commands(folder: Path) -> None:
    assert len(_commands(folder / "SKILL.md")) >= 3


@pytest.mark.parametrize(
    "line",
    ["finetune fit --quickly", "finetune train", "gate check", "gate pass 07", "gate check 07 --phase warm"],
)
def test_a_wrong_command_is_seen(line: str) -> None:
    assert list(command_lines(f"text `{line}` text\n```\n{line}\n```\n")) == [line, line]
    with pytest.raises(click.UsageError):
        parse(line)


# ---- the index


def test_the_index_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert index.main(["--check"]) == 0, capsys.readouterr().err


def test_the_index_tells_each_step() -> None:
    text = (ROOT / index.NAME).read_text(encoding="utf-8")
    assert all(f"(skills/{folder.name}/SKILL.md)" in text for folder in FOLDERS)
    assert " -> ".join(NUMBERS) in text
    assert all(f"`gate check 07 --phase {phase}`" in text for phase in ("cache", "smoke", "full"))


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the skills' texts, in which the index may be written."""
    for folder in FOLDERS:
        (tmp_path / "skills" / folder.name).mkdir(parents=True)
        (tmp_path / "skills" / folder.name / "SKILL.md").write_text(_read(folder), encoding="utf-8")
    monkeypatch.setattr(index, "skills_dir", lambda: tmp_path / "skills")
    return tmp_path


def _edit(path: Path, change: Callable[[str], str]) -> None:
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")


def test_a_drifted_or_missing_index_is_seen(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert index.main(["--check"]) == 1
    assert index.main([]) == 0
    assert index.main(["--check"]) == 0
    _edit(
        checkout / "skills" / FOLDERS[0].name / "SKILL.md",
        lambda text: text.replace("Use when", "Use when now"),
    )
    capsys.readouterr()
    assert index.main(["--check"]) == 1
    assert "python -m gates.index" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["# no front matter\n", "---\n- a\n---\n", ""])
def test_a_skill_without_front_matter_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="front matter"):
        index.front_matter(text)


def test_a_description_must_say_when() -> None:
    with pytest.raises(ValueError, match="Use when"):
        index.use_when("Trains.")
    assert index.use_when("Trains. Use when it\n is due.") == "it is due"
