"""Stand-ins for the encoders, bases beside the embedded one, and what a cache holds."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime import files
from runtime.cache import build
from runtime.cache.encode import Encoded
from runtime.cache.store import Store
from runtime.index import Index


@dataclass(frozen=True, slots=True)
class Held:
    """The cache of a lab, as it lies on the disk."""

    lab: Any

    @property
    def root(self) -> Path:
        return Path(self.lab.root / "cache")

    @property
    def store(self) -> Store:
        return Store(self.root, Index.open(self.lab.workspace.index_path))

    def folder(self, name: str) -> Path:
        listed = self.store.manifest()["entries"]
        return self.root / str(next(entry["folder"] for entry in listed if entry["id"] == name))

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Copies: what is read is mapped, and tests overwrite files in place."""
        read = self.store.read(self.folder(name).name)
        return {key: tensor.clone() for key, tensor in read.items()}


@pytest.fixture
def held(lab: Any) -> Held:
    return Held(lab)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries with made-up tensors: for tests of what is built and why, not of what it holds."""

    def encode(job: build.Job, todo: list[Any], progress: Any) -> tuple[None, None]:
        for want in todo:
            tensors = {"target": torch.zeros(16, 2, 2), "prompt_embeds": torch.zeros(3, 64)}
            job.store.write(want, Encoded(tensors=tensors))
        return None, None

    monkeypatch.setattr(build, "_encode", encode)
    monkeypatch.setattr(build, "_roundtrip", lambda *given: None)


@pytest.fixture
def rebase(lab: Any, nano: Path, tmp_path: Path) -> Callable[..., Path]:
    """Let the lab's base be a copy of its own, `family` in its model_index.json; returns its folder."""

    def make(pipeline: str = "QwenImageEditPipeline") -> Path:
        model = tmp_path / "other"
        shutil.copytree(nano, model)
        index = {**files.read_json(model / "model_index.json"), "_class_name": pipeline}
        (model / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
        files.write_json(lab.workspace.local_path, {"external": {"model": str(model)}})
        return model

    return make
