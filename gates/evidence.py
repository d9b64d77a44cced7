"""Read and hash what a gate judges, strictly: a file is what it says, or an error that names it.

EvidenceError      the file is there and can't be trusted: a check on it errors
  MissingEvidenceError  the file isn't there: a check on it fails, with the command that makes it
"""

import hashlib
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar

T = TypeVar("T")

MAX_JSON_BYTES = 64 * 2**20  # the manifest of 50,000 samples is a third of it
MAX_DEPTH = 64  # Python's own parser dies near 1,000, and nothing that we judge passes 12
SAMPLED_ABOVE = 64 * 2**20  # bytes; see schemas/README.md, "weights fingerprint"
PIECE = 2**20


class EvidenceError(Exception):
    """`path` as shown to the user, and what is wrong with it in one line."""

    def __init__(self, path: str, message: str, *, remedy: str = "") -> None:
        super().__init__(f"{path}: {message}")
        self.path = path
        self.message = message
        self.remedy = remedy


class MissingEvidenceError(EvidenceError):
    pass


@dataclass(frozen=True, slots=True)
class Reading(Generic[T]):
    """What reading gave: a value, or the error that every check on it must see."""

    value: T | None = None
    error: EvidenceError | None = None

    def get(self) -> T:
        if self.error is not None:
            raise self.error
        assert self.value is not None
        return self.value


def attempt(read: Callable[[], T]) -> Reading[T]:
    """Read now, complain when a check asks: one broken file must not hide the others' faults."""
    try:
        return Reading(value=read())
    except EvidenceError as error:
        return Reading(error=error)
    except OSError as error:
        return Reading(error=unreadable(error))


def unreadable(error: OSError) -> EvidenceError:
    """A file that vanished midway, or may not be read; its path on this machine is left out."""
    name = Path(str(error.filename)).name if error.filename else "a file"
    reason = error.strerror or type(error).__name__
    return EvidenceError(name, f"could not be read while it was judged ({reason}); judge again")


# ---- digests


def canonical_json(value: Any) -> bytes:
    """The bytes whose SHA-256 is the document digest. Raises ValueError on NaN."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def document_digest(value: Any) -> str:
    return hashlib.sha256(canonical_json(value)).hexdigest()


def legible(text: str) -> str:
    """`text`, what no UTF-8 says (bytes of a file name, half of a surrogate pair) as an escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def file_digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def weights_fingerprint(folder: Path) -> str:
    """Identity of a component folder; files above 64 MiB by three sampled pieces."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return document_digest({legible(path.relative_to(folder).as_posix()): _identity(path) for path in files})


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


def dataset_digest(data: Mapping[str, Any]) -> str:
    """Of the samples and the sources' settings of evidence 02-dataset, in their order."""
    samples = [
        {
            **{name: sample[name] for name in ("id", "source", "split", "prompt", "alternatives")},
            "target": sample["target"]["sha256"],
            "controls": [control["sha256"] for control in sample["controls"]],
            "mask": sample["mask"]["sha256"] if sample["mask"] else None,
        }
        for sample in data["samples"]
    ]
    sources = [{name: source[name] for name in ("name", "settings")} for source in data["sources"]]
    return document_digest({"samples": samples, "sources": sources})


# ---- paths


_DRIVE = re.compile(r"^[A-Za-z]:")


def inside(root: Path, relative: str, shown: str = "") -> Path:
    """`relative` under `root`. A path from a data file that would leave its root is refused."""
    shown = shown or relative
    parts = relative.replace("\\", "/").split("/")
    if not relative or "\0" in relative or relative.startswith(("/", "\\")) or _DRIVE.match(relative):
        raise EvidenceError(shown, "is not a path relative to its folder")
    if ".." in parts:
        raise EvidenceError(shown, "leaves its folder by ..")
    try:
        path = root.joinpath(*parts)
        within = path.resolve().is_relative_to(root.resolve())
    except (OSError, ValueError) as error:
        raise EvidenceError(shown, f"is no usable path ({error})") from error
    except RuntimeError as error:  # what pathlib of Python before 3.13 makes of it
        raise EvidenceError(shown, "is a link to itself") from error
    if not within:
        raise EvidenceError(shown, "leaves its folder by a link")
    return path


