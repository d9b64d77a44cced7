"""Follow a skill from start to end: do what its gate doesn't pass yet, judge, stop at a FAIL.

The gate comes in as a callable, for runtime never imports the judge.
"""

import argparse
import contextlib
import io
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
        if _passes(gate, [*step.judged_by, *where]):
            _say(f"gate {' '.join(step.judged_by)}: PASS already, nothing to do")
            continue
        for line in step.work:
            _say(f"finetune {' '.join(line)}")
            if code := finetune([*line, *where]):
                return code
        if code := gate([*step.judged_by, *where]):
            return code
    return 0


def _passes(gate: Command, line: Sequence[str]) -> bool:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return gate([*line, "--json"]) == 0


def _say(line: str) -> None:
    print(f"> {line}", file=sys.stderr, flush=True)
