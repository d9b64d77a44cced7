"""The files of a checkpoint, however it was given; and the same identity as the trainer's."""

import json
from pathlib import Path

import pytest

from gates.checkpoint_files import files_of
from gates.evidence import MissingEvidenceError, files_fingerprint


def make(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(name.encode())


SHARDS = ("w-00001-of-00002.safetensors", "w-00002-of-00002.safetensors")
ONE = "diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("model", [ONE, "config.json"]),
        ("model/transformer", [ONE, "config.json"]),
        (f"model/transformer/{ONE}", [ONE]),
        (f"shards/{SHARDS[1]}", list(SHARDS)),
        ("shards/w.safetensors.index.json", list(SHARDS)),
        ("bare", ["a.safetensors"]),
    ],
)
def test_files(tmp_path: Path, given: str, expected: list[str]) -> None:
    make(tmp_path / "model" / "transformer", ONE, "config.json")
    make(tmp_path / "shards", *SHARDS)
    index = json.dumps({"weight_map": {"x": SHARDS[1], "y": SHARDS[0]}})
    (tmp_path / "shards" / "w.safetensors.index.json").write_text(index, encoding="utf-8")
    make(tmp_path / "bare", "a.safetensors", "notes.txt")
    assert [path.name for path in files_of(tmp_path / given, given)] == expected


@pytest.mark.parametrize("given", ["gone.safetensors", "shards/w-00001-of-00002.safetensors", "empty"])
def test_absent_files_are_named(tmp_path: Path, given: str) -> None:
    make(tmp_path / "shards", SHARDS[0])
    make(tmp_path / "empty")
    with pytest.raises(MissingEvidenceError, match="has no "):
        files_of(tmp_path / given, given)


def test_identity_is_that_of_the_trainer(tmp_path: Path) -> None:
    from runtime import files

    make(tmp_path, *SHARDS)
    paths = [tmp_path / name for name in SHARDS]
    assert files_fingerprint(paths) == files.files_fingerprint(paths)
