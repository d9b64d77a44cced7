"""The frozen tensors of a block in one buffer of host memory, and as parameters over a copy of it.

Parameters are views; an NF4 weight takes the tensors of its quantization state along. A block whose buffer has been
copied gets new parameters over the copy, never new data in old ones: autograd saves a leaf itself.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

ALIGN = 256  # bytes; no less than what allocators give, so kernels take the paths that they take otherwise


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a tensor lies in its block's buffer."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.start : self.end].view(self.dtype).view(self.shape)


PARTS = ("absmax", "code", "offset", "state2.absmax", "state2.code")


@dataclass(slots=True, kw_only=True)
class Item:
    """A frozen parameter of a module: its tensors, the parts of an NF4 weight's state after the weight."""

    module: nn.Module
    leaf: str
    places: tuple[Place, ...]
    parts: tuple[str, ...]
    resting: nn.Parameter
    """Over host memory; what the module holds while its block is not in use."""
    live: tuple[Tensor, ...] = ()
    """On the device, while it is."""

    def put(self, buffer: Tensor) -> None:
        self.live = tuple(place.view(buffer) for place in self.places)
        self._set(self.made(self.live))

    def rest(self) -> None:
        self.live = ()
        self._set(self.resting)

    def made(self, tensors: Sequence[Tensor]) -> nn.Parameter:
        """A new parameter over `tensors`: autograd saves the old one itself, whose data must stay as they are."""
        if not self.parts:
            return nn.Parameter(tensors[0], requires_grad=False)
        old: Any = self.resting
        made: nn.Parameter = type(old)(
            tensors[0],
            requires_grad=False,
            quant_state=self.state(tensors[1:]),
            blocksize=old.blocksize,
            compress_statistics=old.compress_statistics,
            quant_type=old.quant_type,
            quant_storage=old.quant_storage,
            bnb_quantized=True,
        )
        return made

    def state(self, tensors: Sequence[Tensor]) -> Any:
        """The quantization state with other tensors."""
        made = copy.copy(self.resting.quant_state)  # type: ignore[attr-defined]
        made.state2 = copy.copy(made.state2)
        for name, tensor in zip(self.parts, tensors, strict=True):
            outer, _, leaf = name.rpartition(".")
            setattr(made.state2 if outer else made, leaf, tensor)
        return made

    def install(self) -> None:
        """Give a packed linear the forward that can let its weight go."""
        trained = getattr(getattr(self.module, "bias", None), "requires_grad", False)
        if self.parts and not trained:
            plain: Any = self.module.forward
            self.module.forward = functools.partial(_forward, plain, self)

    def uninstall(self) -> None:
        """What the module holds now is its own."""
        self.live = ()
        self.module.__dict__.pop("forward", None)

    def _set(self, parameter: nn.Parameter) -> None:
        self.module._parameters[self.leaf] = parameter
        if self.parts:  # the layer remembers it, and would keep the copy alive
            self.module.quant_state = parameter.quant_state  # type: ignore[attr-defined]


def _parts(parameter: nn.Parameter) -> dict[str, Tensor]:
    """The tensors of an NF4 weight's quantization state, by name; none of a plain parameter."""
    state = getattr(parameter, "quant_state", None)
    if state is None:
        return {}
    nested = state.state2
    found = {name: getattr(nested if "." in name else state, name.rpartition(".")[2], None) for name in PARTS}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, Tensor)}


def _frozen(block: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
    return [
        (module, leaf, parameter)
        for module in block.modules()
        for leaf, parameter in module.named_parameters(recurse=False)
        if not parameter.requires_grad
    ]


def frozen_bytes(block: nn.Module) -> int:
    """Of the buffer that `block` would have: its frozen parameters, states of packed ones, and alignment."""
    end = 0
    for _, _, parameter in _frozen(block):
        for tensor in (parameter, *_parts(parameter).values()):
            end = _aligned(end) + tensor.numel() * tensor.element_size()
    return _aligned(end)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def move(block: nn.Module, buffer: Tensor) -> list[Item]:
    """The frozen tensors of `block` into `buffer`, one after the other, each let go before the next."""
    items: list[Item] = []
    end = 0
    found = _frozen(block)
    while found:
        module, leaf, parameter = found.pop(0)
        parts = _parts(parameter)
        places = []
        for tensor in (parameter, *parts.values()):
            place = Place(start=_aligned(end), shape=tuple(tensor.shape), dtype=tensor.dtype)
            place.view(buffer).copy_(tensor.detach())
            places.append(place)
            end = place.end
        item = Item(module=module, leaf=leaf, places=tuple(places), parts=tuple(parts), resting=parameter)
        item.resting = item.made([place.view(buffer) for place in item.places])
        item.rest()
        items.append(item)
    return items


# ---- packed linears


class _Packed(torch.autograd.Function):
    """bitsandbytes' linear, its weight saved where activation checkpointing sees it.

    Its own function keeps the weight as an attribute of the graph's node, which no hook for saved tensors reaches:
    each copy would stay on the device from its forward to its backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, forward: Callable[[Tensor], Tensor], item: Item, *tensors: Tensor
    ) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.item = item
        return forward(given)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from bitsandbytes.functional import dequantize_4bit

        packed, *parts = ctx.saved_tensors  # once: asked again, checkpointing would recompute again
        (gradient,) = gradients
        dtype = ctx.item.module.compute_dtype or gradient.dtype
        weight = dequantize_4bit(packed, ctx.item.state(parts)).to(dtype)
        back = torch.matmul(gradient.to(dtype), weight).to(gradient.dtype)
        return back, None, None, *(None for _ in (packed, *parts))


def _forward(forward: Callable[[Tensor], Tensor], item: Item, given: Tensor) -> Tensor:
    if torch.is_grad_enabled() and given.requires_grad:
        return _Packed.apply(given, forward, item, *item.live)  # type: ignore[no-any-return,no-untyped-call]
    return forward(given)
