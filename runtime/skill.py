"""Follow a skill from start to end: do what its gate doesn't pass yet, judge, stop at a FAIL.

The gate comes in as a callable, for runtime never imports the judge.
"""

import argparse
import contextlib
import io
import json
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Command = Callable[[Sequence[str]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`work` are `finetune` command lines, `judged_by` the `gate` line that says whether they are needed."""

    work: list[list[str]]
    judged_by: list[str]


def follow(
    doc: str, steps: Sequence[Step], *, finetune: Command, gate: Command, argv: Sequence[str] | None = None
) -> int:
    """Exit status of the first command or gate that doesn't end well, else 0."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workspace", default=".", help="the directory that `finetune init` made")
    where = ["--workspace", str(parser.parse_args(argv).workspace)]
    for step in steps:
        work = _work_left(step, finetune, gate, where)
        if not work:
            _say(f"gate {' '.join(step.judged_by)}: PASS already, nothing to do")
            continue
        for line in work:
            _say(f"finetune {' '.join(line)}")
            if code := finetune([*line, *where]):
                return code
        if code := gate([*step.judged_by, *where]):
            return code
    return 0


def _work_left(step: Step, finetune: Command, gate: Command, where: Sequence[str]) -> list[list[str]]:
    """What the gate wants done: nothing, the rest of a run that was interrupted, or the step's own work."""
    advice = _next_command(gate, [*step.judged_by, *where])
    if advice is not None and advice[:1] == ["monitor"]:
        # A run that says it is running: wait for it, or find out that its process is gone.
        _say("finetune monitor --wait")
        finetune(["monitor", "--wait", *where])
        advice = _next_command(gate, [*step.judged_by, *where])
    if advice is None:
        return []
    return [advice] if "--resume" in advice else step.work


def _next_command(gate: Command, line: Sequence[str]) -> list[str] | None:
    """The `finetune` line that the gate names, without that word; None where it passes."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        if gate([*line, "--json"]) == 0:
            return None
    try:
        words = shlex.split(json.loads(out.getvalue())["next_command"])
    except (ValueError, KeyError, TypeError):  # no verdict at all, or no command line in it
        return []
    return words[1:] if words[:1] == ["finetune"] else []


def _say(line: str) -> None:
    print(f"> {line}", file=sys.stderr, flush=True)
