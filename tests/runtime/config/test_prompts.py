"""The prompt file: both forms, what they mean, and each way to refuse one by its line."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config import prompts
from runtime.config.load import parse
from runtime.config.model import Config, ValidationSample
from runtime.errors import DataError
from runtime.workspace import Workspace

VECTORS = Path(__file__).parents[3] / "schemas" / "vectors" / "prompt-lines.json"
ROWS = json.loads(VECTORS.read_text(encoding="utf-8"))["lines"]
MINIMAL: dict[str, Any] = {
    "model": {"pretrained_model_name_or_path": "external:model"},
    "train": {"max_train_steps": 1},
}
OWN = {"prompt": "own", "images": ["a.png"]}


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """Pictures are only looked for, never opened."""
    for name in ("work/a.png", "work/some where/b.png", "elsewhere/c.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return Workspace(tmp_path / "work")


def config(**validation: Any) -> Config:
    return parse({**MINIMAL, "validation": validation})


def read(workspace: Workspace, text: str, name: str = "p.txt", **more: Any) -> list[prompts.Prompt]:
    (workspace.root / name).parent.mkdir(parents=True, exist_ok=True)
    (workspace.root / name).write_bytes(text.encode("utf-8"))
    return prompts.prompts_of(config(prompt_file=name, **more), workspace)


def test_those_of_the_file_come_after_those_of_the_config(workspace: Workspace) -> None:
    found = read(workspace, "# first\r\n\r\nfrom the file --ci a.png\r\n", samples=[OWN])
    assert [(p.name, p.where, p.asked.prompt) for p in found] == [
        ("prompt-0", "validation.samples[0]", "own"),
        ("prompt-1", "p.txt line 3", "from the file"),
    ]
    assert found[0].images == (("validation/a.png", workspace.root / "a.png"),)
    assert prompts.prompts_of(config(), workspace) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_vectors(workspace: Workspace, row: dict[str, Any]) -> None:
    """With a byte order mark, as Windows' editor writes it."""
    if row["item"] is None:
        with pytest.raises(DataError, match=f"^{row['file']} line 1: "):
            read(workspace, row["line"], name=row["file"])
        return
    (found,) = read(workspace, "\ufeff" + row["line"] + "\n", name=row["file"])
    assert found.asked == ValidationSample.model_validate(row["item"])
    assert found.where == f"{row['file']} line 1"


def test_the_vectors_have_unique_names() -> None:
    assert len({row["name"] for row in ROWS}) == len(ROWS) >= 30


def test_pictures_are_named_relative_to_the_file_and_stay_in_the_workspace(workspace: Workspace) -> None:
    (found,) = read(workspace, "x --ci ../a.png --ci ../some where/b.png", name="lists/p.txt")
    assert [(name, path.relative_to(workspace.root).as_posix()) for name, path in found.images] == [
        ("validation/a.png", "a.png"),
        ("validation/some where/b.png", "some where/b.png"),
    ]


