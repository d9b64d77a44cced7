import json
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.data.sample import Found, Scan, Settings
from runtime.data.sources import opening
from runtime.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Columns:
    image: str | None
    controls: tuple[str, ...]
    mask: str | None
    caption: str | None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the reader of archives was asked for; it finds one sample in one archive."""
    made: list[Any] = []

    def open_archive(kind: str, path: Path, into: Path, columns: Columns) -> Scan:
        made.append((kind, path, into, columns))
        found = Found(id="a", target=into / "a.png", controls=(), mask=None, caption=None, text="x")
        return Scan(samples=(found,), dropped=(), files=(path / "part.bin",))

    module = SimpleNamespace(Columns=Columns, open_archive=open_archive)
    monkeypatch.setitem(sys.modules, "runtime.data.sources.archives", module)
    monkeypatch.setattr("runtime.data.sources.archives", module, raising=False)
    return made


def fill(root: Path, *names: str) -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"image_path": "a.png", "caption": "x"}\n' if name.endswith(".jsonl") else "")


PAIRS = ("training_images/a.png", "training_images/a.txt", "control_images/a.png")
FOLDERS = [
    (PAIRS, "folders"),
    (("dataset_dict.json",), "huggingface"),
    (("dataset_info.json", "state.json"), "huggingface"),
    (("dataset_dict.json", "train/x.parquet", *PAIRS), "huggingface"),
    (("x.parquet", "readme.md"), "parquet"),
    (("X.PARQUET",), "parquet"),
    (("data/train-0.parquet",), "parquet"),
    (("a.tar", "b.tar"), "webdataset"),
    (("a.tar", "x.parquet"), "parquet"),
    (("backup.tar", *PAIRS), "folders"),
    (("x.parquet", *PAIRS), "folders"),
    (("deeper/x.parquet", "data/notes.txt", *PAIRS), "folders"),
    (("dataset_info.json", *PAIRS), "folders"),
]


@pytest.mark.parametrize(("files", "layout"), FOLDERS)
def test_the_kind_of_a_folder(tmp_path: Path, calls: list[Any], files: tuple[str, ...], layout: str) -> None:
    root = tmp_path / "data"
    fill(root, *files)
    found = opening.open_dataset(root, tmp_path / "imports")
    assert (found.layout, found.opened[0].kind, found.opened[0].name) == (layout, layout, "dataset")
    assert [call[0] for call in calls] == ([] if layout == "folders" else [layout])
    archived = any(
        Path(name).suffix.lower() in (".parquet", ".tar") and name.count("/") == 0 for name in files
    )
    assert bool(found.warnings) == (layout == "folders" and archived)


def test_the_recipes_folder_is_used_in_place(tmp_path: Path) -> None:
    fill(tmp_path / "data", *PAIRS)
    found = opening.open_dataset(tmp_path / "data", tmp_path / "imports")
    opened = found.opened[0]
    assert [item.id for item in opened.scan.samples] == ["a"]
    assert (opened.root, opened.archives, opened.settings) == ((tmp_path / "data").resolve(), (), Settings())
    assert (found.file, found.holdout, found.cache_directories) == (None, None, ())
    assert not (tmp_path / "imports").exists()


@pytest.mark.parametrize(("name", "layout"), [("m.jsonl", "jsonl"), ("M.JSONL", "jsonl"), ("m.csv", "csv")])
def test_a_manifest(tmp_path: Path, name: str, layout: str) -> None:
    fill(tmp_path, "a.png")
    text = "image_path,caption\na.png,x\n" if layout == "csv" else '{"image_path": "a.png", "caption": "x"}'
    (tmp_path / name).write_text(text)
    found = opening.open_dataset(tmp_path / name, tmp_path / "imports")
    opened = found.opened[0]
    assert (found.layout, opened.kind, opened.name) == (layout, layout, "dataset")
    assert opened.root == tmp_path.resolve()
    assert opened.scan.files == (tmp_path.resolve() / name,)
    assert [item.text for item in opened.scan.samples] == ["x"]


@pytest.mark.parametrize(("name", "layout"), [("x.parquet", "parquet"), ("x.TAR", "webdataset")])
def test_an_archive_is_unpacked_below_the_imports(
    tmp_path: Path, calls: list[Any], name: str, layout: str
) -> None:
    fill(tmp_path, name)
    found = opening.open_dataset(tmp_path / name, tmp_path / "imports")
    into = (tmp_path / "imports").resolve() / "dataset"
    assert calls == [
        (layout, tmp_path / name, into, Columns(image=None, controls=(), mask=None, caption=None))
    ]
    opened = found.opened[0]
    assert (found.layout, opened.kind, opened.root) == (layout, layout, into)
    assert opened.archives == opened.scan.files == (tmp_path / name / "part.bin",)


def test_a_dataset_file_with_every_kind(tmp_path: Path, calls: list[Any]) -> None:
    fill(tmp_path, *(f"recipe/{name}" for name in PAIRS), "img/a.png", "img/a.cap", "ctl/a_0.png")
    fill(tmp_path, "list/m.jsonl", "list/a.png", "p.parquet", "w/x.tar", "h/dataset_dict.json", "c/a.png")
    (tmp_path / "c" / "m.csv").write_text("image_path,caption\na.png,x\n")
    (tmp_path / "d.toml").write_text("""
