"""Tables with pictures in them: folders that Hugging Face `datasets` saved, and parquet files.

A picture is a struct {bytes, path}, as `datasets` writes it, or plain bytes; controls may be a list of them.
Rows are read a few at a time, as Arrow holds them: no picture is decoded, no code of a dataset runs, nothing is
fetched.
"""

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import files
from runtime.data.sample import Note
from runtime.data.sources.cells import Pictures, element, inside, is_picture, is_text, is_whole, name_of
from runtime.data.sources.names import listed
from runtime.data.sources.rows import NAMES, Archive, Columns, Row, choose, printable
from runtime.data.sources.unpacking import UnusableError
from runtime.errors import DataError

INSTALL = 'pip install -e ".[train,datasets]" -c constraints.txt'
PIECE = 2**20  # bytes read from a file at a time
ROWS = 8  # held in memory at a time, with their pictures
SPLITS = frozenset(("train", "test", "validation", "valid", "val", "dev", "eval"))

_SHARD = re.compile(r"(?P<split>.+)-[0-9]+-of-[0-9]+")


def open_saved(path: Path, columns: Columns) -> Archive:
    """A folder of `save_to_disk`, or one that holds parquet. Of several splits `train` is taken, with a warning."""
    if not (path / "state.json").is_file() and not (path / "dataset_dict.json").is_file():
        return open_parquet(path, columns)
    folder, used = path, list[Path]()
    warnings: tuple[Note, ...] = ()
    if (path / "dataset_dict.json").is_file():
        used = [path / "dataset_dict.json"]
        splits = _json(used[0], "splits")
        if "train" not in splits:
            raise _no_train(
                path, splits, f"give the folder of one, such as {path.name}/{(splits or ['SPLIT'])[0]}"
            )
        folder, warnings = path / "train", _left_out(path, [name for name in splits if name != "train"])
    used += [folder / name for name in ("state.json", "dataset_info.json")]
    used += [folder / entry["filename"] for entry in _json(folder / "state.json", "_data_files")]
    for file in used:
        if not inside(file, path):
            raise DataError(
                f"{path}: its state.json leads out of it", remedy="save it again with save_to_disk"
            )
        if not file.is_file():
            raise DataError(
                f"{path}: {printable(file.name)} is missing", remedy="copy the whole folder again"
            )
    return Archive(
        root=path, files=tuple(used), rows=lambda: _saved_rows(folder, path, columns), warnings=warnings
    )


def _json(path: Path, key: str) -> list[Any]:
    try:
        found = files.read_json(path)[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not what datasets writes: {error!r}",
            remedy="save the dataset again with save_to_disk",
        ) from error
    return list(found)


def _no_train(path: Path, splits: Sequence[str], remedy: str) -> DataError:
    return DataError(f"{path}: no split train; saw: {', '.join(splits) or 'none'}", remedy=remedy)


def _left_out(path: Path, names: Sequence[str]) -> tuple[Note, ...]:
    if not names:
        return ()
    return (Note(path=printable(path.name), reason=f"split train is taken; not used: {', '.join(names)}"),)


def _saved_rows(folder: Path, root: Path, columns: Columns) -> Iterator[Row | Note]:
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise _not_installed(error, folder) from error
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        table = datasets.load_from_disk(str(folder)).with_format("arrow")
    except Exception as error:  # whatever a damaged folder leads it into
        raise _damaged(folder, error) from error
    finally:
        if not shown:
            datasets.enable_progress_bars()
    reader = _Reader.over(table.data.schema, columns, printable(root.name), root)
    yield from reader.unused()
    table = table.select_columns(list(reader.needed))
    yield from reader.rows(_guarded(table.iter(batch_size=ROWS), folder))


def _not_installed(error: ModuleNotFoundError, path: Path) -> DataError:
    return DataError(f"{path} needs the package {error.name}, which is not installed", remedy=INSTALL)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} can't be read: {error}", remedy="fetch or save it again, then finetune dataset")


def open_parquet(path: Path, columns: Columns) -> Archive:
    """A file, or the files in a folder and its `data` folder. Of several splits `train` is taken, with a warning."""
    if path.is_file():
        return Archive(
            root=path.parent, files=(path,), rows=lambda: _parquet_rows((path,), path.parent, columns)
        )
    folders = [folder for folder in (path, path / "data") if folder.is_dir()]
    found = [file for folder in folders for file in listed(folder) if file.suffix.lower() == ".parquet"]
    if not found:
        seen = ", ".join(printable(entry.name) for entry in listed(path)[:10]) or "nothing"
        raise DataError(
            f"{path}: no .parquet file in it or in data/; saw {seen}", remedy="mend the dataset's path"
        )
    chosen, warnings = _train_files(path, found)
    return Archive(
        root=path, files=tuple(chosen), rows=lambda: _parquet_rows(chosen, path, columns), warnings=warnings
    )


