"""NF4 as bitsandbytes stores it: 4-bit weights in blocks of 64, their scales again quantized in blocks of 256.

    X.weight                                 uint8 [ceil(n / 2), 1], two weights a byte, the first one high
    X.weight.absmax                          uint8 [ceil(n / 64)], indices into nested_quant_map
    X.weight.quant_map                       fp32 [16], the sixteen values
    X.weight.nested_absmax                   fp32 [ceil(n / 64 / 256)]
    X.weight.nested_quant_map                fp32 [256]
    X.weight.quant_state.bitsandbytes__nf4   uint8, a JSON text with the shape, dtype and offset

What gets quantized: in the denoiser the linears of its blocks; in the text encoder every linear of language
model and vision tower but the output head, as transformers does by itself. Of these, linears whose rows are no
whole blocks stay as they are: on AVX-512 bitsandbytes 0.50.2 dequantizes some of them wrongly (32 inputs: 37 %
error instead of 9 %). At true size those are the vision tower's down_proj, 0.2 GiB. Quantized is always the
tensor as stored, so that weights made beforehand and weights quantized while loading are the same bits.
"""

from concurrent.futures import Executor
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate
from math import sqrt
from typing import Any

import torch
from torch import Tensor

BLOCK, NESTED_BLOCK = 64, 256
STATE = "quant_state.bitsandbytes__nf4"
PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", STATE)
PIECE = 2**18  # weights that a thread takes at once: small enough for a cache, of a torch call worth making
STRIP = 2**14
QUANTIZABLE = ("F32", "BF16", "F16")
COMPONENTS = ("transformer", "text_encoder")
NEVER = ("embed_tokens", "lm_head")  # an embedding is no linear, the output head is kept by transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Which tensors of a component become NF4: 2-D weights of whole blocks under `inside`, but those in `keep`."""

    inside: str
    """Start of their names; empty for all."""
    keep: tuple[str, ...] = ()
    """Patterns (`*`, `?`, `[...]`) of module names that stay as they are."""

    def takes(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        whole = self.is_linear(name, dtype, shape) and shape[1] % BLOCK == 0
        return whole and not any(fnmatchcase(module_of(name), pattern) for pattern in self.keep)

    def is_linear(self, name: str, dtype: str, shape: tuple[int, ...]) -> bool:
        parts = name.split(".")
        return (
            parts[-1] == "weight"
            and len(shape) == 2
            and dtype in QUANTIZABLE
            and name.startswith(self.inside)
            and not any(part in NEVER for part in parts)
        )


def rule_for(component: str, blocks: str, keep: tuple[str, ...] = ()) -> Rule:
    """`blocks`: the name of the denoiser's block list."""
    return Rule(inside=f"{blocks}." if component == "transformer" else "", keep=keep)


def module_of(name: str) -> str:
    return name.removesuffix(".weight")


def planned(name: str, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that a weight becomes, the text left out: name to (dtype, shape)."""
    weights = shape[0] * shape[1]
    blocks = -(-weights // BLOCK)
    return {
        name: ("U8", (-(-weights // 2), 1)),
        f"{name}.absmax": ("U8", (blocks,)),
        f"{name}.quant_map": ("F32", (16,)),
        f"{name}.nested_absmax": ("F32", (-(-blocks // NESTED_BLOCK),)),
        f"{name}.nested_quant_map": ("F32", (256,)),
    }


def quantize(weight: Tensor, device: str, pool: Executor | None = None) -> tuple[Tensor, Any]:
    """Packed weight and bitsandbytes' QuantState of `weight` [out, in], both on `device`.

    On a CPU piece by piece, which bounds what it takes beside the weight to some 30 MiB for each thread of
    `pool`; the bits are the same with a pool, without, and whatever number of threads torch has.
    """
    if device == "cpu":
        return _quantize_by_pieces(weight.to(device).contiguous(), pool)
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        weight.to(device).contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return packed, state


def _quantize_by_pieces(weight: Tensor, pool: Executor | None) -> tuple[Tensor, Any]:
    from bitsandbytes.functional import QuantState, get_4bit_type, quantize_blockwise

    made = list((pool.map if pool else map)(_quantize_piece, _pieces(weight)))
    packed, scales = torch.cat([piece for piece, _ in made]), torch.cat([scales for _, scales in made])
    offset = _mean(scales)
    nested, of_nested = quantize_blockwise(scales - offset, blocksize=NESTED_BLOCK)
    state = QuantState(
        absmax=nested,
        shape=weight.shape,
        dtype=weight.dtype,
        blocksize=BLOCK,
        code=get_4bit_type("nf4", device="cpu"),
        quant_type="nf4",
        offset=offset,
        state2=of_nested,
    )
    return packed, state


def _quantize_piece(piece: Tensor) -> tuple[Tensor, Tensor]:
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(piece, blocksize=BLOCK, compress_statistics=False, quant_type="nf4")
    return packed, state.absmax


def _pieces(weight: Tensor) -> tuple[Tensor, ...]:
    """Rows of `weight` together; one piece where a row is no whole blocks."""
    columns = weight.shape[1]
    rows = max(1, PIECE // columns) if columns % BLOCK == 0 else len(weight)
    return torch.split(weight, rows)


def _mean(values: Tensor) -> Tensor:
    """In an order of its own: torch's depends on the number of its threads from 32,768 values on."""
    return torch.stack([part.sum() for part in torch.split(values, STRIP)]).sum() / len(values)


def relative_error(weight: Tensor, packed: Tensor, state: Any, pool: Executor | None = None) -> float:
    """||W - dequantized|| / ||W||; 0 for a weight of zeros."""
    if packed.device.type == "cpu":
        return _error_by_pieces(weight, packed, state, pool)
    from bitsandbytes.functional import dequantize_4bit

    exact = weight.to(packed.device, torch.float32)
    restored = dequantize_4bit(packed, state).float()
    norm = exact.norm()
    return 0.0 if norm == 0 else float(restored.sub_(exact).norm() / norm)  # NaN stays NaN


def _error_by_pieces(weight: Tensor, packed: Tensor, state: Any, pool: Executor | None) -> float:
    from bitsandbytes.functional import QuantState, dequantize_4bit, dequantize_blockwise

    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(state.absmax, state.state2) + state.offset

    def squares(place: tuple[int, Tensor]) -> tuple[float, float]:
        start, piece = place
        size = piece.numel()
        own = QuantState(
            absmax=scales[start // BLOCK : -(-(start + size) // BLOCK)],
            shape=piece.shape,
            dtype=state.dtype,
            blocksize=BLOCK,
            code=state.code,
            quant_type="nf4",
        )
        exact = piece.float()
        restored = dequantize_4bit(packed[start // 2 : -(-(start + size) // 2)], own).float()
        return _square(restored.sub_(exact)), _square(exact)

    pieces = _pieces(weight)
    starts = accumulate((piece.numel() for piece in pieces), initial=0)
    found = list((pool.map if pool else map)(squares, zip(starts, pieces, strict=False)))
    gap, norm = sum(gap for gap, _ in found), sum(norm for _, norm in found)
    return 0.0 if norm == 0 else sqrt(gap / norm)


def _square(values: Tensor) -> float:
    flat = values.reshape(-1)
    return float(torch.dot(flat, flat))


def config_entry(skipped: list[str]) -> dict[str, Any]:
    """`quantization_config` of a config.json, by which diffusers and transformers know what they load.

    `skipped`: linears that are not quantized, by the names that the loader will see.
    """
    return {
        "_load_in_4bit": True,
        "_load_in_8bit": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "llm_int8_enable_fp32_cpu_offload": False,
        "llm_int8_has_fp16_weight": False,
        "llm_int8_skip_modules": skipped,
        "llm_int8_threshold": 6.0,
        "load_in_4bit": True,
        "load_in_8bit": False,
        "quant_method": "bitsandbytes",
    }
