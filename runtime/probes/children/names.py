"""Who owns the names `gates` and `runtime`, and the commands. Runs by itself; see ../child.py.

Argument: the folder that holds our two packages.
"""

import importlib.util
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

OURS = "aipc-finetune"
PACKAGES = ("gates", "runtime")
COMMANDS = ("gate", "finetune")


def say(**facts: Any) -> None:
    print("@" + json.dumps(facts), flush=True)


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def origin(name: str, root: Path) -> dict[str, Any]:
    """What `import name` would find here; where that is foreign, the end of its path."""
    spec = importlib.util.find_spec(name)
    found = Path(spec.origin).resolve() if spec is not None and spec.origin else None
    ours = found is not None and found == (root / name / "__init__.py").resolve()
    where = "" if ours else "/".join(found.parts[-3:]) if found else "nowhere"
    return {"name": name, "ours": ours, "where": where}


def main() -> None:
    root = Path(sys.argv[1])
    say(stage="find_spec", packages=[origin(name, root) for name in PACKAGES])
    say(stage="packages_distributions")
    foreign = {
        (name, normal(owner))
        for name, owners in metadata.packages_distributions().items()
        if name in (*PACKAGES, *COMMANDS)
        for owner in owners
    }
    say(distributions=[{"name": n, "distribution": d} for n, d in sorted(foreign) if d != OURS])
    say(stage="entry_points")
    scripts = {
        (point.name, normal(point.dist.name))
        for point in metadata.entry_points(group="console_scripts")
        if point.name in COMMANDS and point.dist is not None
    }
    say(scripts=[{"name": n, "distribution": d} for n, d in sorted(scripts) if d != OURS], done=True)


if __name__ == "__main__":
    main()
