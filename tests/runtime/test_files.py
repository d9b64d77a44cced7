"""Files appear whole; digests are those that both sides of the contract agree on."""

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from runtime import files

VECTORS = Path(__file__).parents[2] / "schemas" / "vectors" / "digests.json"
CASES = json.loads(VECTORS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES["documents"], ids=lambda case: case["canonical"][:30])
def test_document_digests(case: dict[str, Any]) -> None:
    assert files.canonical_json(case["value"]).decode("utf-8") == case["canonical"]
    assert files.document_digest(case["value"]) == case["digest"]


@pytest.mark.parametrize("case", CASES["fingerprints"], ids=lambda case: case["name"])
def test_weights_fingerprints(case: dict[str, Any], tmp_path: Path) -> None:
    for name, content in case["files"].items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content["text"].encode("utf-8") * content["times"])
    assert files.weights_fingerprint(tmp_path) == case["digest"]


@pytest.mark.parametrize("case", CASES["datasets"], ids=lambda case: case["name"])
def test_dataset_digests(case: dict[str, Any]) -> None:
    from runtime.data import manifest

    envelope = {"layout": "folders", "root": "d", "dataset_file": None, "holdout_rule": ""}
    rest = {"dropped": [], "warnings": [], "dataset_digest": ""}
    source = {"kind": "folders", "root": "d", "origin": "d", "files": [], "dropped": 0}
    sources = [{**source, **listed} for listed in case["sources"]]
    found = manifest.Manifest.from_json({**envelope, **rest, "sources": sources, "samples": case["samples"]})
    assert manifest.dataset_digest(found.samples, found.sources) == case["digest"]


def sparse(path: Path, size: int, places: dict[int, bytes]) -> None:
    with path.open("wb") as handle:
        handle.truncate(size)
        for offset, data in places.items():
            handle.seek(offset)
            handle.write(data)


def test_a_large_file_is_told_by_its_size_and_three_pieces(tmp_path: Path) -> None:
    size = files.SAMPLED_ABOVE + 3
    seen = set()
    for places in ({}, {0: b"x"}, {size // 2: b"x"}, {size - 1: b"x"}):
        sparse(tmp_path / "w.safetensors", size, places)
        seen.add(files.weights_fingerprint(tmp_path))
    sparse(tmp_path / "w.safetensors", size + 1, {})
    seen.add(files.weights_fingerprint(tmp_path))
    assert len(seen) == 5
    sparse(tmp_path / "w.safetensors", size, {size // 4: b"x"})  # between the pieces
    assert files.weights_fingerprint(tmp_path) in seen


def test_names_count_and_empty_folders_do_not(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x").write_bytes(b"1")
    before = files.weights_fingerprint(tmp_path)
    (tmp_path / "empty").mkdir()
    assert files.weights_fingerprint(tmp_path) == before
    (tmp_path / "a" / "x").rename(tmp_path / "a" / "y")
    assert files.weights_fingerprint(tmp_path) != before


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {"a": [-float("inf")]}])
def test_no_json_holds_what_is_no_number(value: Any, tmp_path: Path) -> None:
    for write in (files.write_json, files.append_json_line):
        with pytest.raises(ValueError, match="Out of range"):
            write(tmp_path / "x.json", value)
    assert list(tmp_path.iterdir()) == []


def test_json_is_sorted_utf_8_with_lf(tmp_path: Path) -> None:
    files.write_json(tmp_path / "x.json", {"b": "gr\u00fcn", "a": 1})
    assert (tmp_path / "x.json").read_bytes() == '{\n "a": 1,\n "b": "gr\u00fcn"\n}\n'.encode()
    assert files.read_json(tmp_path / "x.json") == {"a": 1, "b": "gr\u00fcn"}


def test_a_failed_write_leaves_the_earlier_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x"
    files.write_text(path, "before")

    def half(temporary: Path) -> None:
        temporary.write_text("aft", encoding="utf-8")
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        files.write_with(path, half)
    assert path.read_text(encoding="utf-8") == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_lies_beside_its_target(tmp_path: Path) -> None:
    """A rename across file systems is a copy."""
    seen: list[Path] = []
    files.write_with(tmp_path / "new" / "x", lambda path: seen.append(path) or path.write_bytes(b"1"))
    assert seen[0].parent == tmp_path / "new" and seen[0].name.startswith(".")


def test_a_rename_that_windows_refuses_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, refused = Path.replace, []

    def replace(self: Path, target: Path) -> Path:
        if len(refused) < 3:
            refused.append(1)
            raise PermissionError
        return original(self, target)

    monkeypatch.setattr(Path, "replace", replace)
    monkeypatch.setattr(files.time, "sleep", lambda seconds: None)
    files.write_text(tmp_path / "x", "1")
    assert (tmp_path / "x").read_text(encoding="utf-8") == "1" and len(refused) == 3
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(PermissionError))
    with pytest.raises(PermissionError):
        files.write_text(tmp_path / "x", "2")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", 0),
        (b'{"a": 1}\n', 1),
        (b'{"a": 1}\n{"a": 2}\n', 2),
        (b'{"a": 1}\n{"a": ', 1),
        (b'{"a": 1}\n{"a": 2}', 1),  # a kill between the text and its line feed
        (b'{"a": 1}\n\n{"a": 2}\n', 2),
    ],
)
def test_lines_that_are_whole(tmp_path: Path, data: bytes, lines: int) -> None:
    (tmp_path / "x.jsonl").write_bytes(data)
    assert [line["a"] for line in files.read_json_lines(tmp_path / "x.jsonl")] == list(range(1, lines + 1))
    assert files.read_json_lines(tmp_path / "absent.jsonl") == []


def test_times_are_utc_with_milliseconds() -> None:
    import re

    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", files.utc_now())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"", b""),
        (b'{"a": 1}\n', b'{"a": 1}\n'),
        (b'{"a": 1}\n{"b"', b'{"a": 1}\n'),
        (b'{"a"', b""),
        (b'{"a": 1}\n' + b"x" * (2**20 + 7), b'{"a": 1}\n'),
    ],
)
def test_a_torn_tail_is_cut_before_a_line_is_added(tmp_path: Path, before: bytes, after: bytes) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(before)
    files.append_json_line(path, {"c": 3})
    assert path.read_bytes() == after + b'{"c": 3}\n'


def hidden(error: OSError) -> RuntimeError:
    """As torch's writer hides what a file told it."""
    outer = RuntimeError("unexpected pos 704 vs 598")
    outer.__context__ = error
    return outer


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (SafetensorError("I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("I/O error: There is not enough space on the disk. (os error 112)"), True),
        (hidden(OSError(errno.ENOSPC, "No space left on device")), True),
        (hidden(OSError(errno.EIO, "Input/output error")), False),
        (OSError(errno.EACCES, "Permission denied"), False),
        (SafetensorError("I/O error: Permission denied (os error 13)"), False),
        (RuntimeError("the answer ends with (os error 28)"), False),
    ],
)
def test_a_full_disk_is_told_from_other_faults(error: Exception, full: bool) -> None:
    assert files.disk_full(error) == full
