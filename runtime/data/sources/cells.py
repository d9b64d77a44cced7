"""Cells of an Arrow table: which columns are pictures or text, and the bytes of a picture."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from runtime.data.sources.rows import LARGEST, TOO_LARGE, printable
from runtime.data.sources.unpacking import UnusableError


def inside(path: Path, folder: Path) -> bool:
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # links in a circle, a zero byte
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    root: Path
    read: list[Path]

    def of(self, column: str | None, values: dict[str, Any]) -> list[bytes]:
        """The pictures of one cell, none where it is empty. Raises UnusableError."""
        cell = values[column] if column is not None else None
        entries: list[Any] = cell if isinstance(cell, list) else [] if _empty(cell) else [cell]
        if any(_empty(entry) for entry in entries):
            raise UnusableError(f"{column} has an empty picture in its list")
        return [self._bytes(entry, column or "") for entry in entries]

    def _bytes(self, entry: bytes | dict[str, Any], column: str) -> bytes:
        if isinstance(entry, bytes):
            return entry
        if entry["bytes"] is not None:
            return bytes(entry["bytes"])
        shown = printable(str(entry["path"]))
        path = self.root / str(entry["path"])
        if not inside(path, self.root):
            raise UnusableError(f"{column} refers to {shown}, outside of the dataset's folder")
        if not path.is_file():
            raise UnusableError(f"{column} refers to {shown}, which is not in the dataset's folder")
        if path.stat().st_size > LARGEST:
            raise UnusableError(TOO_LARGE)
        self.read.append(self.root / path.resolve().relative_to(self.root.resolve()))
        return path.read_bytes()


def _empty(entry: Any) -> bool:
    return entry is None or (isinstance(entry, dict) and entry["bytes"] is None and not entry.get("path"))


def name_of(key: str, value: Any) -> str:
    text = str(value) if value is not None else ""
    return PurePosixPath(text.replace("\\", "/")).stem if key == "file_name" else text


def element(kind: Any) -> Any:
    import pyarrow.types as types

    is_list = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    return kind.value_type if is_list else kind


def is_picture(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_struct(kind):
        index = kind.get_field_index("bytes")
        return index >= 0 and _is_binary(kind.field(index).type)
    return _is_binary(kind)


def _is_binary(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def is_text(kind: Any) -> bool:
    import pyarrow.types as types

    if types.is_dictionary(kind):
        return is_text(kind.value_type)
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_whole(kind: Any) -> bool:
    import pyarrow.types as types

    return bool(types.is_integer(kind))
