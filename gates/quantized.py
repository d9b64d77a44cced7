"""What step 06 left, read without torch: its evidence, its skip, and models/nf4 beside the base it is of."""

import hashlib
import json
import math
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
SKIP = ".gates/skips/06.json"
EVIDENCE = ".gates/evidence/06-quantize.json"
REMEDY = "finetune quantize"
BLOCK, NESTED_BLOCK = 64, 256
STATE = "quant_state.bitsandbytes__nf4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
# component: where its linears are, and names that are none of them
INSIDE = {"transformer": "transformer_blocks.", "text_encoder": ""}
NEVER = ("embed_tokens", "lm_head")
STATE_BYTES_MAX = 512  # of the text with shape and offset; some 170 are usual
MEASURED_WEIGHTS_MAX = (
    2**26
)  # dequantized here again, for each component: all of a tiny one, two large layers


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
    """None where the base is no folder of this machine"""
    source_fingerprint: str | None
    """now"""

    @property
    def packed(self) -> list[str]:
        """Weights with a quantization state."""
        return sorted(name.removesuffix(f".{STATE}") for name in self.made.get() if name.endswith(STATE))


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
    return Component(
        name=name,
        path=shown,
        record=record,
        file_faults=tuple(_file_faults(folder, record, shown)),
        config=attempt(lambda: _config(folder / "config.json", f"{shown}/config.json")),
        made=attempt(lambda: _tensors(folder, shown)),
        source=attempt(lambda: _tensors(source, f"the base's {name}")) if source is not None else None,
        source_fingerprint=weights_fingerprint(source) if source is not None else None,
    )


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
            found[name] = Tensor(path=path, entry=entry, shown=f"{shown}/{path.name} tensor {name}")
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


# ---- what NF4 is


def is_linear(component: str, name: str, entry: TensorEntry) -> bool:
    """A weight that step 06 may quantize: 2-D, under the component's blocks, no embedding and no head."""
    return (
        name.endswith(".weight")
        and len(entry.shape) == 2
        and entry.dtype in ("F32", "BF16", "F16")
        and name.startswith(INSIDE[component])
        and not any(part in NEVER for part in name.split("."))
    )


def has_whole_blocks(entry: TensorEntry) -> bool:
    """Rows that are no whole blocks stay as they are: bitsandbytes dequantizes some wrongly on a CPU."""
    return entry.shape[1] % BLOCK == 0


