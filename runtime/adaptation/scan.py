"""finetune adapt --scan: another trainer's checkout, read and never run; the `scan` of evidence 05-adaptation."""

import ast
import hashlib
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime import files
from runtime.adaptation.foreign import cuda, loops
from runtime.errors import UserError
from runtime.workspace import Workspace

NAME = "checkout"
FILE_MAX = 2 * files.MIB  # a source of more is generated
FILES_MAX = 5000
# Not what trains: others' packages, tests, what a tool has made. Hidden folders are left out too.
PASSED_OVER = {
    "__pycache__",
    "node_modules",
    "site-packages",
    "venv",
    "env",
    "build",
    "dist",
    "tests",
    "test",
}

GUARDS = {"step": "missing-step-guard", "epoch": "missing-epoch-break"}
MEND = {
    "missing-step-guard": "leave the loop after the update: if global_step >= max_train_steps: break (or return)",
    "missing-epoch-break": "leave the loop over epochs too: if global_step >= max_train_steps: break",
}


@dataclass(slots=True, kw_only=True)
class Scan:
    digests: dict[str, str] = field(default_factory=dict)
    """file to SHA-256, of every file that was looked at"""
    findings: list[dict[str, Any]] = field(default_factory=list)
    loops: list[dict[str, Any]] = field(default_factory=list)
    unread: list[dict[str, str]] = field(default_factory=list)
    limited: bool = False
    """a limit of steps is accepted somewhere"""


def record(workspace: Workspace, checkout: Path) -> dict[str, Any]:
    """Raises UserError where `checkout` is no folder with Python in it, or too large a one."""
    found = read(checkout)
    return {
        "checkout": workspace.refer(checkout, NAME),
        "read_at": files.utc_now(),
        "files": len(found.digests),
        "digest": files.document_digest(found.digests),
        "findings": found.findings,
        "loops": found.loops,
        "max_train_steps": found.limited,
        "unread": found.unread,
    }


def read(checkout: Path) -> Scan:
    if not checkout.is_dir():
        raise UserError(f"{checkout} is no folder", remedy="finetune adapt --scan FOLDER")
    found = Scan()
    for path in sources(checkout):
        if len(found.digests) == FILES_MAX:
            raise UserError(
                f"{checkout} has more than {FILES_MAX} Python files",
                remedy="finetune adapt --scan FOLDER, with the folder of the trainer's own source",
            )
        _read_file(path, path.relative_to(checkout).as_posix(), found)
    if not found.digests:
        raise UserError(f"no Python file below {checkout}", remedy="finetune adapt --scan FOLDER")
    found.findings += _missing(found)
    found.findings.sort(key=lambda finding: (finding["file"], finding["line"], finding["kind"]))
    return found


def sources(checkout: Path) -> Iterator[Path]:
    """Every .py below, in order of names; neither a link nor what lies behind one."""
    for folder, names, leaves in os.walk(checkout):
        names[:] = sorted(
            name for name in names if not name.startswith(".") and name.lower() not in PASSED_OVER
        )
        for leaf in sorted(leaves):
            path = Path(folder) / leaf
            if leaf.endswith(".py") and not path.is_symlink() and path.is_file():
                yield path


def _read_file(path: Path, name: str, found: Scan) -> None:
    """Its findings, or why it could not be read."""
    try:
        if (size := path.stat().st_size) > FILE_MAX:
            found.digests[name] = f"{size} bytes"
            raise ValueError(f"it has {size} bytes, at most {FILE_MAX} are read")
        data = path.read_bytes()
        found.digests[name] = hashlib.sha256(data).hexdigest()
        text = data.decode("utf-8-sig")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an odd escape in someone's docstring
            tree = ast.parse(text)
        _look(tree, text.splitlines(), name, found)
    except UnicodeDecodeError as error:
        found.unread.append({"file": name, "reason": f"not UTF-8 (byte {error.start})"})
    except SyntaxError as error:
        found.unread.append({"file": name, "reason": f"no Python of today: {error.msg}, line {error.lineno}"})
    except (ValueError, OSError) as error:
        found.unread.append({"file": name, "reason": str(error)})
    except (RecursionError, MemoryError):
        found.unread.append({"file": name, "reason": "nested too deeply"})


def _look(tree: ast.Module, lines: list[str], name: str, found: Scan) -> None:
    told = cuda.scan(tree, lines)
    stepping, limited = loops.scan(tree)
    found.findings += [
        {"kind": item.kind, "file": name, "line": item.line, "code": item.code, "mend": cuda.MEND[item.kind]}
        for item in told
    ]
    found.loops += [
        {
            "kind": loop.kind,
            "file": name,
            "line": loop.line,
            "function": loop.function,
            "guard": loop.guard,
            "code": lines[loop.line - 1].strip()[: cuda.CODE_MAX],
        }
        for loop in stepping
    ]
    found.limited = found.limited or limited


def _missing(found: Scan) -> list[dict[str, Any]]:
    """Loops without a guard, where the checkout accepts a limit that they could obey."""
    bare = [loop for loop in found.loops if loop["guard"] is None] if found.limited else []
    missing = []
    for loop in bare:
        kind = GUARDS[loop["kind"]]
        place = {name: loop[name] for name in ("file", "line", "code")}
        missing.append({"kind": kind, **place, "mend": MEND[kind]})
    return missing
