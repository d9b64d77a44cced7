import json
from pathlib import Path
from typing import Any

import pytest

from gates import prompt_file
from gates.evidence import EvidenceError
from gates.workspace import Workspace

VECTORS = Path(__file__).resolve().parents[2] / "schemas" / "vectors" / "prompt-lines.json"
ROWS = json.loads(VECTORS.read_text(encoding="utf-8"))["lines"]


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    for name in ("work/a.png", "work/some where/b.png", "elsewhere/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return Workspace(root=tmp_path / "work")


def read(workspace: Workspace, text: str, name: str = "p.txt") -> list[dict[str, Any]]:
    (workspace.root / name).parent.mkdir(parents=True, exist_ok=True)
    (workspace.root / name).write_bytes(text.encode("utf-8"))
    return prompt_file.read(workspace, name)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_vectors(workspace: Workspace, row: dict[str, Any]) -> None:
    if row["item"] is None:
        with pytest.raises(EvidenceError) as caught:
            read(workspace, row["line"], name=row["file"])
        assert caught.value.path == f"{row['file']} line 1"
        return
    (found,) = read(workspace, "\ufeff" + row["line"] + "\n", name=row["file"])
    told = {name: value for name, value in found.items() if name != "paths" and value is not None}
    assert told == row["item"]
    assert [path.is_file() for path in found["paths"]] == [True] * len(row["item"]["images"])


def test_comments_and_blank_lines_are_passed_over_and_the_file_is_an_input(workspace: Workspace) -> None:
    found = read(workspace, "# a comment\r\n\r\nx --ci ../a.png\r\ny --ci ../a.png", name="lists/p.txt")
    assert [(item["prompt"], item["paths"]) for item in found] == [
        (name, [workspace.root / "a.png"]) for name in "xy"
    ]
    assert list(workspace.inputs) == ["lists/p.txt"]


def test_a_file_outside_keeps_to_its_folder_and_names_no_absolute_path(workspace: Workspace) -> None:
    folder = workspace.root.parent / "elsewhere"
    text = f"x --ci c.png\ny --ci ../{workspace.root.name}/a.png"
    (folder / "p.txt").write_text(text, encoding="utf-8")
    with pytest.raises(EvidenceError) as caught:
        prompt_file.read(workspace, str(folder / "p.txt"))
    assert caught.value.path == "external:p.txt line 2" and str(folder) not in caught.value.message
    (folder / "p.txt").write_text("x --ci c.png", encoding="utf-8")
    assert prompt_file.read(workspace, str(folder / "p.txt"))[0]["paths"] == [folder / "c.png"]


@pytest.mark.parametrize(
    ("data", "fault"), [(None, "is missing"), (b"x \xe9 --ci a.png", "is no UTF-8 at byte 2")]
)
def test_a_file_that_can_not_be_read(workspace: Workspace, data: bytes | None, fault: str) -> None:
    if data is not None:
        (workspace.root / "p.txt").write_bytes(data)
    with pytest.raises(EvidenceError, match=fault):
        prompt_file.read(workspace, "p.txt")
