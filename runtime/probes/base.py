"""How large the target's base is, before anything of it is loaded, or even fetched."""

import os
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

from runtime import files
from runtime.errors import UserError
from runtime.files import GIB
from runtime.planning import architecture
from runtime.planning.plan import locate_model
from runtime.quantize.made import LISTING
from runtime.workspace import Workspace

# Qwen-Image-Edit as published, bf16; the later editions are of the same size.
PUBLISHED = {"transformer": 20.43e9, "text_encoder": 8.29e9, "vae": 0.127e9}
PUBLISHED_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    parameters: int
    disk_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    reference: str
    """As target.json names it"""
    local: bool
    source: str
    components: dict[str, Component]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def collect(workspace: Workspace, reference: str) -> Base:
    try:
        folder = locate_model(workspace, reference)
    except UserError:
        return published(reference)
    return measured(reference, folder)


def measured(reference: str, folder: Path) -> Base:
    """From the safetensors headers of each component's folder; of shards that step 06 fetches, from its listing."""
    components = {}
    for path in sorted(item for item in folder.iterdir() if item.is_dir()):
        listing = path / LISTING
        found = _listed(files.read_json(listing)) if listing.is_file() else _counted(path)
        if found is not None:
            components[path.name] = Component(parameters=found[0], disk_gib=round(found[1] / GIB, 6))
    return Base(reference=reference, local=True, source="the folder's weights", components=components)


def _counted(path: Path) -> tuple[int, int] | None:
    parameters = architecture.count_parameters(path)
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return None if parameters is None else (parameters, size)


def _listed(listing: dict[str, Any]) -> tuple[int, int]:
    """Parameters and bytes, of shards that are dropped too."""
    shards = listing["shards"].values()
    parameters = sum(prod(tensor["shape"]) for shard in shards for tensor in shard["tensors"].values())
    return parameters, sum(shard["size"] for shard in shards)


def published(reference: str) -> Base:
    return Base(
        reference=reference,
        local=False,
        source="the published size of Qwen-Image-Edit: nothing of it is on this machine",
        components={
            name: Component(parameters=int(count), disk_gib=round(count * PUBLISHED_BYTES / GIB, 3))
            for name, count in PUBLISHED.items()
        },
    )


def hub_cache() -> Path:
    """Where the hub's client puts what it fetches; its own variables, in its own order."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface")
    return Path(home).expanduser() / "hub"
