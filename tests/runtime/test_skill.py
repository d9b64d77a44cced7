"""A skill's script: only what its gate does not pass yet, and nothing after a failure."""

import json
from collections.abc import Sequence

import pytest

from runtime.skill import Step, follow

STEPS = [
    Step(work=[["cache"]], judged_by=["check", "07", "--phase", "cache"]),
    Step(work=[["fit", "--smoke"], ["monitor"]], judged_by=["check", "07", "--phase", "smoke"]),
]


class Desk:
    """Both commands, with the answers that a test wants."""

    def __init__(self, *, passing: Sequence[str] = (), failing: Sequence[str] = ()) -> None:
        self.calls: list[str] = []
        self.passing, self.failing = set(passing), set(failing)

    def finetune(self, line: Sequence[str]) -> int:
        self.calls.append("finetune " + " ".join(line))
        if line[0] in self.failing:
            return 1
        if line[0] != "monitor":
            self.passing.add({"cache": "cache", "fit": "smoke"}[line[0]])
        return 0

    def gate(self, line: Sequence[str]) -> int:
        print("a table")
        if "--json" not in line:
            self.calls.append("gate " + " ".join(line))
        phase = line[line.index("--phase") + 1]
        return 0 if phase in self.passing and phase not in self.failing else 3

    def follow(self, *arguments: str) -> int:
        return follow("doc", STEPS, finetune=self.finetune, gate=self.gate, argv=arguments)


def test_work_then_gate_step_by_step() -> None:
    desk = Desk()
    assert desk.follow("--workspace", "w") == 0
    assert desk.calls == [
        "finetune cache --workspace w",
        "gate check 07 --phase cache --workspace w",
        "finetune fit --smoke --workspace w",
        "finetune monitor --workspace w",
        "gate check 07 --phase smoke --workspace w",
    ]


def test_what_passes_already_is_not_done_again(capsys: pytest.CaptureFixture[str]) -> None:
    desk = Desk(passing=["cache"])
    assert desk.follow() == 0
    assert desk.calls[0] == "finetune fit --smoke --workspace ."
    out, err = capsys.readouterr()
    assert "> gate check 07 --phase cache: PASS already, nothing to do" in err
    assert out == "a table\n"  # of the gate that judged; looking ahead is silent


@pytest.mark.parametrize(("failing", "code", "calls"), [("cache", 1, 1), ("smoke", 3, 5)])
def test_stops_at_the_first_failure_with_its_status(failing: str, code: int, calls: int) -> None:
    desk = Desk(failing=[failing])
    assert desk.follow() == code
    assert len(desk.calls) == calls


def test_help_is_the_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        Desk().follow("--help")
    assert caught.value.code == 0
    assert "doc" in capsys.readouterr().out


class Answers:
    """A gate that answers each look with the next of `commands`; None is a PASS."""

    def __init__(self, *commands: str | None) -> None:
        self.commands = list(commands)
        self.done: list[str] = []

    def gate(self, line: Sequence[str]) -> int:
        if "--json" not in line:
            return 0
        command = self.commands.pop(0)
        print(json.dumps({"next_command": command}))
        return 0 if command is None else 1

    def finetune(self, line: Sequence[str]) -> int:
        self.done.append(" ".join(line[:-2]))
        return 0


@pytest.mark.parametrize(
    ("commands", "done"),
    [
        (("finetune fit --resume latest",), ["fit --resume latest"]),
        (("finetune fit",), ["fit"]),
        (("finetune fit --smoke",), ["fit"]),
        (
            ("finetune monitor --wait", "finetune fit --resume latest"),
            ["monitor --wait", "fit --resume latest"],
        ),
        (("finetune monitor --wait", None), ["monitor --wait"]),
        (("set a lower rate, then finetune plan",), ["fit"]),
        (("it's no shell line",), ["fit"]),
        ((None,), []),
    ],
)
def test_an_interrupted_run_goes_on(commands: tuple[str | None, ...], done: list[str]) -> None:
    answers = Answers(*commands)
    steps = [Step(work=[["fit"]], judged_by=["check", "07"])]
    assert follow("doc", steps, finetune=answers.finetune, gate=answers.gate, argv=[]) == 0
    assert answers.done == done
