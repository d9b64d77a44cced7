"""NF4 base weights in memory through bitsandbytes, the same code on CPU, CUDA and XPU.

`load_nf4` quantizes while loading, `load_made` reads what step 06 made; the two give the same bits. diffusers'
own quantizer refuses a machine without GPU, so the linear layers of the blocks are replaced here. Weights
arrive one tensor at a time: no second full copy, and no large warm-up allocation (the published recipe's
online path dies of one on XPU).
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime import device as devices
from runtime.errors import UserError
from runtime.memory import nf4, shards


def load_nf4(model_class: Any, folder: Path, device: str, dtype: torch.dtype, *, blocks: str) -> nn.Module:
    """A frozen `model_class` from `folder`, the linears under `blocks` in NF4, the rest in `dtype`."""
    model = empty(model_class, folder)
    fill(model, shards.tensors(folder), device, dtype, rule=nf4.rule_for("transformer", blocks))
    return _finished(model, folder)


def fill(
    model: nn.Module,
    tensors: Iterable[tuple[str, Tensor]],
    device: str,
    dtype: torch.dtype,
    *,
    rule: nf4.Rule | None,
) -> None:
    """Give `model` its weights one by one, in `dtype`; what `rule` takes becomes NF4."""
    for name, tensor in tensors:
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        taken = rule is not None and rule.takes(name, shards.NAMES[tensor.dtype], tuple(tensor.shape))
        if taken and type(module) is nn.Linear:
            packed, state = nf4.quantize(tensor, devices.quantizing(device))
            _replace(model, module_name, nf4_linear(module, packed, state, device, dtype))
        else:
            _set(module, leaf, tensor, device, dtype)
    if rule is not None:
        model.is_loaded_in_4bit = True  # type: ignore[assignment]  # or peft wraps the layers as plain ones


def load_made(model_class: Any, folder: Path, device: str, dtype: torch.dtype) -> nn.Module:
    """A frozen `model_class` from what step 06 made in `folder`: packed where it is, the rest in `dtype`."""
    from bitsandbytes.functional import QuantState

    model = empty(model_class, folder)
    for name, tensor, parts in _made_tensors(folder):
        module_name, _, leaf = name.rpartition(".")
        module = model.get_submodule(module_name)
        if parts and isinstance(module, nn.Linear):
            state = QuantState.from_dict(parts, torch.device("cpu"))
            _replace(model, module_name, nf4_linear(module, tensor, state, device, dtype))
        else:
            _set(module, leaf, tensor, device, dtype)
    return _finished(model, folder)


def compute_in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`model`, whose packed layers a library has loaded, computing in `dtype`; packed weights stay as they are.

    The library leaves the others in the dtype of the file, whatever it was asked for.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.compute_dtype = dtype
            module.weight.quant_state.dtype = dtype
            _never_repack(module)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    return model


def empty(model_class: Any, folder: Path, changes: Mapping[str, Any] | None = None) -> nn.Module:
    """A `model_class` without weights, of the config in `folder` with `changes`."""
    from accelerate import init_empty_weights

    config = {k: v for k, v in model_class.load_config(folder).items() if k != "quantization_config"}
    with init_empty_weights():
        model: nn.Module = model_class.from_config({**config, **(changes or {})})
    return model


def _made_tensors(folder: Path) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Name and tensor, and the parts of its quantization state, which follow it in the same shard."""
    for shard in shards.find(folder):
        header = shards.read_header(shard)
        packed = {name.removesuffix(f".{nf4.STATE}") for name in header if name.endswith(nf4.STATE)}
        for name, entry in header.items():
            if name.rpartition(".weight.")[0] + ".weight" in packed:
                continue
            parts = {
                other.removeprefix(f"{name}."): shards.read_tensor(shard, header[other])
                for other in header
                if name in packed and other.startswith(f"{name}.")
            }
            yield name, shards.read_tensor(shard, entry), parts


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


def _set(module: nn.Module, leaf: str, tensor: Tensor, device: str, dtype: torch.dtype) -> None:
    setattr(module, leaf, nn.Parameter(tensor.to(device, dtype), requires_grad=False))


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _finished(model: nn.Module, folder: Path) -> nn.Module:
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} tensors, first {missing[0]}", remedy=shards.FETCH)
    model.is_loaded_in_4bit = True  # type: ignore[assignment]  # or peft wraps the layers as plain ones
    return model.requires_grad_(False)
