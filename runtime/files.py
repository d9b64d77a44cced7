"""Reading, writing and naming files, the one way that the whole runtime does it.

A file appears whole or not at all: temporary file in the same folder, fsync, rename.
Digests are those of `schemas/README.md`.
"""

import errno
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

SAMPLED_ABOVE = 64 * 2**20  # bytes; hashing 54 GB of weights takes minutes, three MiB of each file do not
PIECE = 2**20
FULL = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))  # Windows has no quota of that name
FULL_IN_RUST = ("(os error 28)", "(os error 122)", "(os error 112)")  # safetensors: Linux, its quota, Windows
MIB, GIB = 2**20, 2**30


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def canonical_json(value: Any) -> bytes:
    """The bytes whose SHA-256 is the document digest of `value`. Raises ValueError on NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def document_digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """Identity of a component folder; files above 64 MiB by three sampled pieces."""
    entries = {
        path.relative_to(folder).as_posix(): _identity(path)
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    return document_digest(entries)


def files_fingerprint(paths: Iterable[Path]) -> str:
    """Identity of single files by their names: that of a folder which holds just them."""
    return document_digest({path.name: _identity(path) for path in paths})


def _identity(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size <= SAMPLED_ABOVE:
        return {"size": size, "sha256": file_digest(path)}
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        for offset in (0, size // 2, size - PIECE):
            handle.seek(offset)
            digest.update(handle.read(PIECE))
    return {"size": size, "sha256": digest.hexdigest(), "sampled": True}


def write_bytes(path: Path, data: bytes) -> None:
    write_with(path, lambda temporary: temporary.write_bytes(data))


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    text = json.dumps(value, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False)
    write_text(path, text + "\n")


def write_with(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def sync(path: Path) -> None:
    with path.open("rb+") as handle:
        os.fsync(handle.fileno())


def rename(source: Path, target: Path) -> None:
    """Rename, over `target` where that is a file; Windows refuses while a scanner holds it, for a moment."""
    for attempt in range(20):
        try:
            source.replace(target)
            return
        except PermissionError:
            if attempt == 19:
                raise
            time.sleep(0.05)


def disk_full(error: BaseException) -> bool:
    """Whether a write failed for want of room; torch hides that behind an error of its own."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in FULL:
            return True
        if type(seen).__name__ == "SafetensorError" and str(seen).endswith(FULL_IN_RUST):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def append_json_line(path: Path, value: Any) -> None:
    """One complete line in one write, so that a kill can tear at most the last one; such a tail is cut off."""
    line = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    with path.open("ab+") as handle:
        _cut_torn_tail(handle)
        handle.write(line.encode("utf-8"))


def _cut_torn_tail(handle: BinaryIO) -> None:
    end = handle.seek(0, os.SEEK_END)
    place = end
    while place > 0:
        start = max(0, place - PIECE)
        handle.seek(start)
        newline = handle.read(place - start).rfind(b"\n")
        if newline >= 0:
            place = start + newline + 1
            break
        place = start
    if place < end:
        handle.truncate(place)
    handle.seek(0, os.SEEK_END)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """All whole lines; a torn last one, left by a kill, is passed over."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1] if line.strip()]