def _train_files(path: Path, found: Sequence[Path]) -> tuple[Sequence[Path], tuple[Note, ...]]:
    splits = {file: _split(file) for file in found}
    names = sorted({name for name in splits.values() if name})
    if len(names) < 2:
        return found, ()
    if "train" not in names:
        raise _no_train(path, names, "give one .parquet file, or move the files of one split to a folder")
    left = [file.relative_to(path).as_posix() for file in found if splits[file] != "train"]
    return [file for file in found if splits[file] == "train"], _left_out(
        path, [printable(name) for name in left]
    )


def _split(file: Path) -> str:
    """As the hub names its files: train-00000-of-00002.parquet, test.parquet. Empty: the name says nothing."""
    if match := _SHARD.fullmatch(file.stem):
        return match["split"]
    return file.stem if file.stem in SPLITS else ""


def _parquet_rows(paths: Sequence[Path], root: Path, columns: Columns) -> Iterator[Row | Note]:
    try:
        import pyarrow.parquet as parquet
    except ModuleNotFoundError as error:
        raise _not_installed(error, root) from error
    # All files are looked at before the first row is written down: a wrong column is found at once.
    readers = []
    for path in paths:
        try:
            schema = parquet.read_schema(path)
        except Exception as error:  # whatever a damaged footer leads Arrow into
            raise _damaged(path, error) from error
        name = printable(path.relative_to(root).as_posix())
        readers.append(_Reader.over(schema, columns, name, root))
    for path, reader in zip(paths, readers, strict=True):
        yield from reader.unused()
        # Not the whole file ahead; a page, which may be all of a row group, is the least that Arrow can hold.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=PIECE) as file:
            batches = file.iter_batches(batch_size=ROWS, columns=list(reader.needed))
            yield from reader.rows(_guarded(batches, path))


def _guarded(batches: Iterator[Any], path: Path) -> Iterator[Any]:
    """Of Arrow only: what the caller does with a batch raises as it is."""
    while True:
        try:
            batch = next(batches, None)
        except Exception as error:  # a damaged page
            raise _damaged(path, error) from error
        if batch is None:
            return
        yield batch


@dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    columns: Columns
    names: tuple[str, ...]
    pictures: tuple[str, ...]
    """All picture columns, used or not."""
    archive: str
    root: Path
    """Folder that a picture kept beside the table must lie in."""

    @classmethod
    def over(cls, schema: Any, columns: Columns, archive: str, root: Path) -> "_Reader":
        kinds = {name: schema.field(name).type for name in dict.fromkeys(schema.names)}
        pictures = tuple(name for name, kind in kinds.items() if is_picture(element(kind)))
        texts = [name for name, kind in kinds.items() if is_text(kind)]
        return cls(
            columns=choose(
                columns, pictures, texts, f"{root / archive}" if root.name != archive else f"{root}"
            ),
            names=tuple(name for name in NAMES if name in kinds and (name in texts or is_whole(kinds[name]))),
            pictures=pictures,
            archive=archive,
            root=root,
        )

    @property
    def needed(self) -> tuple[str, ...]:
        chosen = (
            self.columns.image,
            *self.columns.controls,
            self.columns.mask,
            self.columns.caption,
            *self.names,
        )
        return tuple(dict.fromkeys(name for name in chosen if name is not None))

    def unused(self) -> Iterator[Note]:
        left = [name for name in self.pictures if name not in self.needed]
        if left:
            yield Note(path=self.archive, reason=f"picture columns that are not used: {', '.join(left)}")

    def rows(self, batches: Iterator[Any]) -> Iterator[Row]:
        number = 0
        for batch in batches:
            for values in batch.to_pylist():
                yield self._row(number, values)
                number += 1

    def _row(self, number: int, values: dict[str, Any]) -> Row:
        name = next((text for key in self.names if (text := name_of(key, values[key]))), "")
        shown: dict[str, Any] = {"archive": self.archive, "number": number, "name": name}
        opener = Pictures(root=self.root, read=[])
        try:
            targets = opener.of(self.columns.image, values)
            masks = opener.of(self.columns.mask, values)
            controls = self._controls(opener, values)
        except UnusableError as error:
            return Row(**shown, problem=str(error))
        if len(targets) > 1 or len(masks) > 1:
            return Row(**shown, problem="a list of several pictures where one is expected")
        return Row(
            **shown,
            target=targets[0] if targets else None,
            controls=controls,
            mask=masks[0] if masks else None,
            caption=values[self.columns.caption or ""],
            read=tuple(opener.read),
        )

    def _controls(self, opener: Pictures, values: dict[str, Any]) -> tuple[bytes, ...]:
        """Those of a row. A gap would give a control the place of another, so it is refused."""
        found = [(name, opener.of(name, values)) for name in self.columns.controls]
        for (before, pictures), (after, more) in itertools.pairwise(found):
            if more and not pictures:
                raise UnusableError(f"{before} is empty, but {after} isn't")
        return tuple(picture for _, pictures in found for picture in pictures)
