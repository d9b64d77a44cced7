"""NF4 weights as bitsandbytes lays them out, read and measured by numpy, and what is wrong with them."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gates.evidence import EvidenceError
from gates.quantized import STATE, Component
from gates.tensors import TensorEntry

BLOCK, NESTED_BLOCK = 64, 256
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
# component: where its linears are, and names that are none of them
INSIDE = {"transformer": "transformer_blocks.", "text_encoder": ""}
NEVER = ("embed_tokens", "lm_head")
STATE_BYTES_MAX = 512  # of the text with shape and offset; some 170 are usual
MEASURED_WEIGHTS_MAX = (
    2**26
)  # dequantized here again, for each component: all of a tiny one, two large layers


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


def parts_of(weights: int, *, nested: bool = True) -> dict[str, tuple[str, tuple[int, ...]]]:
    """dtype and shape of what belongs to `weights` packed weights; "" is the packed tensor itself.

    `nested`: whether the scales are quantized again, as step 06 makes them.
    """
    blocks = math.ceil(weights / BLOCK)
    plain: dict[str, tuple[str, tuple[int, ...]]] = {
        "": ("U8", (math.ceil(weights / 2), 1)),
        "absmax": ("F32", (blocks,)),
        "quant_map": ("F32", (16,)),
    }
    if not nested:
        return plain
    return {
        **plain,
        "absmax": ("U8", (blocks,)),
        "nested_absmax": ("F32", (math.ceil(blocks / NESTED_BLOCK),)),
        "nested_quant_map": ("F32", (256,)),
    }


def packed_bytes(weights: int, *, nested: bool = True) -> int:
    """The most that `weights` weights take as NF4."""
    sizes = {"U8": 1, "F32": 4}
    return STATE_BYTES_MAX + sum(
        sizes[dtype] * math.prod(shape) for dtype, shape in parts_of(weights, nested=nested).values()
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


def is_nested(component: Component, state: Mapping[str, Any]) -> bool:
    """Whether a weight's scales are quantized again; what step 06 made itself must be."""
    return not component.is_taken or "nested_offset" in state


def dequantize(component: Component, name: str) -> Any:
    """The fp32 weight [out, in] that a packed one stands for."""
    import numpy as np

    made, state = component.made.get(), state_of(component, name)
    packed, scales, values = (
        made[f"{name}.{part}" if part else name].read() for part in ("", "absmax", "quant_map")
    )
    weights = math.prod(state["shape"])
    numbers = np.arange(256)
    pairs = np.stack([values[numbers >> 4], values[numbers & 15]], axis=1)  # of each byte: high half first
    if is_nested(component, state):
        nested, scale_values = (made[f"{name}.nested_{part}"].read() for part in ("absmax", "quant_map"))
        repeated = np.repeat(nested, NESTED_BLOCK)[: scales.size]
        scales = scale_values[scales] * repeated + np.float32(state["nested_offset"])
    restored = pairs[packed.reshape(-1)].reshape(-1)[:weights].reshape(-1, BLOCK)
    restored *= scales[:, None]
    return restored.reshape(state["shape"])


def error_of(component: Component, name: str) -> float:
    """||W - dequantized|| / ||W|| against the base's own weight; NaN or infinity where either holds such."""
    import numpy as np

    exact = component.measurable[name].read().astype(np.float32)
    with np.errstate(all="ignore"):
        gap, norm = np.linalg.norm(dequantize(component, name) - exact), np.linalg.norm(exact)
    return float(gap / norm) if norm > 0 else float(gap)


def measured(component: Component) -> dict[str, float]:
    """Errors of some layers, made anew: the recorded worst, then others by digest until there are enough."""
    there = component.measurable
    worst = [f"{item['name']}.weight" for item in component.record["worst"]]
    names = [name for name in (*worst, *_by_digest(component, worst)) if name in there]
    return {
        name.removesuffix(".weight"): error_of(component, name)
        for name in _some(component, [name for name in names if name in component.packed])
    }


def broken(component: Component) -> list[str]:
    """Of some layers those that stand for numbers that are not finite; all that can be told without a plain base."""
    import numpy as np

    with np.errstate(all="ignore"):
        return [
            name.removesuffix(".weight")
            for name in _some(component, _by_digest(component, []))
            if not np.isfinite(dequantize(component, name)).all()
        ]


