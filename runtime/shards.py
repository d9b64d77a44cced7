"""Safetensors files tensor by tensor: what the libraries do with a memory map or a whole dictionary.

Read into memory of its own, a tensor is gone when its last reference is; the pages of a memory map stay
counted against the process. Written into a file that is laid out beforehand, a shard needs no more memory
than its largest tensor.
"""

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from runtime import files
from runtime.errors import UserError

DTYPES = {
    "BOOL": torch.bool, "U8": torch.uint8, "I8": torch.int8, "I16": torch.int16, "I32": torch.int32,
    "I64": torch.int64, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
    "F64": torch.float64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
FETCH = "fetch the model again"
WEIGHTS = ("diffusion_pytorch_model.safetensors", "model.safetensors")  # of diffusers, of transformers
COPIED_BYTES = 2**24  # at once
LATE_BYTES = 1024  # more than any text that is written late; only the header's reserve depends on it


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Bytes from the start of the file."""
    size: int
    """Bytes."""

    @property
    def elements(self) -> int:
        return prod(self.shape)


def find(folder: Path) -> list[Path]:
    """The files of a component's weights; another variant of them may lie in the same folder.

    Raises UserError where there is none, or one that the index names is absent.
    """
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return listed(folder, index)
        if (folder / name).is_file():
            return [folder / name]
    there = sorted(folder.glob("*.safetensors"))
    if not there:
        raise UserError(f"{folder} holds no .safetensors weights", remedy=FETCH)
    return there


def listed(folder: Path, index: Path) -> list[Path]:
    """The shards that an index names. Raises UserError where one is absent."""
    named = sorted(set(files.read_json(index)["weight_map"].values()))
    absent = [name for name in named if not (folder / name).is_file()]
    if absent:
        raise UserError(f"{folder} is incomplete; shards not there: {', '.join(absent)}", remedy=FETCH)
    return [folder / name for name in named]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of a shard. Raises UserError for a file that is cut off or no safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as handle:
        first = handle.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= size - 8:
            raise UserError(f"{path} is no safetensors file, or is cut off", remedy=FETCH)
        try:
            header = json.loads(handle.read(length))
        except ValueError as error:
            raise UserError(f"{path} is no safetensors file: {error}", remedy=FETCH) from error
    entries = entries_of(header, 8 + length)
    if max((entry.start + entry.size for entry in entries.values()), default=8 + length) > size:
        raise UserError(f"{path} is cut off", remedy=FETCH)
    return entries


def entries_of(header: Mapping[str, Any], base: int) -> dict[str, Entry]:
    """The tensors of a header; the first of them starts `base` bytes from the start of the file."""
    return {name: _entry(item, base) for name, item in header.items() if name != "__metadata__"}


def _entry(item: Mapping[str, Any], base: int) -> Entry:
    start, end = item["data_offsets"]
    return Entry(dtype=item["dtype"], shape=tuple(item["shape"]), start=base + start, size=end - start)


def read_tensor(path: Path, entry: Entry) -> Tensor:
    """One tensor, on the CPU, in memory that it alone holds."""
    if entry.dtype not in DTYPES:
        raise UserError(
            f"{path} holds {entry.dtype}, which is not read here", remedy="choose a bf16 or fp32 base"
        )
    raw = torch.empty(entry.size, dtype=torch.uint8)
    with path.open("rb") as handle:
        handle.seek(entry.start)
        if handle.readinto(raw.numpy().data) != entry.size:
            raise UserError(f"{path} is cut off", remedy=FETCH)
    return raw.view(DTYPES[entry.dtype]).reshape(entry.shape)


def tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a component by itself, shard by shard."""
    for shard in find(folder):
        for name, entry in read_header(shard).items():
            yield name, read_tensor(shard, entry)


class Writer:
    """A shard under construction. Each tensor has its place before the first is written.

    `planned`: name to (dtype, shape). `late`: names of texts, stored as bytes, whose lengths show only at
    the end; they come last. Wide dtypes come first, as readers that map the file need them aligned. The
    header keeps a reserve for the late ones, filled with spaces, which JSON permits.
    """

    def __init__(
        self, path: Path, planned: Mapping[str, tuple[str, tuple[int, ...]]], late: Sequence[str]
    ) -> None:
        self._planned: dict[str, dict[str, Any]] = {}
        self._late = dict.fromkeys(sorted(late), b"")
        self._left = set(planned)
        position = 0
        for name in sorted(planned, key=lambda name: (-width(planned[name][0]), name)):
            dtype, shape = planned[name]
            end = position + prod(shape) * width(dtype)
            self._planned[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, end]}
            position = end
        self._end = position
        widest = self._header(dict.fromkeys(self._late, LATE_BYTES))
        self._base = 8 + len(widest) + -len(widest) % 8
        self._handle: BinaryIO = path.open("wb")

    def put(self, name: str, tensor: Tensor) -> None:
        """Write `tensor`, which has the planned dtype and shape, into its place."""
        place = self._planned[name]
        if (NAMES[tensor.dtype], list(tensor.shape)) != (place["dtype"], place["shape"]):
            raise ValueError(f"{name}: {tensor.dtype} {list(tensor.shape)} is not the planned {place}")
        self._handle.seek(self._base + place["data_offsets"][0])
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            self._handle.write(flat.view(torch.uint8).numpy().data)
        self._left.discard(name)

    def copy(self, name: str, source: Path, entry: Entry) -> None:
        """Put the tensor of `source` at `entry` into its place, piece by piece."""
        place = self._planned[name]
        if (entry.dtype, list(entry.shape)) != (place["dtype"], place["shape"]):
            raise ValueError(f"{name}: {entry.dtype} {list(entry.shape)} is not the planned {place}")
        self._handle.seek(self._base + place["data_offsets"][0])
        with source.open("rb") as handle:
            handle.seek(entry.start)
            for start in range(0, entry.size, COPIED_BYTES):
                wanted = min(COPIED_BYTES, entry.size - start)
                piece = handle.read(wanted)
                if len(piece) != wanted:
                    raise UserError(f"{source} is cut off", remedy=FETCH)
                self._handle.write(piece)
        self._left.discard(name)

    def put_late(self, name: str, text: bytes) -> None:
        if len(text) > LATE_BYTES:
            raise ValueError(f"{name} has {len(text)} bytes, {LATE_BYTES} are reserved")
        self._late[name] = text

    def close(self) -> None:
        """Write the late ones and the header. Raises ValueError where a planned tensor was not written."""
        if self._left:
            raise ValueError(f"{len(self._left)} tensors were not written, first {min(self._left)}")
        header = self._header({name: len(text) for name, text in self._late.items()})
        self._handle.seek(self._base + self._end)
        self._handle.write(b"".join(self._late.values()))
        self._handle.seek(0)
        self._handle.write(struct.pack("<Q", self._base - 8) + header.ljust(self._base - 8))
        self._handle.close()

    def abandon(self) -> None:
        self._handle.close()

    def _header(self, lengths: Mapping[str, int]) -> bytes:
        document: dict[str, Any] = {"__metadata__": {"format": "pt"}, **self._planned}
        position = self._end
        for name, length in lengths.items():
            end = position + length
            document[name] = {"dtype": "U8", "shape": [length], "data_offsets": [position, end]}
            position = end
        return json.dumps(document, separators=(",", ":")).encode("utf-8")


def width(dtype: str) -> int:
    return DTYPES[dtype].itemsize
