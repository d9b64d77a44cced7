"""A small base with two components, and its NF4 as step 06 would leave it, by numpy alone."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gates.evidence import file_digest, weights_fingerprint
from gates.tensors import read_header

VALUES = np.array(
    [-1.0, -0.69619280, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0, 0.07958030,
     0.16093020, 0.24611230, 0.33791524, 0.44070983, 0.56261700, 0.72295684, 1.0], np.float32
)  # fmt: skip
SCALES = np.linspace(-1, 1, 256, dtype=np.float32)
FILES = {"transformer": "diffusion_pytorch_model.safetensors", "text_encoder": "model.safetensors"}
# component: weights that become NF4, then tensors that do not
PACKED: dict[str, dict[str, tuple[int, ...]]] = {
    "transformer": {f"transformer_blocks.{n}.attn.{to}.weight": (64, 64) for n in (0, 1) for to in ("to_q", "to_v")},
    "text_encoder": {"model.layers.0.mlp.up_proj.weight": (128, 64), "visual.merger.mlp.0.weight": (64, 128)},
}  # fmt: skip
PLAIN: dict[str, dict[str, tuple[int, ...]]] = {
    "transformer": {"proj_out.weight": (16, 64), "transformer_blocks.0.attn.to_q.bias": (64,)},
    "text_encoder": {"model.embed_tokens.weight": (40, 64), "visual.blocks.0.attn.proj.weight": (32, 32)},
}
KEPT = {"transformer": [], "text_encoder": ["visual.blocks.0.attn.proj"]}
CONFIG = {
    "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "bfloat16",
    "llm_int8_skip_modules": ["proj_out", "lm_head", "visual.blocks.0.attn.proj"],
}  # fmt: skip


def weights(component: str) -> dict[str, Any]:
    """The base's tensors; fp16, for numpy has no bf16."""
    rng = np.random.default_rng(len(component))
    shapes = {**PACKED[component], **PLAIN[component]}
    return {name: (rng.standard_normal(shape) * 0.02).astype(np.float16) for name, shape in shapes.items()}


def write_base(folder: Path) -> None:
    for component, name in FILES.items():
        place = folder / component
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps({"of": component}), encoding="utf-8")
        save_file(weights(component), place / name)


def packed(name: str, weight: Any) -> dict[str, Any]:
    """The six tensors of one weight."""
    blocks = weight.astype(np.float32).reshape(-1, 64)
    absmax = np.abs(blocks).max(axis=1)
    offset = np.float32(absmax.mean())
    nested = np.array(
        [np.abs(part).max() for part in np.split(absmax - offset, range(256, absmax.size, 256))]
    )
    nested = nested.astype(np.float32)
    codes = _nearest(SCALES, (absmax - offset) / np.repeat(nested, 256)[: absmax.size])
    halves = _nearest(VALUES, blocks / absmax[:, None]).reshape(-1)
    state = {
        "quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": list(weight.shape),
        "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset),
    }  # fmt: skip
    return {
        name: (halves[0::2] << 4 | halves[1::2]).astype(np.uint8)[:, None],
        f"{name}.absmax": codes,
        f"{name}.quant_map": VALUES,
        f"{name}.nested_absmax": nested,
        f"{name}.nested_quant_map": SCALES,
        f"{name}.quant_state.bitsandbytes__nf4": np.frombuffer(json.dumps(state).encode(), np.uint8),
    }


def _nearest(table: Any, values: Any) -> Any:
    return np.abs(table - values[..., None]).argmin(axis=-1).astype(np.uint8)


