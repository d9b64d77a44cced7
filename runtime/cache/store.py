"""The cache on disk: one folder per sample, a manifest over all.

    <cache_dir>/manifest.json  .lock
    <cache_dir>/<16 hex of the key>/tensors.safetensors  entry.json
    <cache_dir>/.parts/<16 hex of the key>.safetensors   embeddings, until their entry is whole

An entry knows what it was made of; whose it is stands in the manifest alone, so that a renamed
pair or another holdout needs no encoding.

`entry.json` is written last and carries the digest of the tensors, so an entry is whole or
it is not one. Files that are not named here are never touched.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runtime import files, locks
from runtime.cache.key import Wanted
from runtime.errors import CacheError
from runtime.index import Index
from runtime.progress import Progress
from runtime.workspace import tool

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.cache.encode import Encoded

TENSORS = "tensors.safetensors"
ENTRY = "entry.json"
LOCK = ".lock"
PARTS = ".parts"
FOLDER = re.compile("[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class Store:
    """`index` spares hashing tensors again that have not changed since."""

    root: Path
    index: Index

    @property
    def manifest_path(self) -> Path:
        return self.root / "manifest.json"

    def manifest(self) -> dict[str, Any]:
        """The manifest of a finished cache phase. Raises CacheError where there is none."""
        remedy = "finetune cache"
        if not self.manifest_path.is_file():
            raise CacheError(f"no cache in {self.root}: manifest.json is missing", remedy=remedy)
        try:
            document: dict[str, Any] = files.read_json(self.manifest_path)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise CacheError(f"{self.manifest_path} can't be read: {error}", remedy=remedy) from error
        if not isinstance(document, dict):
            raise CacheError(f"{self.manifest_path} can't be read: expected an object", remedy=remedy)
        if not document.get("complete"):
            raise CacheError(f"the cache in {self.root} is not finished", remedy=remedy)
        return document

    @contextlib.contextmanager
    def locked(self, progress: Progress) -> Iterator[None]:
        """Alone among processes; a second one waits, and says so."""
        with locks.alone(self.root / LOCK, progress, f"fills {self.root.name}"):
            _sweep(self.root, self.manifest_path.name)
            yield

    def fault(self, want: Wanted) -> str:
        """Why the entry of `want` can't be used; empty where it is whole."""
        folder = self.root / want.folder
        if not (folder / ENTRY).is_file():
            return "not there"
        try:
            entry = files.read_json(folder / ENTRY)
            recorded = entry["files"][TENSORS]
            if entry["key"] != want.key or entry["document"] != want.document:
                return "made for something else"
            size, digest = recorded["size"], recorded["sha256"]
        except (ValueError, KeyError, TypeError):
            return f"{ENTRY} is damaged"
        tensors = folder / TENSORS
        if not tensors.is_file():
            return f"{TENSORS} is missing"
        if tensors.stat().st_size != size:
            return f"{TENSORS} has {tensors.stat().st_size} bytes, {size} were written"
        if self.index.digest(tensors, f"cache/{want.folder}") != digest:
            return f"{TENSORS} has changed since it was written"
        return ""

    def write(self, want: Wanted, encoded: "Encoded") -> None:
        from safetensors.torch import save_file

        folder = self.root / want.folder
        _sweep(folder, TENSORS, ENTRY)
        own = _own(encoded.tensors)
        files.write_with(folder / TENSORS, lambda path: save_file(own, path))
        shapes = {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in own.items()
        }
        written = {"size": (folder / TENSORS).stat().st_size, "sha256": files.file_digest(folder / TENSORS)}
        entry = {
            "schema": "cache-entry/1",
            "key": want.key,
            "document": want.document,
            "files": {TENSORS: written},
            "tensors": shapes,
            "notes": encoded.notes,
        }
        files.write_json(folder / ENTRY, entry)

    def _part(self, want: Wanted) -> Path:
        return self.root / PARTS / f"{want.folder}.safetensors"

    def write_part(self, want: Wanted, encoded: "Encoded") -> None:
        """What is there of an entry before it is whole."""
        from safetensors.torch import save_file

        said = {"key": want.key, "notes": json.dumps(encoded.notes)}
        files.write_with(self._part(want), lambda path: save_file(_own(encoded.tensors), path, metadata=said))

    def has_part(self, want: Wanted) -> bool:
        """Whether the embeddings of `want` were left by a cache phase that did not come to its end."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._part(want), framework="pt") as part:
                return bool(part.metadata()["key"] == want.key)
        except (OSError, SafetensorError, TypeError, KeyError):
            return False

    def read_part(self, want: Wanted) -> "Encoded":
        from safetensors.torch import load

        from runtime.cache.encode import Encoded

        data = self._part(want).read_bytes()  # not mapped, or Windows would refuse to delete it
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        return Encoded(tensors=load(data), notes=json.loads(header["__metadata__"]["notes"]))

    def drop_part(self, want: Wanted) -> None:
        self._part(want).unlink()

    def drop_parts(self) -> None:
        """Those of other settings, which never became entries."""
        folder = self.root / PARTS
        _sweep(folder, "*.safetensors")
        for left in folder.glob("*.safetensors"):
            if FOLDER.fullmatch(left.stem):
                left.unlink()
        with contextlib.suppress(OSError):  # absent, or with files of others in it
            folder.rmdir()

    def has_parts(self) -> bool:
        """Whether a cache phase that was killed left embeddings; false while one goes on, which needs its own."""
        from filelock import FileLock, Timeout

        if not any(FOLDER.fullmatch(path.stem) for path in (self.root / PARTS).glob("*.safetensors")):
            return False
        try:
            with FileLock(self.root / LOCK, timeout=0):
                return True
        except Timeout:
            return False

    def read(self, folder: str) -> "dict[str, Tensor]":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors: dict[str, Tensor] = load_file(self.root / folder / TENSORS)
            return tensors
        except (OSError, SafetensorError) as error:
            raise CacheError(
                f"{self.root / folder / TENSORS} can't be read: {error}", remedy="finetune cache"
            ) from error

    def entry(self, folder: str) -> dict[str, Any]:
        path = self.root / folder / ENTRY
        try:
            document: dict[str, Any] = files.read_json(path)
        except (OSError, ValueError) as error:
            raise CacheError(f"{path} can't be read: {error}", remedy="finetune cache") from error
        return document

    def write_manifest(
        self,
        wants: Sequence[Wanted],
        common: dict[str, Any],
        dataset_digest: str,
        entries: Mapping[str, dict[str, Any]] | None,
    ) -> dict[str, Any]:
        """The manifest as it stands now; left alone where it says so already, for evidence names its digest.

        `entries`: by folder, each entry's own record. None while the cache is being filled: then the manifest
        lists what it did before, so that after a kill it still can be told what has changed.
        """
        document: dict[str, Any] = {
            "schema": "cache-manifest/1",
            "complete": entries is not None,
            "tool": tool(),
            "updated_at": files.utc_now(),
            "dataset_digest": dataset_digest,
            "settings": common,
            "counts": {s: sum(w.split == s for w in wants) for s in ("train", "holdout", "prompt")},
            "entries": _listed(wants, entries) if entries is not None else self._before(),
        }
        if (standing := self._standing()) and {**standing, "updated_at": document["updated_at"]} == document:
            return standing
        files.write_json(self.manifest_path, document)
        return document

    def _standing(self) -> dict[str, Any] | None:
        try:
            return self.manifest()
        except CacheError:
            return None

    def _before(self) -> list[dict[str, Any]]:
        """What the last finished cache phase listed, also where a later one has begun."""
        try:
            return list(files.read_json(self.manifest_path)["entries"])
        except (OSError, ValueError, KeyError, TypeError):
            return []

    def documents(self) -> dict[tuple[str, str], dict[str, Any]]:
        """Key documents by split and id, as the last finished cache phase listed them."""
        found = {}
        for listed in self._before():
            # A damaged entry is told as such elsewhere.
            with contextlib.suppress(CacheError, KeyError, TypeError):
                found[listed["split"], listed["id"]] = self.entry(listed["folder"])["document"]
        return found

    def unlisted(self) -> list[Path]:
        """Folders that earlier settings or samples left; whole entries of ours, by their name and entry.json."""
        listed = {entry["folder"] for entry in self.manifest()["entries"]}
        ours = (path.parent for path in self.root.glob(f"*/{ENTRY}") if FOLDER.fullmatch(path.parent.name))
        return sorted(folder for folder in ours if folder.name not in listed)


def _listed(wants: Sequence[Wanted], entries: Mapping[str, dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "folder": want.folder,
            "key": want.key,
            "id": want.id,
            "split": want.split,
            "files": entries[want.folder]["files"],
        }
        for want in wants
    ]


def _own(tensors: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Copies: a view would be saved with the whole storage behind it."""
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _sweep(folder: Path, *names: str) -> None:
    """Take away what a killed process left half written; under the lock no other writes here."""
    for name in names:
        for left in folder.glob(f".{name}.*.tmp"):
            left.unlink()
