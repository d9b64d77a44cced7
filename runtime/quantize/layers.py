"""NF4 layers through bitsandbytes, the same code on CPU, CUDA and XPU.

diffusers' own quantizer refuses a machine without GPU, so a plain linear is replaced by a packed one here.

Compiled, its product is an operator of our own: before torch 2.13 a compiler that checkpoints keeps whatever an
autograd function such as bitsandbytes' makes, which of a step on NF4 was every output of every linear.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from runtime.quantize import nf4

Parts = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""absmax and code of the blocks; absmax, code and offset of the second quantization, if there is one."""


def nf4_linear(source: nn.Linear, packed: Tensor, state: Any, device: str, dtype: torch.dtype) -> nn.Module:
    """`source` with a packed weight, computing in `dtype` on `device`."""
    import bitsandbytes as bnb

    linear: Any = _class()(
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


@functools.cache
def _class() -> Any:
    from bitsandbytes.nn import Linear4bit

    class Linear(Linear4bit):  # type: ignore[misc]  # bitsandbytes has no types
        def forward(self, given: Tensor) -> Tensor:
            back = torch.is_grad_enabled() and given.requires_grad
            if not (back and torch.compiler.is_compiling()):
                return super().forward(given)  # type: ignore[no-any-return]
            state, dtype = self.weight.quant_state, self.compute_dtype or given.dtype
            nested = state.state2
            parts = (nested.absmax, nested.code, state.offset) if state.nested else (None, None, None)
            bias = None if self.bias is None else self.bias.to(dtype)
            sizes = (*state.shape, state.blocksize, nested.blocksize if state.nested else 0)
            made: Tensor = product(
                given.to(dtype), self.weight, bias, state.absmax, state.code, *parts, *sizes
            )
            return made.to(given.dtype)

    Linear.__name__ = Linear.__qualname__ = Linear4bit.__name__  # by which libraries know it
    return Linear


@torch.library.custom_op("aipc_finetune::nf4_product", mutates_args=())
def product(
    given: Tensor,
    packed: Tensor,
    bias: Tensor | None,
    absmax: Tensor,
    code: Tensor,
    absmax2: Tensor | None,
    code2: Tensor | None,
    offset: Tensor | None,
    height: int,
    width: int,
    block: int,
    block2: int,
) -> Tensor:
    """`given` [..., width] times the transposed weight [height, width], plus `bias`: bitsandbytes' own product."""
    import bitsandbytes as bnb

    state = _state((absmax, code, absmax2, code2, offset), (height, width), (block, block2), given.dtype)
    # Transposed as bitsandbytes' own layer does: before 0.50 the order of the axes says which way the weight lies.
    made: Tensor = bnb.matmul_4bit(given, packed.t(), quant_state=state, bias=bias)
    return made


@product.register_fake
def _(given: Tensor, packed: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return given.new_empty((*given.shape[:-1], rest[5]))


@torch.library.custom_op("aipc_finetune::nf4_product_back", mutates_args=())
def product_back(
    gradient: Tensor,
    packed: Tensor,
    absmax: Tensor,
    code: Tensor,
    absmax2: Tensor | None,
    code2: Tensor | None,
    offset: Tensor | None,
    height: int,
    width: int,
    block: int,
    block2: int,
) -> Tensor:
    """`gradient` [..., height] times the weight [height, width]."""
    from bitsandbytes.functional import dequantize_4bit

    state = _state((absmax, code, absmax2, code2, offset), (height, width), (block, block2), gradient.dtype)
    return torch.matmul(gradient, dequantize_4bit(packed, state))


@product_back.register_fake
def _(gradient: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    return gradient.new_empty((*gradient.shape[:-1], rest[6]))


def _state(parts: Parts, shape: tuple[int, int], blocks: tuple[int, int], dtype: torch.dtype) -> Any:
    from bitsandbytes.functional import QuantState

    absmax, code, absmax2, code2, offset = parts
    nested = None
    if absmax2 is not None:
        nested = QuantState(absmax2, code=code2, blocksize=blocks[1], dtype=torch.float32)
    return QuantState(
        absmax,
        shape=torch.Size(shape),
        code=code,
        blocksize=blocks[0],
        quant_type="nf4",
        dtype=dtype,
        offset=offset,
        state2=nested,
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, packed, _, *parts = inputs[:8]
    ctx.save_for_backward(packed, *parts)
    ctx.sizes = inputs[8:]


def _back(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    packed, *parts = ctx.saved_tensors
    to_given = product_back(gradient, packed, *parts, *ctx.sizes) if ctx.needs_input_grad[0] else None
    to_bias = gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
    return (to_given, None, to_bias, *[None] * 9)


product.register_autograd(_back, setup_context=_keep)