def read_bytes(path: Path, shown: str, *, limit: int = MAX_JSON_BYTES) -> bytes:
    try:
        size = path.stat().st_size
        if size > limit:
            raise EvidenceError(shown, f"has {size} bytes, more than the {limit} that a gate reads")
        return path.read_bytes()
    except FileNotFoundError:
        raise MissingEvidenceError(shown, "is missing") from None
    except OSError as error:
        raise EvidenceError(shown, f"can't be read ({error.strerror})") from error


# ---- JSON


def parse_json(text: bytes, shown: str, *, allow_nan: bool = False) -> Any:
    """A JSON value. Duplicate keys are refused; so are NaN and Infinity, unless they are what is judged."""
    try:
        value = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=lambda pairs: _object(pairs, shown),
            parse_constant=float if allow_nan else lambda name: _refuse(shown, f"holds {name}"),
        )
    except UnicodeDecodeError as error:
        raise EvidenceError(shown, f"is not UTF-8 (byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise EvidenceError(shown, f"is not JSON: {error.msg}, line {error.lineno}") from error
    except RecursionError as error:
        raise EvidenceError(shown, "is nested too deeply") from error
    except ValueError as error:  # an integer of more digits than Python converts
        raise EvidenceError(shown, f"is not JSON: {error}") from error
    _bound_depth(value, shown)
    if b"\\u" in text:
        _refuse_surrogates(value, shown)
    _refuse_overflow(value, shown, floats=not allow_nan)
    return value


def read_json(path: Path, shown: str) -> Any:
    return parse_json(read_bytes(path, shown), shown)


def read_jsonl(path: Path, shown: str, *, allow_nan: bool = False) -> tuple[list[Any], str]:
    """All whole lines, and a note on a torn last one, which is what a kill leaves ("" if none)."""
    return parse_jsonl(read_bytes(path, shown), shown, allow_nan=allow_nan)


def parse_jsonl(data: bytes, shown: str, *, allow_nan: bool = False) -> tuple[list[Any], str]:
    *whole, rest = data.split(b"\n")
    records = [
        parse_json(line, f"{shown} line {number}", allow_nan=allow_nan)
        for number, line in enumerate(whole, 1)
        if line.strip()
    ]
    return records, f"{shown}: the last line is torn ({len(rest)} bytes)" if rest.strip() else ""


def _object(pairs: list[tuple[str, Any]], shown: str) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise EvidenceError(shown, f"has the key {twice!r} twice")
    return document


def _refuse(shown: str, message: str) -> NoReturn:
    raise EvidenceError(shown, message)


def _bound_depth(value: Any, shown: str) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise EvidenceError(shown, f"is nested deeper than {MAX_DEPTH}")
        level = [child for item in level for child in _children(item)]


def _refuse_surrogates(value: Any, shown: str) -> None:
    """`"\\ud800"` is legal JSON and no text: nothing can write it again."""
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise EvidenceError(shown, "holds half of a surrogate pair, which is no text") from error


def _children(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list):
        yield from value


def _refuse_overflow(value: Any, shown: str, *, floats: bool) -> None:
    """`1e999` is legal JSON and reads as infinity; a whole number of 400 digits becomes none of its comparisons."""
    stack = [value]
    while stack:
        item = stack.pop()
        too_large = isinstance(item, int) and item.bit_length() > sys.float_info.max_exp
        if too_large or (floats and isinstance(item, float) and not math.isfinite(item)):
            raise EvidenceError(shown, "holds a number beyond what a float can say")
        stack.extend(_children(item))


# ---- recorded files


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    size: int
    sha256: str


def differences(root: Path, recorded: Mapping[str, Mapping[str, Any]], shown: str = "") -> list[str]:
    """One line per recorded file that is absent, or not the bytes that were recorded."""
    found = []
    for relative, record in sorted(recorded.items()):
        name = f"{shown}/{relative}" if shown else relative
        path = inside(root, relative, name)
        if not path.is_file():
            found.append(f"{name} is missing")
        elif path.stat().st_size != record["size"]:
            found.append(f"{name} has {path.stat().st_size} bytes, recorded were {record['size']}")
        elif file_digest(path) != record["sha256"]:
            found.append(f"{name} has other bytes than were recorded")
    return found