def _by_digest(component: Component, but: Sequence[str]) -> list[str]:
    names = set(component.packed) - set(but)
    return sorted(names, key=lambda name: hashlib.sha256(name.encode()).hexdigest())


def _some(component: Component, names: Sequence[str]) -> Iterator[str]:
    """The first of `names`, and those after it that are not too much together."""
    spent = 0
    for name in dict.fromkeys(names):
        size = math.prod(state_of(component, name)["shape"])
        if spent == 0 or spent + size <= MEASURED_WEIGHTS_MAX:
            spent += size
            yield name


# ---- faults

WANTED_CONFIG = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}


OWN_CONFIG = (
    "bnb_4bit_use_double_quant",
    "bnb_4bit_compute_dtype",
)  # of what was made elsewhere both may differ


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
        if component.is_taken and key in OWN_CONFIG:
            continue
        if found.get(key) != value:
            yield f"{component.path}/config.json: quantization_config.{key} is {found.get(key)}, not {value}"
    if component.is_taken:
        return
    skipped = found.get("llm_int8_skip_modules")
    names = [name for name in skipped if isinstance(name, str)] if isinstance(skipped, list) else []
    for kept in component.record["kept"]:
        if not any(kept.endswith(name) for name in names):
            yield f"{component.path}/config.json: llm_int8_skip_modules lacks {kept}, which is not packed"


def _part_faults(component: Component, name: str) -> Iterator[str]:
    made, state = component.made.get(), state_of(component, name)
    parts = parts_of(math.prod(state["shape"]), nested=is_nested(component, state))
    for part, (dtype, shape) in parts.items():
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
    if component.plain is None:
        packed = set()  # the base is NF4: each of its tensors is taken as it is
    for name, tensor in sorted(component.source.get().items()):
        entry = tensor.entry
        if name in packed:
            if state_of(component, name)["shape"] != list(entry.shape):
                yield f"{component.path}: {name} is of another shape than the base's"
            continue
        other = made.get(name)
        if other is None or (other.entry.dtype, other.entry.shape) != (entry.dtype, entry.shape):
            yield f"{component.path}: {name} is not the base's"
        elif (
            component.plain
            and is_linear(component.name, name, entry)
            and name.removesuffix(".weight") not in kept
        ):
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
    states = {name: state_of(component, name) for name in packed}
    weights = {name: math.prod(state["shape"]) for name, state in states.items()}
    parts = {f"{name}.{part}" for name in packed for part in PARTS}
    rest = {name: t.entry for name, t in made.items() if name not in parts and name not in weights}
    if component.plain is not None:
        source = sum(tensor.entry.size for tensor in component.plain.values())
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
        expected=sum(
            packed_bytes(count, nested=is_nested(component, states[name])) for name, count in weights.items()
        )
        + sum(entry.size for entry in rest.values()),
        kept_share=kept / max(1, kept + sum(weights.values())),
    )


# ---- what was fetched


def fetch_faults(component: Component, model: str) -> Iterator[str]:
    """Where the record of a fetched source disagrees with the config, or with what lies in the base's folder."""
    fetched = component.record.get("fetched")
    if fetched is None:
        return
    name, shards = component.name, fetched["shards"]
    if fetched["repo"] != model:
        yield f"{name} was fetched from {fetched['repo']}, the model is {model}"
    yield from (
        f"{name}: {shard} was dropped, and never listed"
        for shard in fetched["dropped"]
        if shard not in shards
    )
    if component.listing is None:
        return
    listing = component.listing.get()
    if (listing.get("repo"), listing.get("revision")) != (fetched["repo"], fetched["revision"]):
        yield f"{name}: the base was fetched from {listing.get('repo')} at {listing.get('revision')}"
    told = {
        shard: {key: item.get(key) for key in ("size", "sha256")} for shard, item in listing["shards"].items()
    }
    yield from (
        f"{name}: {shard} is recorded with another digest than the hub named"
        for shard in sorted(told.keys() | shards.keys())
        if told.get(shard) != shards.get(shard)
    )
