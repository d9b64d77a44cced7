"""Adapter layers: what they compute, in which dtype, and what they keep for the backward pass."""

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from runtime import device  # noqa: F401 (quiets a warning of bitsandbytes)
from runtime.training import layers

IN, OUT, TOKENS, RANK, ALPHA = 128, 64, 32, 4, 8
SCALE = ALPHA / RANK


def linear(quantized: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    plain = nn.Linear(IN, OUT).to(dtype)
    if not quantized:
        return plain
    import bitsandbytes

    packed = bitsandbytes.nn.Linear4bit(IN, OUT, compute_dtype=dtype, quant_type="nf4")
    packed.weight = bitsandbytes.nn.Params4bit(plain.weight.data, requires_grad=False, quant_type="nf4")
    packed.bias = nn.Parameter(plain.bias.data)
    return packed.to("cpu")


def adapted(
    *, quantized: bool = False, dtype: torch.dtype = torch.float32, dora: bool = False, **more: Any
) -> Any:
    """A peft layer over one frozen linear, prepared as the trainer does."""
    from peft import LoraConfig, inject_adapter_in_model

    holder = nn.ModuleDict({"q": linear(quantized, dtype)}).requires_grad_(False)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q"], use_dora=dora, **more)
    inject_adapter_in_model(config, holder)
    layers.keep_input_dtype(holder, "default")
    return holder["q"]


def shake(layer: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in trained(layer):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def trained(layer: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in layer.parameters() if parameter.requires_grad]


def inputs(dtype: torch.dtype) -> Tensor:
    return torch.randn((2, TOKENS, IN), generator=torch.Generator().manual_seed(5)).to(dtype).requires_grad_()


def base_weight(layer: Any) -> Tensor:
    from peft.utils.integrations import dequantize_module_weight

    weight: Tensor = dequantize_module_weight(layer.base_layer)
    return weight.detach().double()


def defined(layer: Any, x: Tensor) -> Tensor:
    """m (W + s BA) / |W + s BA| x + b in fp64; the length is a constant. Without DoRA (W + s BA) x + b."""
    a, b = (factors["default"].weight.double() for factors in (layer.lora_A, layer.lora_B))
    weight = base_weight(layer) + SCALE * b @ a
    if "default" in layer.lora_magnitude_vector:
        magnitude = layer.lora_magnitude_vector["default"].weight.double()
        weight = (magnitude / weight.norm(dim=1).detach())[:, None] * weight
    return x.double() @ weight.T + layer.base_layer.bias.double()


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_output_and_gradients_are_those_of_the_definition(quantized: bool, dora: bool) -> None:
    layer = adapted(quantized=quantized, dora=dora)
    shake(layer)
    x = inputs(torch.float32)
    for made in (layer(x), defined(layer, x)):
        made.double().square().mean().backward()
    doubled = [p.grad.clone() for p in (x, *trained(layer))]  # type: ignore[union-attr]
    assert len(doubled) == 1 + 2 + dora
    for tensor in (x, *trained(layer)):
        tensor.grad = None
    torch.testing.assert_close(layer(x).double(), defined(layer, x), rtol=1e-4, atol=1e-5)
    defined(layer, x).square().mean().backward()
    for both, tensor in zip(doubled, (x, *trained(layer)), strict=True):
        torch.testing.assert_close(both, 2 * tensor.grad, rtol=1e-3, atol=1e-6)  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_a_fresh_layer_is_the_base_bit_for_bit(quantized: bool, dora: bool, dtype: torch.dtype) -> None:
    """peft's DoRA is not in bf16: the rounding of its norms scales the rows by up to half a percent."""
    layer = adapted(quantized=quantized, dora=dora, dtype=dtype)
    x = inputs(dtype)
    assert torch.equal(layer(x), layer.base_layer(x))


def test_a_reset_magnitude_is_the_bases_own() -> None:
    layer = adapted(dora=True)
    shake(layer)
    (magnitude,) = layers.magnitudes(layer)
    with torch.no_grad():
        layer.lora_B["default"].weight.zero_()
    x = inputs(torch.float32)
    assert not torch.equal(layer(x), layer.base_layer(x))
    magnitude.reset()
    assert torch.equal(layer(x), layer.base_layer(x))
    assert list(magnitude.state_dict()) == ["weight"]


def test_dora_with_dropout_drops_inputs_of_base_and_adapter_alike() -> None:
    """As peft and the paper do; with a dropout of nearly everything only the bias is left."""
    layer = adapted(dora=True, lora_dropout=0.999999)
    shake(layer)
    x = inputs(torch.float32)
    added = layer.train()(x) - layer.base_layer(x)
    assert torch.equal(added, torch.zeros_like(added))
    assert not torch.equal(layer.eval()(x), layer.base_layer(x))


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_activations_are_kept_in_the_bases_dtype(quantized: bool, dora: bool, autocast: bool) -> None:
    """Nothing with a row per token is fp32, the weights and their gradients are, and the input is kept once."""
    layer = adapted(quantized=quantized, dora=dora, dtype=torch.bfloat16)
    shake(layer)
    x = inputs(torch.bfloat16)
    kept: dict[int, Tensor] = {}
    guard = torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext()

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), guard:
        out = layer(x)
    of_tokens = [tensor for tensor in kept.values() if tensor.numel() >= 2 * TOKENS * RANK]
    of_tokens = [tensor for tensor in of_tokens if 2 * TOKENS in (tensor.shape[0], tensor.shape[:-1].numel())]
    assert {tensor.dtype for tensor in (out, *of_tokens)} == {torch.bfloat16}
    assert x.untyped_storage().data_ptr() in kept
    # The input and A's output; with DoRA also the base's output and B's, which the magnitude's gradient needs.
    assert len(of_tokens) == (4 if dora else 2)
    out.float().square().mean().backward()
    assert {tensor.dtype for p in trained(layer) for tensor in (p, p.grad)} == {torch.float32}  # type: ignore[union-attr]


@pytest.mark.parametrize(("master", "moved"), [(torch.float32, 1e-4), (torch.bfloat16, 0.0)])
def test_small_updates_survive_in_fp32_weights_only(master: torch.dtype, moved: float) -> None:
    """A hundred steps of 1e-6 at 0.1, where neighbours in bf16 are 5e-4 apart."""
    layer = adapted(dtype=torch.bfloat16)
    weight = layer.lora_B["default"].weight
    weight.data = torch.full_like(weight, 0.1, dtype=master)
    before = weight.detach().double()
    optimizer = torch.optim.AdamW([weight], lr=1e-6, weight_decay=0.0)
    x = torch.ones((1, TOKENS, IN), dtype=torch.bfloat16)
    with torch.no_grad():
        layer.lora_A["default"].weight.fill_(0.01)  # with a constant gradient Adam moves by the rate exactly
    for _ in range(100):
        layer(x).float().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    change = before - weight.detach().double()
    assert change.flatten().tolist() == pytest.approx([moved] * weight.numel(), rel=0.01)