def test_a_file_elsewhere_keeps_to_its_own_folder(workspace: Workspace) -> None:
    folder = workspace.root.parent / "elsewhere"
    (folder / "p.txt").write_text("x --ci c.png", encoding="utf-8")
    asked = config(prompt_file=str(folder / "p.txt"))
    assert prompts.prompts_of(asked, workspace)[0].images == (("validation/c.png", folder / "c.png"),)
    there = f"../{workspace.root.name}/a.png"
    (folder / "p.txt").write_text(f"x --ci {there}", encoding="utf-8")
    with pytest.raises(DataError, match="^" + re.escape(f"p.txt line 1: {there} lies outside")) as caught:
        prompts.prompts_of(asked, workspace)
    assert str(folder) not in caught.value.message


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("--ci a.png", "prompt: String should have at least 1 character"),
        ("x", "images: Tuple should have at least 1 item"),
        ("x --ci", "--ci has no value"),
        ("x --ci gone.png", r"no image at .*gone\.png"),
        ("x --ci ../elsewhere/c.png", ".*lies outside of the folder"),
        ("x --ci /etc/c.png", ".*lies outside of the folder"),
        ("x --ci a.png --w 64", "--w and --h go together"),
        ("x --ci a.png --w 64 --w 64 --h 64", "--w comes twice"),
        ("x --ci a.png --n a --n b", "--n comes twice"),
        ("x --ci a.png --d 1 --d 2", "--d comes twice"),
        ("x --ci a.png --d 4.5", "--d: saw 4.5, expected a whole number"),
        ("x --ci a.png --d 9999999999999999999", "seed: Input should be less than"),
        ("x --ci a.png --s 1", "num_inference_steps: Input should be greater than or equal to 2"),
        ("x --ci a.png --l 4", "--l is not used here: validation.guidance_scale"),
        ("x --ci a.png --fs 2.2", "--fs is not used here: the schedule"),
        ("x --ci a.png --W 64", "--W is not used here: known are --ci --w --h --d --s --n"),
        ("x --ci a.png --width=64", "--width=64 is not used here"),
    ],
)
def test_a_line_that_is_refused(workspace: Workspace, line: str, fault: str) -> None:
    with pytest.raises(DataError, match=r"^p\.txt line 2: " + fault):
        read(workspace, f"fine --ci a.png\n{line}\n")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "is no JSON"),
        ("[" * 100_000, "is no JSON"),
        ("[1]", "is no JSON object"),
        ('{"prompt": "x"}', "images: Field required"),
        ('{"prompt": "x", "prompt": "y", "images": ["a.png"]}', "a key comes twice"),
        ('{"prompt": "x", "images": ["a.png"], "width": 64}', "width: Extra inputs"),
        ('{"prompt": "x", "images": ["a.png"], "seed": "7"}', "seed: Input should be a valid integer"),
        ('{"prompt": "x", "images": ["gone.png"]}', "no image at"),
    ],
)
def test_a_json_line_that_is_refused(workspace: Workspace, line: str, fault: str) -> None:
    with pytest.raises(DataError, match=r"^p\.jsonl line 1: " + fault):
        read(workspace, line, name="p.jsonl")


def test_a_file_that_is_absent_or_no_utf8(workspace: Workspace) -> None:
    asked = config(prompt_file="p.txt")
    with pytest.raises(DataError, match=r"p\.txt can't be read: No such file"):
        prompts.prompts_of(asked, workspace)
    (workspace.root / "p.txt").write_bytes("x é".encode("latin-1"))
    with pytest.raises(DataError, match=r"p\.txt is no UTF-8 at byte 2"):
        prompts.prompts_of(asked, workspace)


def test_sizes_must_be_multiples_of_the_familys(workspace: Workspace) -> None:
    found = read(workspace, "x --ci a.png --w 64 --h 48\ny --ci a.png --w 64 --h 100")
    prompts.refuse_broken_sizes(found[:1], 16)
    with pytest.raises(DataError, match=r"p\.txt line 2: size 100 x 64 .*multiples of 16") as caught:
        prompts.refuse_broken_sizes(found, 16)
    assert caught.value.remedy == "write height 96, width 64"


def test_gathered_has_all_of_them_in_one_list(workspace: Workspace) -> None:
    (workspace.root / "p.txt").write_text("x --ci a.png --w 64 --h 48", encoding="utf-8")
    whole = prompts.gathered(config(prompt_file="p.txt", samples=[OWN], seed=3), workspace)
    assert [(s.prompt, s.size) for s in whole.validation.samples] == [("own", None), ("x", (48, 64))]
    assert (whole.validation.prompt_file, whole.validation.seed) == (None, 3)


WORDS = st.text(
    st.characters(codec="utf-8", exclude_characters="\r\n", exclude_categories=("Cs",)), max_size=30
)


@given(words=WORDS)
def test_any_line_is_read_or_refused_by_its_number(
    tmp_path_factory: pytest.TempPathFactory, words: str
) -> None:
    root = tmp_path_factory.getbasetemp() / "any"
    root.mkdir(exist_ok=True)
    (root / "a.png").touch()
    (root / "p.txt").write_bytes(f"x {words} --ci a.png".encode())
    try:
        (found,) = prompts.prompts_of(config(prompt_file="p.txt"), Workspace(root))
    except DataError as error:
        assert error.message.startswith("p.txt line 1: ") and "--" in words
    else:
        assert found.asked.prompt.startswith("x") and found.asked.images[-1] == "a.png"
