"""Datasets that come as archives, unpacked once into plain files; every later reader works on those.

    <into>/training_images/<id>.<ext>              target, its bytes as they are in the archive
    <into>/training_images/<id>.txt                caption, UTF-8
    <into>/control_images/<id>.<ext>               first control; <id>_control_<N>.<ext>: the further ones
    <into>/control_images/<id>_mask.<ext>          mask
    <into>/import.json                             what was unpacked from what; written last

While `import.json` describes the archives and files as they are, nothing is unpacked again.
"""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from runtime import files
from runtime.data.sample import Found, Kind, Note, Scan
from runtime.data.sources.rows import Archive, Columns
from runtime.data.sources.unpacking import JOURNAL, Unpacker, found_of, is_ours, journal_of
from runtime.errors import DataError

__all__ = ["Columns", "open_archive"]

RECORD = "import.json"
SCHEMA = "import/1"

Facts = dict[str, Any]
"""A file that was read: its name relative to the archive's folder, size, mtime_ns, sha256."""


def open_archive(kind: Kind, path: Path, into: Path, columns: Columns) -> Scan:
    """The samples of `path`, a file or a folder, as files under `into`.

    `columns`: what the dataset file says; the rest is found by its name (`rows`, `webdataset`). A row that can't
    be used is in `dropped`. Raises DataError where the archive can't be read at all, where it is open which
    columns are meant, or where a package is missing.
    """
    if not path.exists():
        raise DataError(f"the dataset {path} doesn't exist", remedy="mend its path, then finetune dataset")
    # Not resolved: the hub keeps files as links to names that say nothing.
    archive = _open(kind, path.absolute(), columns)
    wanted = {
        "schema": SCHEMA,
        "kind": kind,
        "columns": asdict(columns) | {"controls": list(columns.controls)},
    }
    old = _read(into)
    if (into / RECORD).is_file() and (scan := _unchanged(into, old, archive, wanted)) is not None:
        (into / JOURNAL).unlink(missing_ok=True)
        return scan
    unpacked, facts = _unpack(archive, into, frozenset((*_made(old), *journal_of(into))))
    record = wanted | facts | _described(unpacked)
    files.write_json(into / RECORD, record)
    (into / JOURNAL).unlink(missing_ok=True)
    return _scan(into, archive, record)


def _open(kind: Kind, path: Path, columns: Columns) -> Archive:
    from runtime.data.sources import tables, webdataset

    if kind == "huggingface":
        return tables.open_saved(path, columns)
    if kind == "parquet":
        return tables.open_parquet(path, columns)
    if kind == "webdataset":
        return webdataset.open_shards(path, columns)
    raise DataError(f"{path}: {kind} is no archive", remedy="use huggingface, parquet or webdataset")


def _unpack(archive: Archive, into: Path, ours: frozenset[str]) -> tuple[Unpacker, dict[str, list[Facts]]]:
    before = [_facts(archive.root, path) for path in archive.files]
    with Unpacker(into=into, ours=ours) as unpacker:
        # From here on the folder is neither the old state nor the new one.
        (into / RECORD).unlink(missing_ok=True)
        unpacker.take(archive.rows())
    for path, fact in zip(archive.files, before, strict=True):
        fact["sha256"] = files.file_digest(path)
        if {**_facts(archive.root, path), "sha256": fact["sha256"]} != fact:
            raise DataError(f"{path} was changed while it was read", remedy="finetune dataset")
    unpacker.remove_unwanted()
    beside = [_facts(archive.root, path) | {"sha256": files.file_digest(path)} for path in unpacker.read]
    return unpacker, {"archives": before, "beside": beside}


def _facts(root: Path, path: Path) -> Facts:
    stat = path.stat()
    return {"name": path.relative_to(root).as_posix(), "size": stat.st_size, "mtime_ns": stat.st_mtime_ns}


def _described(unpacked: Unpacker) -> dict[str, Any]:
    def places(found: Found) -> Iterator[str]:
        for path in (found.target, *found.controls, found.mask, found.caption):
            if path is not None:
                yield path.relative_to(unpacked.into).as_posix()

    samples = sorted(unpacked.samples, key=lambda found: found.id)
    return {
        "samples": [
            {"id": found.id, "files": list(places(found)), "mask": found.mask is not None}
            for found in samples
        ],
        "files": unpacked.sizes,
        "dropped": [asdict(note) for note in unpacked.dropped],
        "warnings": [asdict(note) for note in unpacked.warnings],
    }


def _read(into: Path) -> dict[str, Any]:
    """The record of an earlier unpacking; empty where there is none, or none that can be read."""
    try:
        record = files.read_json(into / RECORD)
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) and record.get("schema") == SCHEMA else {}


def _made(record: dict[str, Any]) -> Iterator[str]:
    yield from (name for name in record.get("files", ()) if is_ours(name))


def _unchanged(into: Path, record: dict[str, Any], archive: Archive, wanted: dict[str, Any]) -> Scan | None:
    """What `record` holds, if it is of these archives and the files that it lists are there."""
    if not wanted.items() <= record.items():
        return None
    names = [path.relative_to(archive.root).as_posix() for path in archive.files]
    if names != [fact["name"] for fact in record["archives"]]:
        return None
    if not all(_size(into / name) == size for name, size in record["files"].items()):
        return None
    now: dict[str, list[Facts]] = {}
    for part in ("archives", "beside"):
        same = [_same(archive.root, fact) for fact in record[part]]
        if None in same:
            return None
        now[part] = [fact for fact in same if fact is not None]
    if (
        not now.items() <= record.items()
    ):  # copied or touched, with the same content: no hashing the next time
        record = record | now
        files.write_json(into / RECORD, record)
    return _scan(into, archive, record)


def _same(root: Path, fact: Facts) -> Facts | None:
    """`fact` as the file is now; None where its content is another."""
    path = root / fact["name"]
    if _size(path) != fact["size"]:
        return None
    now = _facts(root, path)
    if now["mtime_ns"] == fact["mtime_ns"] or files.file_digest(path) == fact["sha256"]:
        return now | {"sha256": fact["sha256"]}
    return None


def _size(path: Path) -> int | None:
    return path.stat().st_size if path.is_file() else None


def _scan(into: Path, archive: Archive, record: dict[str, Any]) -> Scan:
    samples = (
        found_of(into, sample["id"], sample["files"], masked=sample["mask"]) for sample in record["samples"]
    )
    notes = {part: tuple(Note(**note) for note in record[part]) for part in ("dropped", "warnings")}
    beside = (archive.root / fact["name"] for fact in record["beside"])
    return Scan(
        samples=tuple(samples),
        dropped=notes["dropped"],
        warnings=archive.warnings + notes["warnings"],
        files=(*archive.files, *beside),
    )