def parts_of(weights: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of what belongs to `weights` packed weights; "" is the packed tensor itself."""
    blocks = math.ceil(weights / BLOCK)
    return {
        "": ("U8", (math.ceil(weights / 2), 1)),
        "absmax": ("U8", (blocks,)),
        "quant_map": ("F32", (16,)),
        "nested_absmax": ("F32", (math.ceil(blocks / NESTED_BLOCK),)),
        "nested_quant_map": ("F32", (256,)),
    }


def packed_bytes(weights: int) -> int:
    """The most that `weights` weights take as NF4."""
    sizes = {"U8": 1, "F32": 4}
    return STATE_BYTES_MAX + sum(
        sizes[dtype] * math.prod(shape) for dtype, shape in parts_of(weights).values()
    )


def state_of(component: Component, name: str) -> dict[str, Any]:
    """The text beside a packed weight: its shape, type and block."""
    tensor = component.made.get()[f"{name}.{STATE}"]
    if tensor.entry.dtype != "U8" or tensor.entry.size > STATE_BYTES_MAX:
        raise EvidenceError(tensor.shown, "is no quantization state")
    try:
        state = json.loads(tensor.read().tobytes())
    except ValueError as error:
        raise EvidenceError(tensor.shown, f"is no JSON: {error}") from error
    shape = state.get("shape") if isinstance(state, dict) else None
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and n > 0 for n in shape):
        raise EvidenceError(tensor.shown, "has no shape of two natural numbers")
    return state  # type: ignore[no-any-return]


def dequantize(component: Component, name: str) -> Any:
    """The fp32 weight [out, in] that a packed one stands for."""
    import numpy as np

    made, state = component.made.get(), state_of(component, name)
    packed, absmax, values, nested, scale_values = (
        made[f"{name}.{part}" if part else name].read()
        for part in ("", "absmax", "quant_map", "nested_absmax", "nested_quant_map")
    )
    weights = math.prod(state["shape"])
    numbers = np.arange(256)
    pairs = np.stack([values[numbers >> 4], values[numbers & 15]], axis=1)  # of each byte: high half first
    scales = scale_values[absmax] * np.repeat(nested, NESTED_BLOCK)[: absmax.size] + np.float32(
        state["nested_offset"]
    )
    restored = pairs[packed.reshape(-1)].reshape(-1)[:weights].reshape(-1, BLOCK)
    restored *= scales[:, None]
    return restored.reshape(state["shape"])


def error_of(component: Component, name: str) -> float:
    """||W - dequantized|| / ||W|| against the base's own weight; NaN or infinity where either holds such."""
    import numpy as np

    assert component.source is not None
    exact = component.source.get()[name].read().astype(np.float32)
    with np.errstate(all="ignore"):
        gap, norm = np.linalg.norm(dequantize(component, name) - exact), np.linalg.norm(exact)
    return float(gap / norm) if norm > 0 else float(gap)


def measured(component: Component) -> dict[str, float]:
    """Errors of some layers, made anew: the recorded worst, then others by digest until there are enough."""
    if component.source is None:
        return {}
    source, packed = component.source.get(), component.packed
    worst = [f"{item['name']}.weight" for item in component.record["worst"]]
    others = sorted(set(packed) - set(worst), key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    found: dict[str, float] = {}
    spent = 0
    for name in (*worst, *others):
        if name not in source or name not in packed:
            continue
        size = source[name].entry.elements
        if found and spent + size > MEASURED_WEIGHTS_MAX:
            continue
        spent += size
        found[name.removesuffix(".weight")] = error_of(component, name)
    return found


# ---- faults

WANTED_CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


def recording_faults(component: Component) -> list[str]:
    """Where the folder is not what was recorded, or not what bitsandbytes' loaders read as NF4."""
    faults = [*component.file_faults, *_config_faults(component)]
    packed = component.packed
    faults += [fault for name in packed for fault in _part_faults(component, name)]
    if len(packed) != component.record["linears"]:
        faults.append(
            f"{component.path} holds {len(packed)} NF4 weights, recorded were {component.record['linears']}"
        )
    return [*faults, *_source_faults(component, set(packed))]


def _config_faults(component: Component) -> Iterator[str]:
    found = component.config.get().get("quantization_config")
    if not isinstance(found, dict):
        yield f"{component.path}/config.json has no quantization_config"
        return
    for key, value in WANTED_CONFIG.items():
        if found.get(key) != value:
            yield f"{component.path}/config.json: quantization_config.{key} is {found.get(key)}, not {value}"
    skipped = found.get("llm_int8_skip_modules")
    names = [name for name in skipped if isinstance(name, str)] if isinstance(skipped, list) else []
    for kept in component.record["kept"]:
        if not any(kept.endswith(name) for name in names):
            yield f"{component.path}/config.json: llm_int8_skip_modules lacks {kept}, which is not packed"


def _part_faults(component: Component, name: str) -> Iterator[str]:
    made, state = component.made.get(), state_of(component, name)
    for part, (dtype, shape) in parts_of(math.prod(state["shape"])).items():
        tensor = made.get(f"{name}.{part}" if part else name)
        if tensor is None:
            yield f"{component.path}: {name} lacks {part or 'its packed weight'}"
        elif (tensor.entry.dtype, tensor.entry.shape) != (dtype, shape):
            yield f"{component.path}: {name} {part} is {tensor.entry.dtype} {list(tensor.entry.shape)}"
    if (state.get("quant_type"), state.get("blocksize")) != ("nf4", BLOCK):
        yield f"{component.path}: {name} is {state.get('quant_type')} in blocks of {state.get('blocksize')}"


def _source_faults(component: Component, packed: set[str]) -> Iterator[str]:
    """Against the base, where it is here: each linear packed or kept, every other tensor as it was."""
    if component.source is None:
        return
    made, kept = component.made.get(), set(component.record["kept"])
    for name, tensor in sorted(component.source.get().items()):
        entry = tensor.entry
        if name in packed:
            if state_of(component, name)["shape"] != list(entry.shape):
                yield f"{component.path}: {name} is of another shape than the base's"
            continue
        other = made.get(name)
        if other is None or (other.entry.dtype, other.entry.shape) != (entry.dtype, entry.shape):
            yield f"{component.path}: {name} is not the base's"
        elif is_linear(component.name, name, entry) and name.removesuffix(".weight") not in kept:
            yield f"{component.path}: {name} is not NF4, nor among those that were kept"
    yield from (f"{component.path}: {name} is no tensor of the base" for name in _strange(component, packed))


def _strange(component: Component, packed: set[str]) -> list[str]:
    assert component.source is not None
    parts = {f"{name}.{part}" for name in packed for part in PARTS}
    return sorted(component.made.get().keys() - component.source.get().keys() - parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of tensors."""

    source: int
    made: int
    expected: int
    """the most that the made ones may take"""
    kept_share: float
    """of the weights that could be NF4"""

    @property
    def ratio(self) -> float:
        return self.made / self.source if self.source else math.inf

    @property
    def expected_ratio(self) -> float:
        return self.expected / self.source if self.source else 0.0


def sizes(component: Component) -> Sizes:
    """From the headers alone. A base that is not here is taken to be bf16, as published ones are."""
    made, packed = component.made.get(), component.packed
    weights = {name: math.prod(state_of(component, name)["shape"]) for name in packed}
    parts = {f"{name}.{part}" for name in packed for part in PARTS}
    rest = {name: t.entry for name, t in made.items() if name not in parts and name not in weights}
    if component.source is not None:
        source = sum(tensor.entry.size for tensor in component.source.get().values())
    else:
        source = sum(entry.size for entry in rest.values()) + 2 * sum(weights.values())
    kept = sum(
        entry.elements
        for name, entry in rest.items()
        if is_linear(component.name, name, entry) and has_whole_blocks(entry)
    )
    return Sizes(
        source=source,
        made=sum(tensor.entry.size for tensor in made.values()),
        expected=sum(map(packed_bytes, weights.values())) + sum(entry.size for entry in rest.values()),
        kept_share=kept / max(1, kept + sum(weights.values())),
    )


def wanted(settings: Mapping[str, Any]) -> tuple[str, ...]:
    """The components that the config does not set to `none`, nor replaces: those are quantized while loading."""
    asked = {"transformer": "quantize", "text_encoder": "quantize_text_encoder"}
    model = settings["model"]
    return tuple(
        name for name, key in asked.items() if model[key] != "none" and not model.get(f"{name}_weight")
    )
