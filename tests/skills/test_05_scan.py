"""Gate 05 with another trainer's checkout: the scan as recorded, against the files as they are."""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gates import checkout
from gates.evidence import document_digest
from gates.workspace import Workspace

CALLS, LOOPS = "no-cuda-only-calls", "step-guard-present"
SOURCE = (
    "import torch\n\n\ndef train(loader, optimizer, max_train_steps):\n    for step, batch in enumerate(loader):\n"
    "        optimizer.step()\n        if step >= max_train_steps:\n            break\n"
)
FINDING = {
    "kind": "cuda-call",
    "file": "src/train.py",
    "line": 9,
    "code": "torch.cuda.x()",
    "mend": "the device's",
}
LOOP = {
    "kind": "step", "file": "src/train.py", "line": 5, "function": "train", "guard": 7, "code": "for step",
}  # fmt: skip


@pytest.fixture
def scanned(make: Any, tmp_path: Path) -> Callable[..., Any]:
    """A healthy workspace with a clean scan of a checkout beside it; changes to the scan's keys as arguments."""

    def workspace(**changes: Any) -> Any:
        made, root = make(), tmp_path / "theirs"
        (root / "src").mkdir(parents=True)
        (root / "src" / "train.py").write_text(SOURCE, encoding="utf-8")
        local = made.root / ".gates" / "local.json"
        known = json.loads(local.read_text(encoding="utf-8"))["external"] if local.is_file() else {}
        local.write_text(json.dumps({"external": {**known, "checkout": str(root)}}), encoding="utf-8")
        scan = {
            "checkout": "external:checkout", "read_at": "2026-11-30T12:00:00.000Z", "files": 1, "digest": digest(root),
            "findings": [], "loops": [LOOP], "max_train_steps": True, "unread": [], **changes,
        }  # fmt: skip
        made.edit(made.evidence("05-adaptation"), lambda document: document["data"].update(scan=scan))
        return made

    return workspace


def digest(root: Path) -> str:
    """As schemas/README.md says, written once more."""
    names = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    return document_digest({n: hashlib.sha256(path.read_bytes()).hexdigest() for n, path in names.items()})


def check(judged: Any, id: str) -> Any:
    return next(item for item in judged.checks if item.id == id)