def made_tensors(component: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, weight in weights(component).items():
        found |= packed(name, weight) if name in PACKED[component] else {name: weight}
    return found


def write_made(root: Path) -> None:
    """models/nf4 of the workspace `root`."""
    for component, name in FILES.items():
        place = root / "models" / "nf4" / component
        place.mkdir(parents=True)
        save_file(made_tensors(component), place / name)
        config = {"of": component, "quantization_config": CONFIG}
        (place / "config.json").write_text(json.dumps(config), encoding="utf-8")


def record(root: Path, component: str) -> dict[str, Any]:
    """What the evidence says of a component as it lies there."""
    base, made = root / "models" / "base" / component, root / "models" / "nf4" / component
    source = sum(tensor.nbytes for tensor in weights(component).values())
    size = sum(tensor.nbytes for tensor in made_tensors(component).values())
    errors = {name.removesuffix(".weight"): error(component, name) for name in PACKED[component]}
    worst = sorted(errors, key=lambda name: -errors[name])
    return {
        "name": component,
        "source_fingerprint": weights_fingerprint(base),
        "source_fingerprint_after": weights_fingerprint(base),
        "made_fingerprint": weights_fingerprint(made),
        "source_gib": source / 2**30,
        "made_gib": size / 2**30,
        "ratio": size / source,
        "linears": len(errors),
        "keep": [],
        "kept": KEPT[component],
        "mean_error": sum(errors.values()) / len(errors),
        "worst": [{"name": name, "error": errors[name]} for name in worst[:5]],
        "files": {
            path.name: {"size": path.stat().st_size, "sha256": file_digest(path)}
            for path in sorted(made.iterdir())
        },
    }


def error(component: str, name: str) -> float:
    weight = weights(component)[name].astype(np.float32)
    parts = packed(name, weight)
    flat = parts[name].reshape(-1)
    halves = np.stack([flat >> 4, flat & 15], axis=1).reshape(-1)
    offset = json.loads(parts[f"{name}.quant_state.bitsandbytes__nf4"].tobytes())["nested_offset"]
    scales = SCALES[parts[f"{name}.absmax"]] * parts[f"{name}.nested_absmax"][0] + np.float32(offset)
    restored = (VALUES[halves].reshape(-1, 64) * scales[:, None]).reshape(weight.shape)
    return float(np.linalg.norm(restored - weight) / np.linalg.norm(weight))


def data(root: Path) -> dict[str, Any]:
    """Of evidence 06-quantize."""
    return {
        "model": "models/base", "device": "cpu", "seconds": 1.5,
        "components": [record(root, component) for component in FILES],
        "output_error": {"value": 0.05, "reason": "one input"},
    }  # fmt: skip


# ---- other ways to the same weights

FETCHED = {"repo": "models/base", "revision": "c0ffee" + "0" * 34}


def drop(root: Path) -> dict[str, Any]:
    """The denoiser's shard gone, as if it had been fetched and quantized; its record in the evidence."""
    place = root / "models" / "base" / "transformer"
    shard = place / FILES["transformer"]
    told = {"size": shard.stat().st_size, "sha256": file_digest(shard)}
    tensors = {
        name: {"dtype": entry.dtype, "shape": list(entry.shape), "start": entry.start, "size": entry.size}
        for name, entry in read_header(shard, "the shard").items()
    }
    listing = {"schema": "fetched/1", **FETCHED, "shards": {shard.name: {**told, "tensors": tensors}}}
    (place / "fetched.json").write_text(json.dumps(listing), encoding="utf-8")
    shard.unlink()
    return {
        **record(root, "transformer"),
        "fetched": {**FETCHED, "shards": {shard.name: told}, "dropped": [shard.name]},
    }


def take(root: Path) -> dict[str, Any]:
    """The base's denoiser is NF4 itself, its scales in fp32; the record of what was taken of it."""
    made = root / "models" / "nf4" / "transformer"
    tensors: dict[str, Any] = {}
    for name, weight in weights("transformer").items():
        parts = packed(name, weight) if name in PACKED["transformer"] else {name: weight}
        tensors |= single(name, parts) if name in PACKED["transformer"] else parts
    save_file(tensors, made / FILES["transformer"])
    config = {
        "of": "transformer",
        "quantization_config": {**CONFIG, "bnb_4bit_use_double_quant": False, "llm_int8_skip_modules": None},
    }
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    base = root / "models" / "base" / "transformer"
    shutil.rmtree(base)
    shutil.copytree(made, base)
    source = sum(tensor.nbytes for tensor in weights("transformer").values())
    size = sum(tensor.nbytes for tensor in tensors.values())
    return {
        **record(root, "transformer"),
        "made_gib": size / 2**30, "ratio": size / source, "mean_error": None, "worst": [],
        "taken": "models/base/transformer",
    }  # fmt: skip


def single(name: str, parts: dict[str, Any]) -> dict[str, Any]:
    """A packed weight whose scales are not quantized again."""
    state_name = f"{name}.quant_state.bitsandbytes__nf4"
    state = json.loads(parts[state_name].tobytes())
    scales = SCALES[parts[f"{name}.absmax"]] * parts[f"{name}.nested_absmax"][0]
    plain = {key: value for key, value in state.items() if not key.startswith("nested_")}
    return {
        name: parts[name],
        f"{name}.absmax": (scales + np.float32(state["nested_offset"])).astype(np.float32),
        f"{name}.quant_map": VALUES,
        state_name: np.frombuffer(json.dumps(plain).encode(), np.uint8),
    }
