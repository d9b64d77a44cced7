"""Import what training imports. Arguments: module:attribute, each. Runs by itself; see ../child.py."""

import importlib
import json
import sys
from typing import Any


def say(**facts: Any) -> None:
    print("@" + json.dumps(facts), flush=True)


def attempt(place: str) -> str:
    """ "" or the exception, in one line."""
    module, _, attribute = place.partition(":")
    try:
        getattr(importlib.import_module(module), attribute)
    except Exception as error:  # a foreign package raises what it likes, which is the finding
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def main() -> None:
    modules: dict[str, str] = {}
    for place in sys.argv[1:]:
        say(stage=f"import {place.partition(':')[0]}")
        modules[place.partition(":")[0].partition(".")[0]] = attempt(place)
        say(modules=modules)
    say(done=True)


if __name__ == "__main__":
    main()