def test_a_clean_checkout_passes(scanned: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(scanned(), "05")
    assert_turned(verdict)
    assert verdict.counts["pass"] == 7
    assert check(verdict, CALLS).message == "none in 1 files"
    assert check(verdict, LOOPS).message == "1 loops, each with its way out"


def test_without_a_scan_both_skip(made: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(made, "05")
    assert_turned(verdict)
    for id in (CALLS, LOOPS):
        item = check(verdict, id)
        assert (
            item.status == "skip"
            and item.excused
            and item.message == "no other trainer's checkout was scanned"
        )


SPOILT: dict[str, tuple[dict[str, Any], set[str]]] = {
    "a call": ({"findings": [FINDING]}, {CALLS}),
    "flash attention": ({"findings": [{**FINDING, "kind": "flash-attention"}]}, {CALLS}),
    "a file that was not read": ({"unread": [{"file": "src/a.py", "reason": "not UTF-8 (byte 3)"}]}, {CALLS}),
    "a step loop without a way out": (
        {"loops": [{**LOOP, "guard": None}], "findings": [{**FINDING, "kind": "missing-step-guard"}]}, {LOOPS},
    ),
    "an epoch loop without a way out": ({"loops": [LOOP, {**LOOP, "kind": "epoch", "guard": None}]}, {LOOPS}),
    "no loop at all": ({"loops": []}, {LOOPS}),
    "an epoch loop alone": ({"loops": [{**LOOP, "kind": "epoch"}]}, {LOOPS}),
    "no limit is taken": ({"max_train_steps": False}, {LOOPS}),
    "another digest": ({"digest": "0" * 64}, {CALLS, LOOPS}),
}  # fmt: skip


@pytest.mark.parametrize("name", SPOILT)
def test_fault_turns_its_check(name: str, scanned: Any, judge: Any, assert_turned: Any) -> None:
    changes, expected = SPOILT[name]
    verdict = judge(scanned(**changes), "05")
    assert_turned(verdict, fail=expected)
    assert "finetune adapt --scan CHECKOUT" in verdict.next_command


@pytest.mark.parametrize("change", ["edited", "added", "removed"])
def test_a_checkout_that_changed_since_is_stale(
    change: str, scanned: Any, judge: Any, assert_turned: Any, tmp_path: Path
) -> None:
    made, source = scanned(), tmp_path / "theirs" / "src"
    if change == "removed":
        (source / "train.py").unlink()
    else:
        name = "train.py" if change == "edited" else "new.py"
        (source / name).write_text("x = 1\n", encoding="utf-8")
    verdict = judge(made, "05")
    assert_turned(verdict, fail={CALLS, LOOPS})
    assert check(verdict, CALLS).message.startswith("external:checkout has changed since it was scanned")
    assert check(verdict, CALLS).remedy == "finetune adapt --scan CHECKOUT"


@pytest.mark.parametrize("place", ["tests/test_a.py", ".venv/a.py", "docs/a.txt"])
def test_what_the_scan_passes_over_makes_nothing_stale(
    place: str, scanned: Any, judge: Any, assert_turned: Any, tmp_path: Path
) -> None:
    made, path = scanned(), tmp_path / "theirs" / place
    path.parent.mkdir()
    path.write_text("import torch\ntorch.cuda.synchronize()\n", encoding="utf-8")
    assert_turned(judge(made, "05"))


def test_a_call_that_the_scan_does_not_list_is_read_by_the_gate_itself(
    scanned: Any, judge: Any, assert_turned: Any, tmp_path: Path
) -> None:
    """The finding was taken out of the evidence by hand, or the scan overlooked it."""
    made, path = scanned(), tmp_path / "theirs" / "src" / "train.py"
    path.write_text(SOURCE + "\n\ndef clean():\n    torch.cuda.synchronize()\n", encoding="utf-8")
    now = digest(tmp_path / "theirs")
    made.edit(made.evidence("05-adaptation"), lambda d: d["data"]["scan"].update(digest=now))
    verdict = judge(made, "05")
    assert_turned(verdict, fail={CALLS, LOOPS})
    assert "src/train.py:12 calls torch.cuda, and the scan does not list it" in check(verdict, CALLS).message
    listed = [{**FINDING, "line": 12}]
    made.edit(made.evidence("05-adaptation"), lambda d: d["data"]["scan"].update(findings=listed))
    assert_turned(judge(made, "05"), fail={CALLS})


@pytest.mark.parametrize("how", ["the folder is gone", "the machine is another"])
def test_on_another_machine_it_rests_on_the_record_and_says_so(
    how: str, scanned: Any, judge: Any, assert_turned: Any, tmp_path: Path
) -> None:
    made = scanned()
    if how == "the folder is gone":
        shutil.rmtree(tmp_path / "theirs")
    else:
        (made.root / ".gates" / "local.json").unlink()
    verdict = judge(made, "05")
    assert_turned(verdict)
    for id in (CALLS, LOOPS):
        assert check(verdict, id).message.endswith("external:checkout is not here, so by its record alone")


def test_a_checkout_that_leads_out_of_its_place_is_no_pass(scanned: Any, judge: Any) -> None:
    verdict = judge(scanned(checkout="external:checkout/../x"), "05")
    assert not verdict.passes and check(verdict, CALLS).status == "error"


# ---- what the gate reads itself

PLAIN: dict[str, tuple[str, list[int]]] = {
    "a statement": ("torch.cuda.synchronize()\n", [1]),
    "in a method": ("class A:\n    def f(self):\n        torch.cuda.empty_cache()\n", [3]),
    "behind a question": ("if torch.cuda.is_available():\n    torch.cuda.empty_cache()\n", []),
    "after a way out": ("def f():\n    if not cuda:\n        return\n    torch.cuda.empty_cache()\n", []),
    "after an assertion": ("def f(d):\n    assert d.type == 'cuda'\n    torch.cuda.empty_cache()\n", []),
    "in a text": ('"""torch.cuda.empty_cache()"""\n# torch.cuda.empty_cache()\n', []),
    "a question itself": ("torch.cuda.is_available()\n", []),
    "no Python": ("torch.cuda.(\n", []),
}


@pytest.mark.parametrize("name", PLAIN)
def test_the_plainest_calls(name: str) -> None:
    source, lines = PLAIN[name]
    assert checkout._plain(source.encode("utf-8")) == lines


def test_the_scan_lists_whatever_the_gate_reads() -> None:
    """The gate's reading is the smaller one, so it never contradicts an honest scan: on the labelled sample."""
    corpus = Path(__file__).resolve().parents[1] / "runtime" / "adaptation" / "foreign" / "corpus_cuda.txt"
    plain = checkout._plain(corpus.read_bytes())
    lines = corpus.read_text(encoding="utf-8").splitlines()
    assert len(plain) >= 1 and all(
        "#+ cuda-call" in lines[line - 1] or "#- " in lines[line - 1] for line in plain
    )


def test_both_sides_name_a_checkout_alike(made: Any, tmp_path: Path) -> None:
    """The digest of the worker's walk is that of the judge's, also with files that it can't read."""
    if importlib.util.find_spec("runtime") is None:
        pytest.skip("the judge alone is installed")
    from runtime import files
    from runtime.adaptation import scan

    root = made.root / "theirs"
    texts = {
        "a.py": b"x = 1\n",
        "b/c.py": b"\xff",
        "b/big.py": b"#" * (scan.FILE_MAX + 1),
        "tests/d.py": b"",
        "E.PY": b"",
    }
    for name, data in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    here = checkout.read(Workspace.open(made.root), {"checkout": "theirs"})
    assert here is not None and here.digest == files.document_digest(scan.read(root).digests)
    assert (scan.FILE_MAX, scan.FILES_MAX, scan.PASSED_OVER) == (
        checkout.FILE_MAX, checkout.FILES_MAX, checkout.PASSED_OVER,
    )  # fmt: skip
