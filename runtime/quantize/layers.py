"""NF4 layers through bitsandbytes, the same code on CPU, CUDA and XPU.

diffusers' own quantizer refuses a machine without GPU, so a plain linear is replaced by a packed one here.
"""

from typing import Any

import torch
from torch import Tensor, nn

from runtime.quantize import nf4


def nf4_linear(source: nn.Linear, packed: Tensor, state: Any, device: str, dtype: torch.dtype) -> nn.Module:
    """`source` with a packed weight, computing in `dtype` on `device`."""
    import bitsandbytes as bnb

    linear: Any = bnb.nn.Linear4bit(
        source.in_features,
        source.out_features,
        bias=source.bias is not None,
        compute_dtype=dtype,
        quant_type="nf4",
        compress_statistics=True,
        device="meta",
    )
    state.dtype = dtype  # what it is dequantized to; the stored weight's own otherwise
    linear.weight = bnb.nn.Params4bit(
        packed,
        requires_grad=False,
        quant_state=state,
        blocksize=nf4.BLOCK,
        compress_statistics=True,
        quant_type="nf4",
        module=linear,
        bnb_quantized=True,
    ).to(device)
    linear.quant_state = linear.weight.quant_state
    linear.bias = source.bias  # real already, or still to come from its shard
    _never_repack(linear)
    return linear  # type: ignore[no-any-return]


def _never_repack(linear: Any) -> None:
    # In eval mode on AVX512-BF16 processors bitsandbytes repacks the weight in place, after
    # which training fails; without the flag train and eval agree bit for bit.
    if hasattr(linear, "support_avx512bf16_for_cpu"):
        linear.support_avx512bf16_for_cpu = False
