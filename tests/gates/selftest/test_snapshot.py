import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from gates.selftest.snapshot import Snapshot


def _files(root: Path) -> dict[str, bytes | None]:
    return {p.relative_to(root).as_posix(): p.read_bytes() if p.is_file() else None for p in root.rglob("*")}


SPOILS: dict[str, Callable[[Path], object]] = {
    "other bytes of the same size": lambda root: (root / "a/one").write_bytes(b"2"),
    "a file is gone": lambda root: (root / "a/one").unlink(),
    "a folder is gone": lambda root: shutil.rmtree(root / "a"),
    "an empty folder is gone": lambda root: (root / "empty").rmdir(),
    "a file more": lambda root: (root / "a/two").write_bytes(b""),
    "a folder more": lambda root: shutil.copytree(root / "a", root / "b" / "c"),
    "a folder has another name": lambda root: (root / "a").rename(root / "z"),
    "a file became a folder": lambda root: ((root / "a/one").unlink(), (root / "a/one").mkdir()),
    "a folder became a file": lambda root: (shutil.rmtree(root / "a"), (root / "a").write_bytes(b"")),
    "a link out": lambda root: (root / "link").symlink_to(root.parent),
    "a folder became a link": lambda root: (shutil.rmtree(root / "a"), (root / "a").symlink_to("empty")),
}


@pytest.mark.parametrize("name", SPOILS)
def test_restored(name: str, tmp_path: Path) -> None:
    root = tmp_path / "ws"
    (root / "a").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "a/one").write_bytes(b"1")
    before, snapshot = _files(root), Snapshot(root)
    SPOILS[name](root)
    assert _files(root) != before
    snapshot.restore()
    assert _files(root) == before and not any(path.is_symlink() for path in root.rglob("*"))
