"""Another trainer's checkout, read by the judge itself: is it still what was scanned, and was nothing left out?

The scan of evidence 05-adaptation is the worker's, and judges by much more than this. Here stands what
takes no judgement: the digest of the files, and calls of CUDA that no condition stands before or around.
"""

import ast
import hashlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from gates.checks import Finding, listing, verdict_of
from gates.evidence import EvidenceError, MissingEvidenceError, Reading, document_digest
from gates.verdict import EvidenceRef
from gates.workspace import Workspace

FILE_MAX = 2 * 2**20
FILES_MAX = 5000
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
QUERIES = {"is_available", "device_count", "is_initialized"}
CONDITIONS = (ast.If, ast.IfExp, ast.While, ast.Match, ast.Assert, ast.BoolOp)
GUARDS = (
    "missing-step-guard",
    "missing-epoch-break",
)  # findings that judge_loops judges; all others are CUDA's
RESCAN = "finetune adapt --scan CHECKOUT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkout:
    digest: str
    plain: frozenset[tuple[str, int]]
    """file and line of calls of torch.cuda that can't be missed"""


def read(workspace: Workspace, scan: dict[str, Any]) -> Checkout | None:
    """None where the checkout is not on this machine. Raises EvidenceError where it is no folder to read."""
    try:
        root = workspace.resolve(scan["checkout"])
    except MissingEvidenceError:
        return None
    if not root.is_dir():
        return None
    digests: dict[str, str] = {}
    plain: set[tuple[str, int]] = set()
    try:
        for path in _sources(root):
            if len(digests) > FILES_MAX:
                raise EvidenceError(
                    scan["checkout"], f"has more than {FILES_MAX} Python files", remedy=RESCAN
                )
            name = path.relative_to(root).as_posix()
            size = path.stat().st_size
            data = path.read_bytes() if size <= FILE_MAX else None
            digests[name] = f"{size} bytes" if data is None else hashlib.sha256(data).hexdigest()
            plain |= {(name, line) for line in _plain(data or b"")}
    except OSError as error:
        raise EvidenceError(scan["checkout"], f"can't be read ({error.strerror})", remedy=RESCAN) from error
    return Checkout(digest=document_digest(digests), plain=frozenset(plain))


def _sources(root: Path) -> Iterator[Path]:
    for folder, names, leaves in os.walk(root):
        names[:] = [name for name in names if not name.startswith(".") and name.lower() not in PASSED_OVER]
        paths = (Path(folder) / leaf for leaf in leaves if leaf.endswith(".py"))
        yield from (path for path in paths if not path.is_symlink() and path.is_file())


def _plain(data: bytes) -> list[int]:
    """Lines with a statement `torch.cuda.x(...)`, where neither it nor its function asks anything at all."""
    if b"torch.cuda." not in data:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(data.decode("utf-8-sig"))
        return list(_statements(tree.body))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # the scan lists it as not read, and that is judged


def _statements(body: Sequence[ast.stmt]) -> Iterator[int]:
    """Of a block that asks nothing; what its functions and classes hold is asked for itself."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _statements(statement.body)
    own = [
        part for part in body if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    ]
    if any(isinstance(node, (*CONDITIONS, ast.Try)) for part in own for node in ast.walk(part)):
        return
    for part in own:
        if isinstance(part, ast.Expr) and isinstance(part.value, ast.Call) and _is_cuda(part.value.func):
            yield part.lineno


def _is_cuda(node: ast.expr) -> bool:
    text = ast.unparse(node)
    return text.startswith("torch.cuda.") and text.count(".") == 2 and text.rpartition(".")[2] not in QUERIES


# ---- judging the scan

Scan: TypeAlias = Mapping[str, Any]
Source: TypeAlias = Reading[Checkout | None]


def judge_calls(scan: Scan, source: Source, evidence: EvidenceRef) -> Finding:
    """What knows CUDA only, and what was not read."""
    found = [item for item in scan["findings"] if item["kind"] not in GUARDS]
    faults = [f"{item['file']}:{item['line']}: {item['kind']}: {item['code']}" for item in found]
    faults += [f"{item['file']} was not read: {item['reason']}" for item in scan["unread"]]
    stale = _stale(scan, source)
    return verdict_of(
        not stale and not faults,
        listing(stale + faults) or f"none in {scan['files']} files{_rests_on(scan, source)}",
        expected=0,
        observed=len(found),
        unit="findings",
        evidence=(evidence,),
        remedy=RESCAN if stale else None,
    )


def judge_loops(scan: Scan, source: Source, evidence: EvidenceRef) -> Finding:
    """Each training loop and where the limit of steps leaves it."""
    loops = scan["loops"]
    stale = _stale(scan, source)
    faults = []
    if not any(loop["kind"] == "step" for loop in loops):
        faults.append(
            "no loop with an optimizer's step was found: scan the folder that holds the trainer's loop"
        )
    elif not scan["max_train_steps"]:
        faults.append("it takes no max_train_steps, so that nothing can stop its loops")
    faults += [
        f"{loop['file']}:{loop['line']}: the {loop['kind']} loop of {loop['function']} has no way out at the limit"
        for loop in loops
        if loop["guard"] is None
    ]
    return verdict_of(
        not stale and not faults,
        listing(stale + faults) or f"{len(loops)} loops, each with its way out{_rests_on(scan, source)}",
        expected="a way out of each loop",
        observed={f"{loop['file']}:{loop['line']}": loop["guard"] for loop in loops},
        evidence=(evidence,),
        remedy=RESCAN if stale else None,
    )


def _is_absent(source: Source) -> bool:
    return source.error is None and source.value is None


def _stale(scan: Scan, source: Source) -> list[str]:
    """Why the scan is not one of the checkout as it stands; nothing where that is not here to be compared."""
    if _is_absent(source):
        return []
    here = source.get()
    if here is None:
        return []
    if here.digest != scan["digest"]:
        return [f"{scan['checkout']} has changed since it was scanned"]
    missed = here.plain - {(item["file"], item["line"]) for item in scan["findings"]}
    return [f"{file}:{line} calls torch.cuda, and the scan does not list it" for file, line in sorted(missed)]


def _rests_on(scan: Scan, source: Source) -> str:
    return f"; {scan['checkout']} is not here, so by its record alone" if _is_absent(source) else ""
