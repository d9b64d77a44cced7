"""Where the weights of a component come from, shard by shard: a folder here, or what is fetched when its turn comes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from runtime import files, shards
from runtime.quantize.meter import Meter
from runtime.shards import Entry


class Source(Protocol):
    @property
    def names(self) -> Sequence[str]:
        """Of the shards, in order."""

    @property
    def one_by_one(self) -> bool:
        """Whether a shard has to be released before the next is opened, for want of room."""

    def header(self, name: str) -> Mapping[str, Entry]:
        """The tensors of a shard, whether it is here or not."""

    def to_fetch(self, name: str) -> int:
        """Bytes that `open` would have to fetch."""

    def open(self, name: str, meter: Meter) -> Path:
        """A whole shard."""

    def release(self, name: str) -> None:
        """The shard is quantized and recorded."""

    def identity(self) -> str:
        """A digest that tells these weights from others, the same with shards here or not."""

    def record(self) -> dict[str, Any] | None:
        """How they were fetched, for the evidence; None where they were here."""


@dataclass(frozen=True)
class Folder:
    """A component that lies here. Raises UserError where a shard is absent."""

    path: Path
    one_by_one = False

    @cached_property
    def _files(self) -> dict[str, Path]:
        return {path.name: path for path in shards.find(self.path)}

    @property
    def names(self) -> Sequence[str]:
        return list(self._files)

    def header(self, name: str) -> Mapping[str, Entry]:
        return shards.read_header(self._files[name])

    def to_fetch(self, name: str) -> int:
        return 0

    def open(self, name: str, meter: Meter) -> Path:
        return self._files[name]

    def release(self, name: str) -> None:
        pass

    def identity(self) -> str:
        return files.weights_fingerprint(self.path)

    def record(self) -> dict[str, Any] | None:
        return None
