"""One action that leads on: what `gate next` answers, whatever state the workspace is in."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from gates import registry
from gates.chain import Judged
from gates.verdict import Check, Verdict, first_of

Kind = Literal["run", "edit", "wait", "done"]
# A command line inside a remedy: up to a comma, a bracket or the end of the sentence.
_COMMAND = re.compile(r"\b(?:finetune|gate|hf) [a-z][^,;()]*")
INIT = "finetune init --model MODEL --dataset FOLDER"


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """`command` is what to type; where something must be edited first, `instruction` says what."""

    kind: Kind
    gate: str | None
    skill: str | None
    check: str | None
    command: str | None
    instruction: str
    because: str


def no_workspace(message: str) -> Action:
    return Action(
        kind="run", gate=None, skill=None, check=None, command=INIT, instruction=INIT, because=message
    )


def next_action(judged: Sequence[Judged]) -> Action:
    """The first gate that does not pass, and its first failure's remedy; `done` where all pass."""
    for item in judged:
        if not item.whole.passes:
            return _mend(item.whole)
    last = judged[-1].whole
    return Action(
        kind="done",
        gate=None,
        skill=None,
        check=None,
        command=last.next_command,
        instruction=f"every gate passes; {last.next_command} takes the adapter to other tools",
        because=f"gates {', '.join(item.whole.gate for item in judged)} pass",
    )


def command_in(remedy: str) -> str | None:
    """The first command line that `remedy` names."""
    found = _COMMAND.search(remedy)
    return found[0].strip() if found else None


def _mend(verdict: Verdict) -> Action:
    failure = first_of(verdict.checks, verdict.first_failure)
    remedy = verdict.next_command
    command = command_in(remedy)
    waits = verdict.outcome == "blocked" and "monitor" in (command or "")
    kind: Kind = "wait" if waits else "run" if command == remedy else "edit"
    return Action(
        kind=kind,
        gate=verdict.gate,
        skill=registry.skill_of(verdict.gate),
        check=failure.id if failure else None,
        command=command,
        instruction=remedy,
        because=_because(verdict, failure),
    )


def _because(verdict: Verdict, failure: Check | None) -> str:
    return f"{failure.id}: {failure.message or failure.title}" if failure else verdict.summary
