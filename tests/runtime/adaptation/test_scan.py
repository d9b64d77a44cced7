"""A checkout is read and never run; what can't be read is told file by file."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from runtime import files
from runtime.adaptation import measure, scan
from runtime.commands.adapt import command
from runtime.errors import UserError

UNGUARDED = (
    "import torch\n\ndef train(loader, optimizer, max_train_steps):\n    for epoch in range(3):\n"
    "        for batch in loader:\n            optimizer.step()\n        torch.cuda.empty_cache()\n"
)
GUARDED = UNGUARDED.replace(
    "        torch.cuda.empty_cache()\n", "            if batch >= max_train_steps:\n                return\n"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Any:
    """checkout({path: text or bytes}) -> its folder."""

    def make(texts: dict[str, str | bytes]) -> Path:
        root = tmp_path / "their trainer"
        for name, text in texts.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(text if isinstance(text, bytes) else text.encode("utf-8"))
        return root

    return make


def test_what_is_found_with_file_line_code_and_mend(checkout: Any) -> None:
    found = scan.read(checkout({"src/b.py": UNGUARDED, "src/a.py": "x = 1\n"}))
    assert [(f["kind"], f["file"], f["line"], f["code"]) for f in found.findings] == [
        ("missing-epoch-break", "src/b.py", 4, "for epoch in range(3):"),
        ("missing-step-guard", "src/b.py", 5, "for batch in loader:"),
        ("cuda-call", "src/b.py", 7, "torch.cuda.empty_cache()"),
    ]
    assert all(finding["mend"] for finding in found.findings) and found.limited
    assert [(loop["kind"], loop["function"], loop["guard"]) for loop in found.loops] == [
        ("epoch", "train", None), ("step", "train", None),
    ]  # fmt: skip


def test_without_a_limit_no_guard_is_missing(checkout: Any) -> None:
    found = scan.read(checkout({"a.py": UNGUARDED.replace("max_train_steps", "epochs")}))
    assert (
        [f["kind"] for f in found.findings] == ["cuda-call"] and len(found.loops) == 2 and not found.limited
    )


def test_the_limit_may_be_taken_in_another_file(checkout: Any) -> None:
    texts = {
        "a.py": UNGUARDED.replace(", max_train_steps", ""),
        "b.py": "class Train:\n    max_train_steps: int = 9\n",
    }
    assert len(scan.read(checkout(texts)).findings) == 3


def test_nothing_is_run(checkout: Any, tmp_path: Path) -> None:
    trap = f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit\n"
    assert scan.read(checkout({"a.py": trap, "setup.py": trap})).unread == []
    assert not (tmp_path / "ran").exists()


UNREAD: dict[str, tuple[bytes, str]] = {
    "latin": (b"x = '\xe9'\n", "not UTF-8 (byte 5)"),
    "two": (b"print 'x'\n", "no Python of today: "),
    "null": (b"x = 1\0\n", ""),
    "deep": (b"x = " + b"(" * 3000 + b")" * 3000, ""),
    "wide": (b"#" * (scan.FILE_MAX + 1), f"it has {scan.FILE_MAX + 1} bytes"),
    "chain": (b"x = " + b"+".join([b"1"] * 20_000), "nested too deeply"),
}


@pytest.mark.parametrize("name", UNREAD)
def test_what_can_not_be_read_is_told_and_hides_nothing(name: str, checkout: Any) -> None:
    data, reason = UNREAD[name]
    found = scan.read(checkout({f"{name}.py": data, "z.py": UNGUARDED}))
    (unread,) = found.unread
    assert unread["file"] == f"{name}.py" and unread["reason"].startswith(reason) and unread["reason"]
    assert len(found.findings) == 3 and len(found.digests) == 2


@pytest.mark.parametrize("text", ["\ufeffx = 1\n", "x = '\\d'\n", "", "\r\nx = 1\r\n"])
def test_odd_but_readable(text: str, checkout: Any) -> None:
    assert scan.read(checkout({"a.py": text})).unread == []


def test_what_is_passed_over(checkout: Any, tmp_path: Path) -> None:
    (tmp_path / "outside.py").write_text(UNGUARDED, encoding="utf-8")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "c.py").write_text(UNGUARDED, encoding="utf-8")
    names = (
        ".git/x.py",
        "tests/test_a.py",
        "venv/lib/site-packages/t.py",
        "Build/b.py",
        "a/node_modules/c.py",
        "a.txt",
    )
    root = checkout({"a/b.py": "x = 1\n", **dict.fromkeys(names, UNGUARDED)})
    (root / "link.py").symlink_to(tmp_path / "outside.py")
    (root / "away").symlink_to(tmp_path / "elsewhere", target_is_directory=True)
    found = scan.read(root)
    assert list(found.digests) == ["a/b.py"] and found.findings == []


def test_nothing_to_scan(checkout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = checkout({"a.txt": "x", "b.py": "", "c.py": ""})
    with pytest.raises(UserError, match="no folder"):
        scan.read(tmp_path / "none")
    with pytest.raises(UserError, match="no Python file"):
        scan.read(checkout({"docs/a.txt": ""}) / "docs")
    monkeypatch.setattr(scan, "FILES_MAX", 1)
    with pytest.raises(UserError, match="more than 1 Python files"):
        scan.read(root)


# ---- finetune adapt --scan


def invoke(lab: Any, *arguments: str) -> Any:
    return CliRunner().invoke(command, ["--workspace", str(lab.root), *arguments])


def evidence(lab: Any) -> Any:
    return json.loads(lab.workspace.evidence_path("05-adaptation").read_text(encoding="utf-8"))


@pytest.fixture
def measured(lab: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the device was measured."""
    calls: list[int] = []
    data = {
        "device": {"type": "cpu", "name": "cpu", "driver": None}, "probes": [], "choices": {}, "step_parity": [],
        "versions": {"torch": "2.13.0"},
    }  # fmt: skip

    def stand_in(config: Any, report: Any) -> dict[str, Any]:
        calls.append(1)
        return data

    lab.configure()
    monkeypatch.setattr(measure, "measure", stand_in)
    return calls


