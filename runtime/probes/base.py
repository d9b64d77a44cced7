"""How large the target's base is, and what of it is yet to be fetched, before anything of it is loaded."""

import os
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from runtime import files
from runtime.errors import UserError
from runtime.files import GIB
from runtime.planning import architecture
from runtime.planning.plan import locate_model
from runtime.quantize import made
from runtime.workspace import Workspace

# Qwen-Image-Edit as published, bf16; the later editions are of the same size.
PUBLISHED = {"transformer": 20.43e9, "text_encoder": 8.29e9, "vae": 0.127e9}
PUBLISHED_BYTES = 2

INDEX = "model_index.json"
CACHE, WORKSPACE = "model cache", "workspace"  # places, as evidence 01-host names them


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    parameters: int
    disk_gib: float
    """All of it, here or not."""
    missing_gib: float = 0.0
    """Yet to be fetched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    reference: str
    """As target.json names it"""
    local: bool
    """Nothing of it is yet to be fetched."""
    source: str
    components: dict[str, Component]
    rest_in: str = CACHE
    """The place that what is missing comes to."""
    from_hub: bool = True
    """Whether the hub gives it; a folder of one's own is completed by hand."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def collect(workspace: Workspace, reference: str) -> Base:
    try:
        given = workspace.resolve(reference)
        folder = locate_model(workspace, reference)
    except UserError:
        return published(reference)
    from_hub = folder != given or (folder / made.STATE).is_file()
    if from_hub and not (folder / INDEX).is_file():  # it has just been begun
        return published(reference)
    inside = folder.resolve().is_relative_to(workspace.root.resolve())
    whole = frozenset(name for name, it in made.find(workspace, folder).items() if it.usable)
    found = measured(reference, folder, nf4=workspace.root / made.FOLDER, whole=whole)
    return replace(found, rest_in=WORKSPACE if inside else CACHE, from_hub=from_hub)


def measured(
    reference: str, folder: Path, *, nf4: Path | None = None, whole: frozenset[str] = frozenset()
) -> Base:
    """From the safetensors headers of each component's folder; of shards that step 06 fetches, from its listing.

    `nf4`: what step 06 made of them; whatever is there needs no source any more, nor does a component that is there
    as a `whole`, taken as it was.
    """
    names = {item.name for item in folder.iterdir() if item.is_dir()}
    named = _named(folder)
    components = {}
    for name in sorted(names | (PUBLISHED.keys() & named)):
        found = _component(folder / name, nf4, wanted=name in named)
        if found is not None:
            components[name] = replace(found, missing_gib=0.0) if name in whole else found
    missing = sum(item.missing_gib for item in components.values())
    rest = f", of which {missing:.2f} GiB are yet to be fetched" if missing else ""
    source = f"the folder's weights{rest}"
    return Base(reference=reference, local=not missing, source=source, components=components)


def _named(folder: Path) -> set[str]:
    """What the model's own index names. Raises UserError for one that is no JSON object."""
    path = folder / INDEX
    try:
        document = files.read_json(path)
    except FileNotFoundError:
        return set()
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", remedy="fetch the model again") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no object", remedy="fetch the model again")
    return set(document)


def _component(path: Path, nf4: Path | None, *, wanted: bool) -> Component | None:
    """None for a folder without weights, unless they are `wanted` and so yet to come."""
    if (path / made.LISTING).is_file():
        return _listed(path, nf4)
    parameters = architecture.count_parameters(path)
    if parameters is not None:
        return _sized(parameters, sum(file.stat().st_size for file in path.glob("*.safetensors")))
    index = next(iter(sorted(path.glob("*.safetensors.index.json"))), None)
    total = files.read_json(index).get("metadata", {}).get("total_size") if index is not None else None
    if index is None or total is None:
        return _yet_to_come(path.name) if wanted and path.name in PUBLISHED else None
    return _begun(path, total)


def _begun(path: Path, total: int) -> Component:
    """Some of the shards that an index names; those that are here tell how wide a number is."""
    shards = architecture.shards_of(path)
    here = [shard for shard in shards if shard.is_file()]
    size = sum(shard.stat().st_size for shard in here)
    width = size / architecture.elements(here) if here else PUBLISHED_BYTES
    parts = sum(_part(shard) for shard in shards if not shard.is_file())
    return _sized(round(total / width), total, max(0, total - size - parts))


def _listed(path: Path, nf4: Path | None) -> Component:
    """Of shards that are dropped too, which are not missing where their NF4 is made."""
    shards: dict[str, Any] = files.read_json(path / made.LISTING)["shards"]
    parameters = sum(prod(tensor["shape"]) for it in shards.values() for tensor in it["tensors"].values())
    missing = sum(
        max(0, shard["size"] - _part(path / name))
        for name, shard in shards.items()
        if not (path / name).is_file() and not (nf4 and (nf4 / path.name / name).is_file())
    )
    return _sized(parameters, sum(shard["size"] for shard in shards.values()), missing)


def _part(target: Path) -> int:
    """Bytes that are here of a shard that step 06 is fetching."""
    part = made.partial(target)
    return part.stat().st_size if part.is_file() else 0


def _sized(parameters: int, size: int, missing: int = 0) -> Component:
    return Component(
        parameters=parameters, disk_gib=round(size / GIB, 6), missing_gib=round(missing / GIB, 6)
    )


def _yet_to_come(name: str) -> Component:
    """In its published size."""
    gib = round(PUBLISHED[name] * PUBLISHED_BYTES / GIB, 3)
    return Component(parameters=int(PUBLISHED[name]), disk_gib=gib, missing_gib=gib)


def published(reference: str) -> Base:
    return Base(
        reference=reference,
        local=False,
        source="the published size of Qwen-Image-Edit: nothing of it is on this machine",
        components={name: _yet_to_come(name) for name in PUBLISHED},
    )


def hub_cache() -> Path:
    """Where the hub's client puts what it fetches; its own variables, in its own order."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return Path(folder).expanduser()
    home = os.environ.get("HF_HOME") or Path("~/.cache/huggingface")
    return Path(home).expanduser() / "hub"
