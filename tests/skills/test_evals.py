"""The evals of the skills: prompts for an agent, and what a right transcript shows, in sentences that a machine reads.

skills/*/evals/evals.json has the layout that the Agent Skills guide describes (skill_name, evals with id, prompt,
expected_output, files, assertions), and `kind` and `setup` beside it. A transcript is what an agent did: skills
loaded, files read and edited, commands run, and its last answer; `grade` holds it against the assertions.
"""

import importlib.util
import itertools
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from gates import cli as gate_cli
from gates import registry
from runtime.cli import COMMANDS

SKILLS = Path(__file__).resolve().parents[2] / "skills"
AT_LEAST = {"positive": 2, "negative": 1, "tempting": 2}
KEYS = {"id", "kind", "prompt", "setup", "expected_output", "files", "assertions"}
SENTENCES = {
    "loads": r"Loads the skill",
    "loads not": r"Does not load the skill",
    "loads other": r"Loads `(?P<one>[^`]+)`",
    "reads": r"Reads `(?P<one>[^`]+)`",
    "runs": r"Runs `(?P<one>[^`]+)`(?: before `(?P<two>[^`]+)`)?",
    "runs not": r"Never runs `(?P<one>[^`]+)`",
    "edits": r"Edits `(?P<one>[^`]+)`",
    "edits not": r"Never edits `(?P<one>[^`]+)`",
    "names": r"The answer names `(?P<one>[^`]+)`(?: or `(?P<two>[^`]+)`)?",
    "asks": r"The answer asks a question",
}
# What an agent may be tempted to run or to edit, beside our own commands and the workspace's files.
FOREIGN = {"pip install", "pip uninstall", "reg add", "shutdown", "rm", "del", "cp", "copy", "python -c"}
FILES = {
    "config.yaml", "holdout.txt", "list.jsonl", "musubi-tuner", "gate.py", "pyproject.toml", "constraints.txt",
    "run.json", "probe.jsonl", ".gates/verdicts", ".gates/evidence", ".gates/target.json",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    skill: str
    id: int
    kind: str
    prompt: str
    setup: str
    expected_output: str
    assertions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Transcript:
    loaded: tuple[str, ...] = ()
    read: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    edited: tuple[str, ...] = ()
    answer: str = ""


def documents() -> dict[str, dict[str, Any]]:
    return {
        path.parents[1].name: json.loads(path.read_text(encoding="utf-8"))
        for path in sorted(SKILLS.glob("*/evals/evals.json"))
    }


def cases() -> list[Case]:
    names = Case.__dataclass_fields__.keys() - {"skill", "assertions"}
    return [
        Case(
            skill=skill,
            assertions=tuple(item["assertions"]),
            **{name: item[name] for name in names},
        )
        for skill, document in documents().items()
        for item in document["evals"]
    ]


CASES = cases()
each = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.skill[-13:]}-{case.id}-{case.kind}")


# ---- grading


def grade(transcript: Transcript, case: Case) -> list[str]:
    """The assertions that the transcript does not keep."""
    return [sentence for sentence in case.assertions if not _kept(sentence, transcript, case.skill)]


def parsed(sentence: str) -> tuple[str, str, str | None]:
    """Its kind and what stands between its backticks. Raises ValueError for a sentence of no known form."""
    for kind, pattern in SENTENCES.items():
        if found := re.fullmatch(pattern, sentence):
            groups = found.groupdict()
            return kind, groups.get("one") or "", groups.get("two")
    raise ValueError(f"no machine reads {sentence!r}")


def _kept(sentence: str, transcript: Transcript, skill: str) -> bool:
    kind, one, two = parsed(sentence)
    if kind in ("loads", "loads not"):
        return (skill in transcript.loaded) == (kind == "loads")
    if kind == "loads other":
        return one in transcript.loaded
    if kind == "reads":
        return any(path.endswith(one) for path in transcript.read)
    if kind in ("runs", "runs not"):
        first = _first(transcript, one)
        found = first is not None and (two is None or (_first(transcript, two, after=first) is not None))
        return found == (kind == "runs")
    if kind in ("edits", "edits not"):
        return any(f"/{one}/" in f"/{path}/" for path in transcript.edited) == (kind == "edits")
    if kind == "names":
        return any(word.lower() in transcript.answer.lower() for word in (one, two) if word)
    return "?" in transcript.answer


