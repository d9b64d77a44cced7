"""The Hugging Face hub, as far as a base is fetched from it: a list of files, a header, a file that goes on.

By huggingface_hub's own means, so that HF_ENDPOINT, HF_HUB_OFFLINE and tokens work as everywhere. Only the
download into one partial file is ours: its own throws away what it has when a process ends (since 1.14).
"""

import json
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from runtime import files
from runtime.errors import UserError
from runtime.quantize.made import partial
from runtime.quantize.meter import Meter
from runtime.shards import Entry, entries_of

HEADER_MAX = 100 * 2**20  # safetensors' own limit
REMEDY = "finetune quantize goes on from there; a gated model needs `hf auth login` first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A file of a repository."""

    size: int
    sha256: str | None
    """Of files in large file storage; None for small ones."""


@dataclass(frozen=True, slots=True)
class Repository:
    name: str
    revision: str
    """A commit; empty before `of` has asked for it."""

    @classmethod
    def of(cls, name: str) -> tuple["Repository", dict[str, Stored]]:
        """The newest commit of a model, and its files by path. Raises UserError where the hub gives none."""
        from huggingface_hub import HfApi

        with told(name):
            info = HfApi(endpoint=_endpoint()).model_info(name, files_metadata=True)
        found = {
            item.rfilename: Stored(size=item.size or 0, sha256=item.lfs.sha256 if item.lfs else None)
            for item in info.siblings or ()
        }
        return cls(name, str(info.sha)), found

    def header(self, path: str) -> dict[str, Entry]:
        """The tensors of a .safetensors file; no weight is fetched."""
        length = struct.unpack("<Q", self._part(path, 0, 8))[0]
        if not 2 <= length <= HEADER_MAX:
            raise UserError(f"{path} of {self.name} is no safetensors file", remedy="choose another base")
        return entries_of(json.loads(self._part(path, 8, length)), 8 + length)

    def _part(self, path: str, start: int, size: int) -> bytes:
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            build_hf_headers,
            get_session,
            hf_raise_for_status,
        )

        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + size - 1}"}
        with (
            told(f"{path} of {self.name}"),
            get_session().stream("GET", self.url(path), headers=headers) as answer,
        ):
            hf_raise_for_status(answer)
            if answer.status_code != 206:
                raise OSError("the server gives no part of a file")
            content = answer.read()
        if len(content) != size:
            raise UserError(f"{path} of {self.name} is shorter than its header says", remedy=REMEDY)
        return bytes(content)

    def fetch(self, path: str, stored: Stored, target: Path, meter: Meter) -> None:
        """`target` whole; what an earlier call left of it, under a name of its own, is gone on with.

        Raises UserError where the hub stops, or gives other bytes than it named.
        """
        from huggingface_hub.file_download import http_get
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        part = partial(target)
        part.parent.mkdir(parents=True, exist_ok=True)
        with part.open("ab") as handle, told(f"{path} of {self.name}"):
            there = handle.tell()
            if there > stored.size:
                handle.truncate(there := 0)
            if there < stored.size:
                http_get(
                    self.url(path),
                    handle,
                    resume_size=there,
                    headers=build_hf_headers(),
                    expected_size=stored.size,
                    tqdm_class=_bar(meter, f"fetching {path}"),
                )
        if stored.sha256 is not None and files.file_digest(part) != stored.sha256:
            part.unlink()
            raise UserError(f"{path} of {self.name} came with other bytes than the hub names", remedy=REMEDY)
        files.sync(part)
        files.rename(part, target)

    def url(self, path: str) -> str:
        from huggingface_hub import hf_hub_url

        return hf_hub_url(self.name, path, revision=self.revision, endpoint=_endpoint())


@contextmanager
def told(what: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # the hub client has no common base for its many errors
        raise UserError(f"{what} can't be fetched from the hub: {error}", remedy=REMEDY) from error


def _endpoint() -> str | None:
    return os.environ.get("HF_ENDPOINT") or None


def _bar(meter: Meter, text: str) -> Any:
    """What http_get takes for a progress bar, shown by ours."""

    class Bar:
        def __init__(self, **given: Any) -> None:
            pass

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def update(self, size: int = 1) -> None:
            meter.advance(size, text)

    return Bar