def test_it_joins_the_evidence_that_stands(
    lab: Any, checkout: Any, measured: list[int], conforms: Any
) -> None:
    root = checkout({"src/b.py": UNGUARDED})
    assert invoke(lab).exit_code == 0
    inputs = evidence(lab)["inputs"]
    shown = invoke(lab, "--scan", str(root))
    assert shown.exit_code == 0, shown.output
    for text in (
        "src/b.py:7",
        "cuda-call",
        "missing-epoch-break",
        "torch.cuda.empty_cache()",
        "next: gate check 05",
    ):
        assert text in shown.output
    document = evidence(lab)
    conforms(document, "evidence")
    assert measured == [1] and document["complete"] and document["inputs"] == inputs
    found = document["data"]["scan"]
    assert found["checkout"] == "external:checkout" and lab.workspace.resolve("external:checkout") == root
    assert found["digest"] == files.document_digest({"src/b.py": files.file_digest(root / "src/b.py")})
    assert str(root) not in json.dumps(document)


def test_it_measures_first_where_nothing_stands(lab: Any, checkout: Any, measured: list[int]) -> None:
    assert invoke(lab, "--scan", str(checkout({"a.py": GUARDED}))).exit_code == 0
    assert measured == [1] and evidence(lab)["data"]["scan"]["findings"] == []


def test_a_wrong_folder_leaves_the_evidence_alone(lab: Any, measured: list[int], tmp_path: Path) -> None:
    invoke(lab)
    before = evidence(lab)
    shown = invoke(lab, "--scan", str(tmp_path / "none"))
    assert shown.exit_code == 1 and "next: finetune adapt --scan FOLDER" in shown.output
    assert evidence(lab) == before


def test_without_scan_it_is_forgotten(lab: Any, checkout: Any, measured: list[int]) -> None:
    invoke(lab, "--scan", str(checkout({"a.py": GUARDED})))
    invoke(lab)
    assert "scan" not in evidence(lab)["data"]


def test_json(lab: Any, checkout: Any, measured: list[int]) -> None:
    shown = invoke(lab, "--scan", str(checkout({"a.py": UNGUARDED})), "--json")
    assert len(json.loads(shown.stdout)["scan"]["findings"]) == 3
