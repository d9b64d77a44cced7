"""What is remembered of a file, and when it is read again."""

import os
import time
from pathlib import Path

import pytest

from runtime import files
from runtime.index import SETTLED_NS, Index

LONG_AGO = 1_000_000_000


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files whose bytes were read, in order."""
    found: list[str] = []
    original = files.file_digest

    def digest(path: Path) -> str:
        found.append(path.name)
        return original(path)

    monkeypatch.setattr(files, "file_digest", digest)
    return found


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.bin"
    write(path, b"abc")
    return path


def write(path: Path, data: bytes, when: float = LONG_AGO) -> None:
    path.write_bytes(data)
    os.utime(path, (when, when))


def test_same_size_and_time_is_not_read_again(file: Path, tmp_path: Path, read: list[str]) -> None:
    index = Index.open(tmp_path / "index.json")
    first = index.digest(file, "a")
    assert index.digest(file, "a") == first == files.file_digest(file)
    assert read == ["a.bin", "a.bin"]  # one of them is this test's own
    index.save()
    assert Index.open(tmp_path / "index.json").digest(file, "a") == first
    assert len(read) == 2


@pytest.mark.parametrize(
    ("data", "when"),
    [
        (b"xyz", LONG_AGO + 1),  # equal size, other time
        (b"abc", LONG_AGO + 1),
        (b"abcd", LONG_AGO),  # equal time, other size
    ],
)
def test_other_size_or_time_is_read(
    file: Path, tmp_path: Path, read: list[str], data: bytes, when: float
) -> None:
    index = Index.open(tmp_path / "index.json")
    index.digest(file, "a")
    write(file, data, when)
    assert index.get(file, "a") == {}
    found = index.digest(file, "a")
    assert read == ["a.bin", "a.bin"]
    assert found == files.file_digest(file)


def test_equal_size_and_a_time_put_back_is_the_known_limit(file: Path, tmp_path: Path) -> None:
    index = Index.open(tmp_path / "index.json")
    before = index.digest(file, "a")
    write(file, b"xyz")
    assert index.digest(file, "a") == before


@pytest.mark.parametrize(("age_s", "reads"), [(0.5, 2), (-60.0, 2), (SETTLED_NS / 1e9 + 1, 1)])
def test_what_changed_a_moment_ago_is_not_remembered(
    file: Path, tmp_path: Path, read: list[str], age_s: float, reads: int
) -> None:
    """It may change again within the grain of its clock; so may a file from the future."""
    write(file, b"abc", time.time() - age_s)
    index = Index.open(tmp_path / "index.json")
    index.digest(file, "a")
    index.digest(file, "a")
    assert len(read) == reads
    index.save()
    assert (tmp_path / "index.json").exists() == (reads == 1)


def test_a_file_that_changes_while_it_is_read_is_not_remembered(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = Index.open(tmp_path / "index.json")
    original = files.file_digest

    def digest(path: Path) -> str:
        found = original(path)
        write(path, b"other", LONG_AGO + 5)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(files, "file_digest", digest)
        index.digest(file, "a")
    assert index.facts == {}
    assert index.digest(file, "a") == original(file)


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b"[1, 2]", b'{"a": 3}', b"\xff\xfe", b'{"a": {"size": 3, "sha256": "0"}}']
)
def test_a_damaged_index_is_ignored(file: Path, tmp_path: Path, damage: bytes) -> None:
    (tmp_path / "index.json").write_bytes(damage)
    index = Index.open(tmp_path / "index.json")
    assert index.digest(file, "a") == files.file_digest(file)
    index.save()
    assert Index.open(tmp_path / "index.json").facts["a"]["sha256"] == files.file_digest(file)


def test_a_file_that_is_gone(tmp_path: Path, file: Path) -> None:
    index = Index.open(tmp_path / "index.json")
    index.digest(file, "a")
    file.unlink()
    with pytest.raises(FileNotFoundError):
        index.digest(file, "a")


def test_nothing_new_writes_nothing(file: Path, tmp_path: Path) -> None:
    index = Index.open(tmp_path / "index.json")
    index.digest(file, "a")
    index.save()
    before = (tmp_path / "index.json").stat().st_mtime_ns
    index.digest(file, "a")
    index.save()
    assert (tmp_path / "index.json").stat().st_mtime_ns == before


def test_names_are_apart(file: Path, tmp_path: Path) -> None:
    index = Index.open(tmp_path / "index.json")
    other = tmp_path / "b.bin"
    write(other, b"xyz")
    assert index.digest(file, "a") != index.digest(other, "b")
    index.put(file, "a", 3, LONG_AGO * 10**9, {"width": 7})
    assert index.get(file, "a") == {"size": 3, "mtime_ns": LONG_AGO * 10**9, "width": 7}
