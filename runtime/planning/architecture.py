"""The sizes of a base, read from its config.json files and safetensors headers. No weights, no torch.

The folder is one in the diffusers layout: model_index.json, transformer/, vae/, text_encoder/.
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

from runtime import files
from runtime.config.targets import Targets, matching
from runtime.errors import UserError
from runtime.families import registry
from runtime.families.facts import Facts
from runtime.quantize import made

Linear = tuple[int, int]
"""Inputs, outputs."""

NF4_BLOCK = 64  # a linear whose rows are no whole blocks stays as it is; see runtime.quantize.nf4
TIMESTEP_CHANNELS = 256  # fixed in diffusers' QwenTimestepProjEmbeddings
PUBLISHED_VAE = (96, 126.9e6)  # base_dim and parameters of Qwen-Image's VAE


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Of a part of a model."""

    packable: int
    """Weights that NF4 takes."""
    plain: int
    """Biases and norms."""


def is_modulation(name: str) -> bool:
    """Whether a linear is a function of the embedded sigma alone, or embeds it."""
    return name.endswith("_mod.1") or name == "norm_out.linear" or name.startswith("time_text_embed.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Denoiser:
    layers: int
    dim: int
    patch: int
    parameters: int
    block_linears: dict[str, Linear]
    """The linears of one block; these are what NF4 quantizes."""
    outer_linears: dict[str, Linear]
    heads: int
    control_rows: bool = False
    """Control tokens are modulated as at sigma 0 (2511), by a row of their own."""

    @property
    def quantizable(self) -> int:
        """Weights, biases left out, of all linears in blocks."""
        return self.layers * self.block().packable

    def block(self, *, modulation: bool = True) -> "Numbers":
        """Of one block, with or without the linears that a table of modulations replaces."""
        linears = [
            shape for name, shape in self.block_linears.items() if modulation or not is_modulation(name)
        ]
        norms = 4 * self.dim // self.heads  # of q and k of both streams
        return Numbers(
            packable=sum(a * b for a, b in linears), plain=sum(outputs for _, outputs in linears) + norms
        )

    def kept(self, patterns: Iterable[str]) -> frozenset[str]:
        """Linears of blocks whose names fit one of `patterns`, as `runtime.quantize.nf4.Rule` has it."""
        return frozenset(
            name
            for name in self.linears
            if name not in self.outer_linears and any(fnmatchcase(name, pattern) for pattern in patterns)
        )

    def kept_weights(self, names: Iterable[str], *, modulation: bool = True) -> list[int]:
        """Of each block, how many weights are in linears of `names`; with or without those that a table replaces."""
        weights = [0] * self.layers
        for name in names:
            _, layer, linear = name.split(".", 2)
            if linear in self.block_linears and (modulation or not is_modulation(linear)):
                inputs, outputs = self.block_linears[linear]
                weights[int(layer)] += inputs * outputs
        return weights

    def outside(self, *, modulation: bool = True) -> int:
        """Numbers outside the blocks, with or without those that a table of modulations replaces."""
        block = self.block()
        total = self.parameters - self.layers * (block.packable + block.plain)
        replaced = [shape for name, shape in self.outer_linears.items() if is_modulation(name)]
        return total if modulation else total - sum(a * b + b for a, b in replaced)

    @property
    def row_numbers(self) -> int:
        """In a row of the table: each modulation as wide as the widest, the output's too."""
        return (2 * self.layers + 1) * 6 * self.dim

    @property
    def widest(self) -> int:
        """Weights of the largest linear that every token passes."""
        return max(a * b for name, (a, b) in self.block_linears.items() if not is_modulation(name))

    def targeted(self, targets: Targets) -> list[str]:
        """Names of all linears that `targets` means. Raises ConfigError for a target that means none."""
        return matching(list(self.linears), targets)

    @property
    def linears(self) -> dict[str, Linear]:
        """By dotted name, all of them."""
        return {
            f"transformer_blocks.{layer}.{name}": shape
            for layer in range(self.layers)
            for name, shape in self.block_linears.items()
        } | self.outer_linears


@dataclass(frozen=True, slots=True, kw_only=True)
class Vae:
    parameters: int
    base_dim: int
    scale: int
    """Pixels per latent, each side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextEncoder:
    parameters: int
    """Of what is loaded: without the output head."""
    hidden: int
    layers: int
    vocabulary: int
    token_side: int
    """Pixels per image token, each side."""
    linears: dict[str, Linear]
    """By published name, all but the output head."""
    packed: bool = False
    """Whether they are NF4 in the base itself."""

    @property
    def quantizable(self) -> int:
        """Weights, biases left out, of all linears that NF4 takes."""
        return self.kept_weights(self.linears)

    def kept_weights(self, names: Iterable[str]) -> int:
        """Of linears of `names`, those weights that NF4 would take: of rows that are whole blocks of 64."""
        shapes = [self.linears[name] for name in names if name in self.linears]
        return sum(inputs * outputs for inputs, outputs in shapes if inputs % NF4_BLOCK == 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    family: Facts
    denoiser: Denoiser
    vae: Vae
    text_encoder: TextEncoder

    @property
    def size_multiple(self) -> int:
        return self.vae.scale * self.denoiser.patch


def read(model: Path) -> Architecture:
    """Raises UserError for a folder that is no Qwen-Image-Edit base."""
    family = registry.facts(model)
    try:
        return Architecture(
            family=family,
            denoiser=_denoiser(model / "transformer"),
            vae=_vae(model / "vae"),
            text_encoder=_text_encoder(model / "text_encoder"),
        )
    except KeyError as error:
        raise UserError(
            f"a config.json under {model} lacks {error}", remedy="fetch the model again"
        ) from error


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        document = files.read_json(path)
    except FileNotFoundError:
        raise UserError(
            f"{path} is missing", remedy="finetune init --model FOLDER, or fetch the model again"
        ) from None
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}", remedy="fetch the model again") from error
    if not isinstance(document, dict):
        raise UserError(f"{path} holds no object", remedy="fetch the model again")
    return document


def count_parameters(folder: Path) -> int | None:
    """Elements over the headers of all safetensors files; None where files are absent or incomplete."""
    shards = shards_of(folder)
    if not shards or not all(shard.is_file() for shard in shards):
        return None
    return elements(shards)


def elements(shards: Iterable[Path]) -> int:
    """Numbers in safetensors files, by their headers."""
    return sum(int(prod(tensor["shape"])) for shard in shards for tensor in _header(shard).values())


def shards_of(folder: Path) -> list[Path]:
    """The files of a component's weights; those that its index names, whether they are here or not."""
    index = next(iter(sorted(folder.glob("*.safetensors.index.json"))), None)
    if index is None:
        return sorted(folder.glob("*.safetensors"))
    return [folder / name for name in sorted(set(files.read_json(index)["weight_map"].values()))]


def _header(shard: Path) -> dict[str, Any]:
    with shard.open("rb") as handle:
        first = handle.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= shard.stat().st_size - 8:
            raise UserError(f"{shard} is no safetensors file, or is cut off", remedy="fetch the model again")
        header: dict[str, Any] = json.loads(handle.read(length))
    header.pop("__metadata__", None)
    return header


def _denoiser(folder: Path) -> Denoiser:
    config = _config(folder)
    dim = config["num_attention_heads"] * config["attention_head_dim"]
    layers, head = config["num_layers"], config["attention_head_dim"]
    joint, channels, patch = config["joint_attention_dim"], config["in_channels"], config["patch_size"]
    block = _block_linears(dim)
    outer = {
        "img_in": (channels, dim),
        "txt_in": (joint, dim),
        "time_text_embed.timestep_embedder.linear_1": (TIMESTEP_CHANNELS, dim),
        "time_text_embed.timestep_embedder.linear_2": (dim, dim),
        "norm_out.linear": (dim, 2 * dim),
        "proj_out": (dim, patch * patch * config["out_channels"]),
    }
    per_block = sum(a * b + b for a, b in block.values()) + 4 * head  # norms of q, k of both streams
    counted = layers * per_block + sum(a * b + b for a, b in outer.values()) + joint
    return Denoiser(
        layers=layers,
        dim=dim,
        patch=patch,
        parameters=count_parameters(folder) or counted,
        block_linears=block,
        outer_linears=outer,
        heads=config["num_attention_heads"],
        control_rows=bool(config.get("zero_cond_t", False)),
    )


def _block_linears(dim: int) -> dict[str, Linear]:
    """QwenImageTransformerBlock: a double stream of image and text."""
    attention = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
    linears: dict[str, Linear] = {f"attn.{name}": (dim, dim) for name in attention}
    for stream in ("img", "txt"):
        linears[f"{stream}_mod.1"] = (dim, 6 * dim)
        linears[f"{stream}_mlp.net.0.proj"] = (dim, 4 * dim)
        linears[f"{stream}_mlp.net.2"] = (4 * dim, dim)
    return linears


def _vae(folder: Path) -> Vae:
    config = _config(folder)
    base_dim = config["base_dim"]
    guess = round(PUBLISHED_VAE[1] * (base_dim / PUBLISHED_VAE[0]) ** 2)  # almost all of it is convolutions
    return Vae(
        parameters=count_parameters(folder) or guess,
        base_dim=base_dim,
        scale=2 ** len(config["temperal_downsample"]),
    )


def _text_encoder(folder: Path) -> TextEncoder:
    config = _config(folder)
    text, vision = config.get("text_config", config), config["vision_config"]
    return TextEncoder(
        parameters=_count_text_encoder(text, vision),
        hidden=text["hidden_size"],
        layers=text["num_hidden_layers"],
        vocabulary=text["vocab_size"],
        token_side=vision.get("patch_size", 14) * vision.get("spatial_merge_size", 2),
        linears=_text_encoder_linears(text, vision),
        packed=made.is_packed(folder),
    )


def _text_encoder_linears(text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Linear]:
    """Qwen2.5-VL's linears without its output head, by published name."""
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    key_value = hidden // text["num_attention_heads"] * text["num_key_value_heads"]
    width, wide = vision["hidden_size"], vision["intermediate_size"]
    merged = width * vision.get("spatial_merge_size", 2) ** 2
    attention = {
        "q": (hidden, hidden),
        "k": (hidden, key_value),
        "v": (hidden, key_value),
        "o": (hidden, hidden),
    }
    layer = {f"self_attn.{name}_proj": shape for name, shape in attention.items()} | _gated(hidden, inner)
    block = {"attn.qkv": (width, 3 * width), "attn.proj": (width, width), **_gated(width, wide)}
    return {
        **{
            f"model.layers.{n}.{name}": layer[name]
            for n in range(text["num_hidden_layers"])
            for name in layer
        },
        **{f"visual.blocks.{n}.{name}": block[name] for n in range(vision["depth"]) for name in block},
        "visual.merger.mlp.0": (merged, merged),
        "visual.merger.mlp.2": (merged, hidden),
    }


def _gated(width: int, inner: int) -> dict[str, Linear]:
    return {"mlp.gate_proj": (width, inner), "mlp.up_proj": (width, inner), "mlp.down_proj": (inner, width)}


def _count_text_encoder(text: dict[str, Any], vision: dict[str, Any]) -> int:
    """Qwen2.5-VL: language model without its head, vision tower with merger."""
    hidden, inner = text["hidden_size"], text["intermediate_size"]
    key_value = hidden // text["num_attention_heads"] * text["num_key_value_heads"]
    attention = 2 * hidden * hidden + 2 * hidden * key_value + hidden + 2 * key_value
    layer = attention + 3 * hidden * inner + 2 * hidden
    language = text["num_hidden_layers"] * layer + text["vocab_size"] * hidden + hidden
    width, wide = vision["hidden_size"], vision["intermediate_size"]
    block = 4 * width * width + 4 * width + 3 * width * wide + 2 * wide + 3 * width
    merged = width * vision.get("spatial_merge_size", 2) ** 2
    merger = merged * merged + merged + merged * hidden + hidden + width
    patches = 3 * vision.get("temporal_patch_size", 2) * vision.get("patch_size", 14) ** 2 * width
    return int(language + vision["depth"] * block + merger + patches)


def adapter_parameters(denoiser: Denoiser, rank: int, targets: Targets, *, dora: bool = False) -> int:
    """Weights of a LoRA of `rank` on every linear that `targets` means; DoRA has one more for each output.

    Raises ConfigError for a target that means none.
    """
    linears = denoiser.linears
    chosen = [linears[name] for name in matching(list(linears), targets)]
    return sum(rank * (inputs + outputs) + outputs * dora for inputs, outputs in chosen)
