"""Print one of the README's command blocks, so that CI runs what a newcomer copies.

    python .ci/readme_command.py demo|tests

A block is the first fenced one after the line `<!-- command: NAME -->`.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"


def command(name: str) -> str:
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"<!-- command: {name} -->\s*```\w*\n(.*?)```", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"README.md has no block <!-- command: {name} -->")
    return found[1]


if __name__ == "__main__":
    print(command(sys.argv[1]), end="")
