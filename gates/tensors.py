"""Safetensors files without their library: headers held against the bytes, and values where they are judged."""

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.evidence import EvidenceError, MissingEvidenceError, parse_json

# bytes per element of the dtypes that the format defines and we meet
_WIDTH = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
_NUMPY = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "F16": "<f2", "BF16": "<u2",
    "U32": "<u4", "I32": "<i4", "F32": "<f4", "U64": "<u8", "I64": "<i8", "F64": "<f8",
}  # fmt: skip
_MAX_HEADER = 100_000_000  # the limit of the format's own reader


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    """bytes from the start of the file"""
    size: int
    """bytes"""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """What a gate needs of a tensor, so that judging needs no array."""

    dtype: str
    shape: tuple[int, ...]
    sha256: str
    finite: bool
    norm: float
    """Euclidean, over the finite elements"""

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_header(path: Path, shown: str) -> dict[str, TensorEntry]:
    """The tensors of a safetensors file. Raises EvidenceError unless they fill the file exactly."""
    try:
        size = path.stat().st_size
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if size < 8 or length > min(_MAX_HEADER, size - 8):
                raise EvidenceError(shown, f"is cut short or no safetensors file ({size} bytes)")
            header = handle.read(length)
    except FileNotFoundError:
        raise MissingEvidenceError(shown, "is missing") from None
    except OSError as error:
        raise EvidenceError(shown, f"can't be read ({error.strerror})") from error
    return parse_header(header, size - 8 - length, shown)


def parse_header(header: bytes, body: int, shown: str) -> dict[str, TensorEntry]:
    """`header` is the JSON text, `body` the number of bytes after it."""
    document = parse_json(header, f"{shown} header")
    if not isinstance(document, dict):
        raise EvidenceError(shown, "has a header that is not an object")
    document.pop("__metadata__", None)
    entries = {
        name: _entry(item, 8 + len(header), f"{shown} tensor {name}") for name, item in document.items()
    }
    position = 8 + len(header)
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != position:
            raise EvidenceError(shown, f"has a hole or an overlap before tensor {name}")
        position += entry.size
    if position != 8 + len(header) + body:
        raise EvidenceError(
            shown, f"has {body} bytes of tensors, its header says {position - 8 - len(header)}"
        )
    return entries


def _entry(item: Any, base: int, shown: str) -> TensorEntry:
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise EvidenceError(shown, "is not described by dtype, shape and data_offsets")
    dtype, shape, offsets = item["dtype"], item["shape"], item["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _WIDTH:
        raise EvidenceError(shown, f"has the unknown dtype {dtype!r}")
    if not _naturals(shape) or not _naturals(offsets) or len(offsets) != 2:
        raise EvidenceError(shown, "has a shape or offsets that are no natural numbers")
    start, end = offsets
    if end - start != math.prod(shape) * _WIDTH[dtype]:
        raise EvidenceError(shown, f"takes {end - start} bytes, its shape {shape} of {dtype} needs others")
    return TensorEntry(dtype=dtype, shape=tuple(shape), start=base + start, size=end - start)


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def read_tensor(path: Path, entry: TensorEntry, shown: str) -> Any:
    """The numpy array of one tensor; bf16 becomes float32. Raises EvidenceError for 8-bit floats."""
    import numpy as np

    if entry.dtype not in _NUMPY:
        raise EvidenceError(shown, f"holds {entry.dtype}, which this reader does not decode")
    with path.open("rb") as handle:
        handle.seek(entry.start)
        array = np.frombuffer(handle.read(entry.size), dtype=_NUMPY[entry.dtype]).reshape(entry.shape)
    if entry.dtype == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array


def tensor_facts(path: Path, shown: str) -> dict[str, TensorFacts]:
    """Digest, finiteness and norm of each tensor, one in memory at a time."""
    import numpy as np

    facts = {}
    for name, entry in read_header(path, shown).items():
        array = read_tensor(path, entry, f"{shown} tensor {name}")
        finite = np.isfinite(array)
        with np.errstate(over="ignore"):
            norm = float(np.linalg.norm(np.where(finite, array, 0).astype(np.float64)))
        facts[name] = TensorFacts(
            dtype=entry.dtype,
            shape=entry.shape,
            sha256=hashlib.sha256(array.tobytes()).hexdigest(),
            finite=bool(finite.all()),
            norm=norm,
        )
    return facts
