"""Print one of the README's command blocks, so that CI runs what a newcomer copies.

    python .ci/readme_command.py demo|tests [--venv FOLDER]

A block is the first fenced one after the line `<!-- command: NAME -->`. --venv puts another folder for its `.venv`.
"""

import argparse
import re
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
VENV = ".venv"


def command(name: str, venv: str = VENV) -> str:
    text = README.read_text(encoding="utf-8")
    found = re.search(rf"<!-- command: {name} -->\s*```\w*\n(.*?)```", text, re.DOTALL)
    if found is None:
        raise SystemExit(f"README.md has no block <!-- command: {name} -->")
    if VENV not in found[1]:
        raise SystemExit(f"the block {name} of README.md makes no {VENV}")
    return found[1].replace(VENV, venv)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=["demo", "tests"])
    parser.add_argument("--venv", default=VENV, metavar="FOLDER")
    arguments = parser.parse_args()
    print(command(arguments.name, arguments.venv), end="")