def _first(transcript: Transcript, wanted: str, after: int = -1) -> int | None:
    """The place of the first command that has the words of `wanted`, in their order."""
    lines = [line for command in transcript.commands for line in expanded(command)]
    return next((at for at, line in enumerate(lines) if at > after and _has(line, wanted)), None)


def _has(line: list[str], wanted: str) -> bool:
    first, *rest = wanted.split()
    remaining = iter(line[1:])
    return line[:1] == [first] and all(word in remaining for word in rest)


def expanded(command: str) -> Iterator[list[str]]:
    """Its parts between && and |, as words; a skill's script counts as the lines that it stands for."""
    for part in re.split(r"&&|\|\||[;|]", command):
        words = shlex.split(part)
        script = next((word for word in words if word.endswith("scripts/run.py")), None)
        number = re.search(r"-finetune-(0\d)-", script) if script else None
        yield from _script(number[1]) if number else [words]


@cache
def _script(number: str) -> list[list[str]]:
    path = SKILLS / registry.skill_of(number) / "scripts" / "run.py"
    spec = importlib.util.spec_from_file_location(f"script_{number}", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return [
        line
        for step in module.STEPS
        for line in [*(["finetune", *work] for work in step.work), ["gate", *step.judged_by]]
    ]


# ---- form


def test_each_skill_has_enough_of_each_kind() -> None:
    assert tuple(documents()) == registry.SKILLS
    for skill in registry.SKILLS:
        kinds = [case.kind for case in CASES if case.skill == skill]
        assert set(kinds) == set(AT_LEAST)
        assert all(kinds.count(kind) >= least for kind, least in AT_LEAST.items()), skill


@pytest.mark.parametrize("skill", registry.SKILLS)
def test_the_file_has_the_layout_of_the_convention(skill: str) -> None:
    document = documents()[skill]
    assert set(document) == {"skill_name", "evals"} and document["skill_name"] == skill
    assert [item["id"] for item in document["evals"]] == list(range(1, len(document["evals"]) + 1))
    for item in document["evals"]:
        assert set(item) == KEYS and item["files"] == [], item
        assert all(
            item[name].strip() and item[name].isascii() for name in ("prompt", "setup", "expected_output")
        )


def test_no_two_cases_are_one() -> None:
    for name in ("prompt", "expected_output"):
        texts = [getattr(case, name) for case in CASES]
        assert len(set(texts)) == len(texts)
    assert all(case.skill not in case.prompt for case in CASES)  # a user doesn't know the skill's name


@each
def test_a_case_asserts_what_its_kind_is_for(case: Case) -> None:
    kinds = [parsed(sentence)[0] for sentence in case.assertions]
    assert len(set(case.assertions)) == len(case.assertions) >= 2
    assert ("loads" in kinds) == (case.kind != "negative")
    assert ("loads not" in kinds) == (case.kind == "negative")
    forbidden = {"runs not", "edits not"} & set(kinds)
    if case.kind != "positive":
        assert forbidden
    if case.kind == "tempting":
        assert {"names", "asks"} & set(kinds)  # it says why, and does not only refuse
    if case.kind == "positive":
        assert {"runs", "reads"} & set(kinds)


@each
def test_what_a_case_names_is_there(case: Case) -> None:
    for sentence in case.assertions:
        kind, one, two = parsed(sentence)
        if kind in ("runs", "runs not"):
            for command in filter(None, (one, two)):
                assert_command(command, finished=kind == "runs")
        elif kind in ("edits", "edits not"):
            assert one in FILES
        elif kind == "loads other":
            assert one in registry.SKILLS and one != case.skill
        elif kind == "reads":
            assert (SKILLS / case.skill / one).is_file()
        elif kind == "names" and re.fullmatch(r"[a-z]+(-[a-z]+)+", one):
            assert one in {spec.id for number in registry.numbers() for spec in registry.load(number).specs}


def assert_command(line: str, *, finished: bool) -> None:
    """One of ours with options that it has, or of the few others."""
    program, *words = line.split()
    if program not in ("finetune", "gate"):
        assert any(f"{line} ".startswith(f"{known} ") for known in FOREIGN), line
        return
    name, *arguments = words
    command = (
        gate_cli.cli.get_command(click.Context(gate_cli.cli), name) if program == "gate" else _finetune(name)
    )
    assert command is not None, line
    options = {option for param in command.params for option in param.opts}
    assert {word for word in arguments if word.startswith("--")} <= options, line


def _finetune(name: str) -> click.Command | None:
    if name not in COMMANDS:
        return None
    command: click.Command = importlib.import_module(COMMANDS[name][0]).command
    return command


# ---- what a right transcript shows


def right(case: Case) -> Transcript:
    """The least that keeps every assertion: what it says is done, in an order that it allows."""
    found: dict[str, list[Any]] = {"loaded": [], "read": [], "edited": [], "answer": []}
    pairs: list[tuple[str, str | None]] = []
    for sentence in case.assertions:
        kind, one, two = parsed(sentence)
        if kind == "runs":
            pairs.append((one, two))
        place = {
            "loads": "loaded",
            "loads other": "loaded",
            "reads": "read",
            "edits": "edited",
            "names": "answer",
        }
        if kind in place:
            found[place[kind]].append(one or case.skill)
    answer = "; ".join(found.pop("answer")) + " - shall I?"
    return Transcript(
        commands=tuple(_ordered(pairs)), answer=answer, **{k: tuple(v) for k, v in found.items()}
    )


def _ordered(pairs: list[tuple[str, str | None]]) -> list[str]:
    names = list(dict.fromkeys(name for pair in pairs for name in pair if name))
    for order in itertools.permutations(names):
        if all(two is None or order.index(one) < order.index(two) for one, two in pairs):
            return list(order)
    raise AssertionError(f"no order keeps {pairs}")


@each
def test_a_right_transcript_can_be_given(case: Case) -> None:
    assert grade(right(case), case) == []


@each
def test_each_assertion_can_fail(case: Case) -> None:
    for sentence in case.assertions:
        assert sentence in grade(wrong(right(case), sentence, case), case), sentence


def wrong(good: Transcript, sentence: str, case: Case) -> Transcript:
    kind, one, _ = parsed(sentence)
    lacking = {
        "loads": {"loaded": ()}, "loads other": {"loaded": ()}, "reads": {"read": ()}, "edits": {"edited": ()},
        "runs": {"commands": tuple(reversed(good.commands)) if " before " in sentence else ()},
        "names": {"answer": "?"}, "asks": {"answer": "Done."},
    }  # fmt: skip
    more = {
        "loads not": {"loaded": (case.skill,)},
        "runs not": {"commands": (*good.commands, f"cd x && {one} --more")},
        "edits not": {"edited": (f"workspace/{one}",)},
    }
    return replace(good, **{**lacking, **more}[kind])


@pytest.mark.parametrize(
    ("commands", "sentence", "kept"),
    [
        (["finetune fit --smoke --workspace w"], "Runs `finetune fit --smoke`", True),
        (["finetune fit --workspace w --smoke"], "Runs `finetune fit --smoke`", True),
        (["finetune fitting"], "Never runs `finetune fit`", True),
        (["cd w && finetune fit"], "Never runs `finetune fit`", False),
        (["echo finetune fit"], "Never runs `finetune fit`", True),
        (["finetune cache; finetune fit"], "Runs `finetune cache` before `finetune fit`", True),
        (["finetune fit", "finetune cache"], "Runs `finetune cache` before `finetune fit`", False),
        (["finetune fit", "finetune cache", "finetune fit"], "Runs `finetune cache` before `finetune fit`", True),
        ([f"python .claude/skills/{registry.SERIES}07-training/scripts/run.py"],
         "Runs `gate check 07 --phase smoke` before `finetune fit`", True),
        ([f"python .claude/skills/{registry.SERIES}06-quantize/scripts/run.py"], "Runs `finetune fit`", False),
    ],
)  # fmt: skip
def test_commands_are_found_where_they_are(commands: list[str], sentence: str, kept: bool) -> None:
    assert _kept(sentence, Transcript(commands=tuple(commands)), registry.SKILLS[6]) == kept


@pytest.mark.parametrize("sentence", ["Does it well", "Runs finetune fit", "Never runs `x` or so", ""])
def test_a_sentence_of_no_known_form_is_refused(sentence: str) -> None:
    with pytest.raises(ValueError, match="no machine reads"):
        parsed(sentence)
