"""Adapter layers whose weights are fp32 and whose activations keep the dtype of the base.

peft brings the input of a LoRA layer to the dtype of its weights. With fp32 weights over a bf16 base that is an
fp32 copy of every activation, and without autocast it is also what is kept for the backward pass: twice the
memory of the input, for each adapted linear. Here the small factors are brought to the input's dtype instead.
Gradients and updates stay fp32. With an fp32 input nothing differs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

SMALLEST_SQUARE = 1e-12  # of a row's length; one that vanishes has no direction to scale


class Factor(nn.Linear):
    """lora_A or lora_B: an fp32 weight, applied in the input's dtype."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight

    def forward(self, input: Tensor) -> Tensor:
        return functional.linear(input, self.weight.to(input.dtype))


class Magnitude(nn.Module):
    """DoRA's length of each row of W + s BA, fp32 [outputs]; a drop-in for peft's layer of that name.

    The frozen W enters only through its rows' lengths, measured once in fp32, and through W A^T, one pass of the
    base layer over r rows. peft forms W + s BA anew in the input's dtype at each pass; in bf16 the rounding of its
    norms makes a fresh adapter change the base. https://huggingface.co/papers/2402.09353, section 4.3
    """

    base_square: Tensor

    def __init__(self, base_layer: nn.Module) -> None:
        from peft.utils.integrations import dequantize_module_weight

        super().__init__()
        with torch.no_grad():
            weight = dequantize_module_weight(base_layer)
            square = weight.float().square().sum(dim=1)
        self.register_buffer("base_square", square, persistent=False)
        self.weight = nn.Parameter(square.sqrt())

    def reset(self) -> None:
        """The base's own lengths: with lora_B at zero the layer is the base again."""
        with torch.no_grad():
            self.weight.copy_(self.base_square.sqrt())

    def forward(
        self,
        x: Tensor,
        *,
        lora_A: nn.Linear,  # noqa: N803 (peft's names)
        lora_B: nn.Linear,  # noqa: N803
        scaling: float,
        base_layer: nn.Module,
        base_result: Tensor | None = None,
        adapter_name: str = "default",
    ) -> Tensor:
        """What the layer adds to the base's output [..., outputs], in the dtype of that output."""
        # peft gives no result where it dropped inputs
        plain = _unbiased(base_layer(x) if base_result is None else base_result, base_layer)
        low: Tensor = lora_B(lora_A(x))
        ratio = self.weight / self._lengths(x, lora_A.weight, lora_B.weight, scaling, base_layer)
        return (ratio - 1).to(plain.dtype) * plain + (ratio * scaling).to(plain.dtype) * low

    @torch.no_grad()
    def _lengths(self, x: Tensor, a: Tensor, b: Tensor, scaling: float, base_layer: nn.Module) -> Tensor:
        """|W + s BA| by rows, a constant to the gradient: |W|^2 + 2 s W A^T . B + s^2 BA . BA."""
        through = _unbiased(base_layer(a.to(x.dtype)), base_layer)  # W A^T, transposed: [r, outputs]
        with torch.autocast(x.device.type, enabled=False):
            cross = (through.float().T * b).sum(dim=1)
            own = ((b @ (a @ a.T)) * b).sum(dim=1)
        square = self.base_square + 2 * scaling * cross + scaling**2 * own
        return square.clamp_min(SMALLEST_SQUARE).sqrt()


def _unbiased(result: Tensor, layer: nn.Module) -> Tensor:
    bias = layer.bias
    return result - bias if isinstance(bias, Tensor) else result


def keep_input_dtype(denoiser: nn.Module, name: str) -> None:
    """Give peft's layers of adapter `name` the classes above; weights become fp32."""
    from peft.tuners.lora import LoraLayer

    for layer in [module for module in denoiser.modules() if isinstance(module, LoraLayer)]:
        made: Any = layer
        made.cast_input_dtype_enabled = False
        for factors in (made.lora_A, made.lora_B):
            factors[name] = Factor(factors[name].float())
        if name in made.lora_magnitude_vector:
            made.lora_magnitude_vector[name] = Magnitude(made.get_base_layer())


def magnitudes(denoiser: nn.Module) -> list[Magnitude]:
    return [module for module in denoiser.modules() if isinstance(module, Magnitude)]
