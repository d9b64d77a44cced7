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

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

BLOCK, NESTED_BLOCK = 64, 256
STATE = "quant_state.bitsandbytes__nf4"
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


def quantize(weight: Tensor, device: str) -> tuple[Tensor, Any]:
    """Packed weight and bitsandbytes' QuantState of `weight` [out, in], both on `device`."""
    from bitsandbytes.functional import quantize_4bit

    packed, state = quantize_4bit(
        weight.to(device).contiguous(), blocksize=BLOCK, compress_statistics=True, quant_type="nf4"
    )
    return packed, state


def relative_error(weight: Tensor, packed: Tensor, state: Any) -> float:
    """||W - dequantized|| / ||W||, in fp32; 0 for a weight of zeros."""
    from bitsandbytes.functional import dequantize_4bit

    exact = weight.to(packed.device, torch.float32)
    restored = dequantize_4bit(packed, state).float()
    norm = exact.norm()
    return float(restored.sub_(exact).norm() / norm) if norm > 0 else 0.0


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