[general]
caption_extension = ".cap"
holdout = 2
num_repeats = 3
[[datasets]]
image_directory = "img"
control_directory = "ctl"
cache_directory = "cache"
[[datasets]]
image_directory = "img"
[[datasets]]
folder = "recipe"
[[datasets]]
image_jsonl_file = "list/m.jsonl"
repeats = 0
[[datasets]]
csv_file = "c/m.csv"
[[datasets]]
parquet = "p.parquet"
caption_key = "t"
control_keys = ["i", "j"]
image_key = "o"
mask_key = "m"
[[datasets]]
webdataset = "w"
[[datasets]]
name = "hub"
huggingface = "h"
""")
    found = opening.open_dataset(tmp_path / "d.toml", tmp_path / "imports")
    root, imports = tmp_path.resolve(), (tmp_path / "imports").resolve()
    assert [(item.name, item.kind, item.root) for item in found.opened] == [
        ("img", "directory", root),
        ("img-2", "directory", root / "img"),
        ("recipe", "folders", root / "recipe"),
        ("m", "jsonl", root / "list"),
        ("m-2", "csv", root / "c"),
        ("p", "parquet", imports / "p"),
        ("w", "webdataset", imports / "w"),
        ("hub", "huggingface", imports / "hub"),
    ]
    assert [len(item.scan.samples[0].controls) for item in found.opened[:4]] == [1, 0, 1, 0]
    assert [item.settings.views for item in found.opened] == [3, 3, 3, 1, 3, 3, 3, 3]
    assert calls[0][3] == Columns(image="o", controls=("i", "j"), mask="m", caption="t")
    assert calls[1][3] == Columns(image=None, controls=(), mask=None, caption=None)
    assert (found.layout, found.file, found.holdout) == ("toml", tmp_path / "d.toml", 2)
    assert found.cache_directories == ("cache",)
    assert found.warnings == ()
    for item in found.opened:
        for sample in item.scan.samples:
            for path in (sample.target, *sample.controls, *([sample.caption] if sample.caption else [])):
                assert path.is_relative_to(item.root)


def test_a_json_dataset_file(tmp_path: Path) -> None:
    fill(tmp_path, "img/a.png", "img/a.txt")
    (tmp_path / "d.json").write_text(json.dumps({"datasets": [{"image_directory": "img"}]}))
    found = opening.open_dataset(tmp_path / "d.json", tmp_path / "imports")
    assert (found.layout, found.opened[0].name) == ("toml", "img")


def test_what_fails_in_a_dataset_file_says_which_source(tmp_path: Path) -> None:
    (tmp_path / "d.toml").write_text('[[datasets]]\nname = "faces"\nimage_directory = "gone"\n')
    with pytest.raises(DataError, match=r"^d\.toml, faces: image_directory .*gone is not a folder") as caught:
        opening.open_dataset(tmp_path / "d.toml", tmp_path / "imports")
    assert caught.value.remedy == "mend image_directory in the dataset file, then finetune dataset"


@pytest.mark.parametrize(
    ("name", "seen"),
    [
        ("nowhere", "saw nothing there"),
        ("nowhere.jsonl", "saw nothing there"),
        ("a.zip", "saw a file .zip there"),
        ("README", "saw a file without suffix there"),
        ("a.tar.gz", "saw a file .gz there"),
        ("a.png", "saw a file .png there"),
    ],
)
def test_anything_else_is_refused_with_what_is_accepted(tmp_path: Path, name: str, seen: str) -> None:
    fill(tmp_path, "a.zip", "README", "a.tar.gz", "a.png")
    with pytest.raises(DataError, match=seen) as caught:
        opening.open_dataset(tmp_path / name, tmp_path / "imports")
    assert caught.value.message.endswith(opening.ACCEPTED)


def test_a_plain_folder_of_pictures_is_shown_what_to_write(tmp_path: Path) -> None:
    fill(tmp_path / "pairs", "a.png", "a.txt")
    with pytest.raises(DataError, match="no folder of targets") as caught:
        opening.open_dataset(tmp_path / "pairs", tmp_path / "imports")
    assert caught.value.remedy.endswith('\n[[datasets]]\nimage_directory = "pairs"')
