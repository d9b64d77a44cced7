"""What step 06 left, read without torch: its evidence, its skip, and models/nf4 beside the base it is of."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gates.evidence import (
    SAMPLED_ABOVE,
    EvidenceError,
    MissingEvidenceError,
    Reading,
    attempt,
    file_digest,
    inside,
    read_json,
    weights_fingerprint,
)
from gates.tensors import TensorEntry, read_header, read_tensor
from gates.workspace import Workspace

FOLDER = "models/nf4"
LISTING = "fetched.json"
SKIP = ".gates/skips/06.json"
EVIDENCE = ".gates/evidence/06-quantize.json"
REMEDY = "finetune quantize"
STATE = "quant_state.bitsandbytes__nf4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    path: Path
    entry: TensorEntry
    shown: str

    def read(self) -> Any:
        return read_tensor(self.path, self.entry, self.shown)


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    name: str
    path: str
    record: dict[str, Any]
    """what the evidence says of it"""
    file_faults: tuple[str, ...]
    """a line for each file that is absent, unrecorded, or not the bytes that were recorded"""
    config: Reading[dict[str, Any]]
    made: Reading[dict[str, Tensor]]
    source: Reading[dict[str, Tensor]] | None
    """None where the base is no folder of this machine, or weights were taken for it in place of fetching its shards.
    Of shards that were fetched and dropped, what they held."""
    listing: Reading[dict[str, Any]] | None
    """the base's fetched.json; None where the base is not here, or was not fetched by step 06"""
    source_fingerprint: str | None
    """now"""

    @property
    def packed(self) -> list[str]:
        """Weights with a quantization state."""
        return sorted(name.removesuffix(f".{STATE}") for name in self.made.get() if name.endswith(STATE))

    @property
    def dropped(self) -> list[str]:
        """Shards of the base that step 06 fetched and removed again."""
        return self.record["fetched"]["dropped"] if "fetched" in self.record else []

    @property
    def is_taken(self) -> bool:
        """Made by somebody else, so of any layout that bitsandbytes reads."""
        return "taken" in self.record

    @property
    def plain(self) -> dict[str, Tensor] | None:
        """The base's tensors, unless it is not here, or is NF4 itself."""
        found = self.source.get() if self.source is not None else {}
        return found if found and not any(name.endswith(STATE) for name in found) else None

    @property
    def measurable(self) -> dict[str, Tensor]:
        """The base's tensors that are here, in plain."""
        plain = (self.plain or {}).items()
        return {name: it for name, it in plain if it.path.is_file() and it.path.name not in self.dropped}


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantized:
    data: dict[str, Any]
    """of the evidence"""
    components: tuple[Component, ...]


def read(workspace: Workspace) -> Quantized:
    data = workspace.evidence("06-quantize")
    model = attempt(lambda: _model(workspace))
    return Quantized(
        data=data,
        components=tuple(_component(workspace, item, model.value) for item in data["components"]),
    )


def read_skip(workspace: Workspace) -> Reading[dict[str, Any]] | None:
    """None where nothing says to skip the step."""
    path = workspace.root / SKIP
    return attempt(lambda: workspace.json(path, "skip")) if path.is_file() else None


def _model(workspace: Workspace) -> Path:
    folder = workspace.resolve(workspace.settings["model"]["pretrained_model_name_or_path"])
    if not folder.is_dir():
        raise MissingEvidenceError(workspace.shown(folder), "is no folder here")
    return folder


def _component(workspace: Workspace, record: dict[str, Any], model: Path | None) -> Component:
    name, shown = record["name"], f"{FOLDER}/{record['name']}"
    folder = workspace.root / FOLDER / name
    source = model / name if model is not None and (model / name).is_dir() else None
    listing = None
    if source is not None and "fetched" in record:
        listing = attempt(lambda: _listing(source / LISTING, f"the base's {name}/{LISTING}"))
    return Component(
        name=name,
        path=shown,
        record=record,
        file_faults=tuple(_file_faults(folder, record, shown)),
        config=attempt(lambda: _config(folder / "config.json", f"{shown}/config.json")),
        made=attempt(lambda: _tensors(folder, shown)),
        source=_source(source, record, listing, f"the base's {name}"),
        listing=listing,
        source_fingerprint=weights_fingerprint(source) if source is not None else None,
    )


