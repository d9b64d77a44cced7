"""Whatever lies at the dataset's path -> its sources, opened.

    a folder    dataset_dict.json, or dataset_info.json and state.json    a saved Hugging Face dataset
                *.parquet in it or in data/                               parquet
                *.tar                                                     WebDataset shards
                training_images/ and control_images/                      the recipe's layout
    a file      .jsonl .csv .parquet .tar, and .toml or .json for several sources

Archives are unpacked below the folder of imports; all else is used in place.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runtime.data.sample import Note, Opened, Scan
from runtime.data.sources import dataset_file, directory, layout, listing, names
from runtime.data.sources.dataset_file import Entry
from runtime.data.sources.dataset_keys import ARCHIVES
from runtime.errors import DataError

Layout = Literal["folders", "jsonl", "csv", "huggingface", "parquet", "webdataset", "toml"]

SINGLE = "dataset"
"""Name of the source of a dataset that has one only."""
ACCEPTED = (
    "a folder with training_images/ and control_images/, a Hugging Face dataset saved to disk, a folder of "
    "*.parquet or *.tar files, or a file .jsonl, .csv, .parquet, .tar, .toml or .json"
)
_FILES: dict[str, Literal["jsonl", "csv", "parquet", "webdataset"]] = {
    ".jsonl": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
    ".tar": "webdataset",
}
_Folder = Literal["folders", "huggingface", "parquet", "webdataset"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dataset:
    layout: Layout
    opened: tuple[Opened, ...]
    file: Path | None = None
    """The dataset file, where there is one."""
    holdout: int | None = None
    """Samples to set aside, as the dataset file says."""
    cache_directories: tuple[str, ...] = ()
    warnings: tuple[Note, ...] = ()


def open_dataset(path: Path, imports: Path) -> Dataset:
    """Raises DataError that names what was seen and what is accepted.

    `imports`: folder that archives are unpacked into, one folder below it for each source.
    """
    imports = imports.resolve()
    if path.is_dir():
        kind, warnings = _folder_kind(path)
        entry = Entry(name=SINGLE, kind=kind, path=path)
        return Dataset(layout=kind, opened=(_open(entry, imports),), warnings=warnings)
    suffix = path.suffix.lower()
    if path.is_file() and suffix in dataset_file.SUFFIXES:
        return _open_file(path, imports)
    if path.is_file() and suffix in _FILES:
        listed = _FILES[suffix]
        return Dataset(layout=listed, opened=(_open(Entry(name=SINGLE, kind=listed, path=path), imports),))
    seen = f"a file {suffix or 'without suffix'}" if path.exists() else "nothing"
    raise DataError(f"{path}: saw {seen} there; expected {ACCEPTED}", remedy="finetune init --dataset PATH")


def _open_file(path: Path, imports: Path) -> Dataset:
    described = dataset_file.read(path)
    opened = []
    for entry in described.entries:
        try:
            opened.append(_open(entry, imports))
        except DataError as error:
            raise DataError(f"{path.name}, {entry.name}: {error.message}", remedy=error.remedy) from error
    return Dataset(
        layout="toml",
        opened=tuple(opened),
        file=path,
        holdout=described.holdout,
        cache_directories=described.cache_directories,
        warnings=described.warnings,
    )


def _folder_kind(folder: Path) -> tuple[_Folder, tuple[Note, ...]]:
    if (folder / "dataset_dict.json").is_file():
        return "huggingface", ()
    if (folder / "dataset_info.json").is_file() and (folder / "state.json").is_file():
        return "huggingface", ()
    entries = names.listed(folder)
    archived: _Folder | None = None
    if _has(entries, ".parquet") or _has(entries, "data", ".parquet"):
        archived = "parquet"
    elif _has(entries, ".tar"):
        archived = "webdataset"
    if archived is None or not layout.recognised(folder):
        return archived or "folders", ()
    # A backup in the folder must not take the place of the pictures.
    reason = f"{archived} files lie here too and are not read: the folder of targets goes first"
    return "folders", (Note(path=".", reason=reason),)


def _has(entries: list[Path], *way: str) -> bool:
    """True where a file with the last of `way` as suffix lies among `entries`, or in the folder named first."""
    *folders, suffix = way
    if folders:
        entries = [
            item
            for entry in entries
            if entry.name == folders[0] and entry.is_dir()
            for item in names.listed(entry)
        ]
    return any(entry.suffix.lower() == suffix and entry.is_file() for entry in entries)


def _open(entry: Entry, imports: Path) -> Opened:
    if entry.kind in ARCHIVES:
        into = imports / entry.name
        scan = _unpack(entry, into)
        return _opened(entry, into, scan, archives=scan.files)
    if entry.kind == "directory":
        scan = directory.scan(entry.path, entry.controls, entry.caption_extension)
        return _opened(entry, directory.common_root(entry.path, entry.controls), scan)
    if entry.kind == "folders":
        return _opened(entry, entry.path.resolve(), layout.scan(entry.path))
    return _opened(entry, entry.path.parent.resolve(), listing.scan(entry.path))


def _unpack(entry: Entry, into: Path) -> Scan:
    from runtime.data.sources import archives

    columns = archives.Columns(
        image=entry.image_key, controls=entry.control_keys, mask=entry.mask_key, caption=entry.caption_key
    )
    return archives.open_archive(entry.kind, entry.path, into, columns)


def _opened(entry: Entry, root: Path, scan: Scan, archives: tuple[Path, ...] = ()) -> Opened:
    return Opened(
        name=entry.name, kind=entry.kind, root=root, scan=scan, settings=entry.settings, archives=archives
    )