def _source(
    folder: Path | None, record: dict[str, Any], listing: Reading[dict[str, Any]] | None, shown: str
) -> Reading[dict[str, Tensor]] | None:
    if folder is None or ("taken" in record and not _is_whole(folder, shown)):
        return None
    if listing is not None and record["fetched"]["dropped"]:
        return attempt(lambda: _listed(folder, listing.get(), shown))
    return attempt(lambda: _tensors(folder, shown))


def _listing(path: Path, shown: str) -> dict[str, Any]:
    document = read_json(path, shown)
    shards = document.get("shards") if isinstance(document, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(item, dict) for item in shards.values()):
        raise EvidenceError(shown, "lists no shards")
    return document  # type: ignore[no-any-return]


def _listed(folder: Path, listing: dict[str, Any], shown: str) -> dict[str, Tensor]:
    """The tensors of shards that are here or were, by what the fetch wrote down."""
    found = {}
    try:
        for shard, item in listing["shards"].items():
            for name, told in item["tensors"].items():
                entry = TensorEntry(
                    dtype=told["dtype"],
                    shape=tuple(map(int, told["shape"])),
                    start=int(told["start"]),
                    size=int(told["size"]),
                )
                place = inside(folder, shard, f"{shown}/{shard}")
                found[_published(name)] = Tensor(path=place, entry=entry, shown=f"{shown}/{shard} {name}")
    except (KeyError, TypeError, ValueError) as error:
        raise EvidenceError(f"{shown}/{LISTING}", f"tells of no tensors: {error!r}") from error
    return found


def _is_whole(folder: Path, shown: str) -> bool:
    """Whether there are shards, and each is here; the folder's fingerprint tells if they were when step 06 ran."""
    found = attempt(lambda: _shards(folder, shown)).value
    return bool(found) and all(path.is_file() for path in found or ())


def _published(name: str) -> str:
    """transformers puts a level more before the names of a text encoder than the published files have."""
    for longer, shorter in (("model.language_model.", "model."), ("model.visual.", "visual.")):
        if name.startswith(longer):
            return shorter + name.removeprefix(longer)
    return name


def _file_faults(folder: Path, record: dict[str, Any], shown: str) -> Iterator[str]:
    """Large files are known by size and by the fingerprint of the folder, which samples them."""
    if not folder.is_dir():
        yield f"{shown} is missing"
        return
    recorded = record["files"]
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    found = [f"{shown}/{name} was not there when step 06 ended" for name in sorted(there - recorded.keys())]
    for name, item in sorted(recorded.items()):
        path = inside(folder, name, f"{shown}/{name}")
        if not path.is_file():
            found.append(f"{shown}/{name} is missing")
        elif path.stat().st_size != item["size"]:
            found.append(f"{shown}/{name} has {path.stat().st_size} bytes, recorded were {item['size']}")
        elif item["size"] <= SAMPLED_ABOVE and file_digest(path) != item["sha256"]:
            found.append(f"{shown}/{name} has other bytes than were recorded")
    yield from found
    if not found and weights_fingerprint(folder) != record["made_fingerprint"]:
        yield f"{shown} has another fingerprint than was recorded"


def _config(path: Path, shown: str) -> dict[str, Any]:
    document = read_json(path, shown)
    if not isinstance(document, dict):
        raise EvidenceError(shown, "is no object")
    return document


def _tensors(folder: Path, shown: str) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in _shards(folder, shown):
        for name, entry in read_header(path, f"{shown}/{path.name}").items():
            tensor = Tensor(path=path, entry=entry, shown=f"{shown}/{path.name} tensor {name}")
            found[_published(name)] = tensor
    if not found:
        raise MissingEvidenceError(shown, "holds no weights")
    return found


def _shards(folder: Path, shown: str) -> list[Path]:
    """Those that an index names, else the one file; other variants may lie beside them."""
    for stem in ("diffusion_pytorch_model.safetensors", "model.safetensors"):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            document = read_json(index, f"{shown}/{index.name}")
            names = document.get("weight_map") if isinstance(document, dict) else None
            if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
                raise EvidenceError(f"{shown}/{index.name}", "has no weight_map from tensors to files")
            return [inside(folder, name, f"{shown}/{name}") for name in sorted(set(names.values()))]
        if (folder / stem).is_file():
            return [folder / stem]
    return sorted(folder.glob("*.safetensors"))


def wanted(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The components that the config does not set to `none`, nor replaces: those are quantized while loading."""
    asked = {"transformer": "quantize", "text_encoder": "quantize_text_encoder"}
    model = settings["model"]
    return tuple(
        name for name, key in asked.items() if model[key] != "none" and not model.get(f"{name}_weight")
    )
