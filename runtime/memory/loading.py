"""Weights into a model tensor by tensor: from shards, from what step 06 made, or from a single checkpoint.

No second full copy at any time, neither on the device nor in host memory, and no large warm-up allocation (the
published recipe's online path dies of one on XPU). NF4 that is made while loading has the bits of what step 06
makes. A module may be left out, to be made later or never.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runtime import device as devices
from runtime import shards
from runtime.errors import UserError
from runtime.quantize import nf4
from runtime.quantize.layers import nf4_linear

Wanted = Callable[[str], bool]
"""Whether a tensor of that name is to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A tensor of a model; `parts` of its quantization state where it is packed."""

    name: str
    tensor: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what it stands for."""
        if not self.parts:
            return tuple(self.tensor.shape)
        told = json.loads(bytes(self.parts[nf4.STATE].tolist()))
        return tuple(told["shape"])


class Source(Protocol):
    """Where the weights of one model lie."""

    def pieces(self, wanted: Wanted) -> Iterator[Piece]:
        """The wanted ones, one at a time, in the order of the files."""


@dataclass(frozen=True, slots=True)
class Folder:
    """A component's folder: plain weights, or NF4 as step 06 makes it."""

    path: Path

    def pieces(self, wanted: Wanted) -> Iterator[Piece]:
        headers = {shard: shards.read_header(shard) for shard in shards.find(self.path)}
        # A library that saves NF4 may put a weight and its state into different files.
        places = {name: (shard, it) for shard, header in headers.items() for name, it in header.items()}
        packed = {name.removesuffix(f".{nf4.STATE}") for name in places if name.endswith(nf4.STATE)}
        for shard, header in headers.items():
            for name, entry in header.items():
                if name.rpartition(".weight.")[0] + ".weight" in packed or not wanted(name):
                    continue
                parts = {
                    part: shards.read_tensor(*places[f"{name}.{part}"])
                    for part in nf4.PARTS
                    if name in packed and f"{name}.{part}" in places
                }
                yield Piece(name=name, tensor=shards.read_tensor(shard, entry), parts=parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How pieces become a model's parameters."""

    dtype: torch.dtype
    device: str
    rule: nf4.Rule | None = None
    """What becomes NF4 of weights that are not packed yet."""
    on_host: Wanted = lambda name: False
    """Which tensors stay in host memory, to be streamed."""

    def put(self, model: nn.Module, piece: Piece) -> None:
        """Give the module that `piece` belongs to its parameter, or make of it a packed one."""
        module_name, _, leaf = piece.name.rpartition(".")
        module = model.get_submodule(module_name)
        where = "cpu" if self.on_host(piece.name) else self.device
        if type(module) is nn.Linear and piece.parts:
            from bitsandbytes.functional import QuantState

            state = QuantState.from_dict(dict(piece.parts), torch.device("cpu"))
            replace(model, module_name, nf4_linear(module, piece.tensor, state, where, self.dtype))
        elif type(module) is nn.Linear and self._packs(piece):
            packed, state = nf4.quantize(piece.tensor, devices.quantizing(self.device))
            replace(model, module_name, nf4_linear(module, packed, state, where, self.dtype))
        else:
            parameter = nn.Parameter(piece.tensor.to(where, self.dtype), requires_grad=False)
            setattr(module, leaf, parameter)

    def _packs(self, piece: Piece) -> bool:
        kind, shape = shards.NAMES[piece.tensor.dtype], tuple(piece.tensor.shape)
        return self.rule is not None and self.rule.takes(piece.name, kind, shape)


def load(
    model_class: Any,
    folder: Path,
    source: Source,
    placement: Placement,
    *,
    changes: Mapping[str, Any] | None = None,
    left_out: Wanted = lambda name: False,
) -> nn.Module:
    """A frozen `model_class` of the config in `folder`, its weights from `source`.

    As `fill`; `changes` are of the config.
    """
    return fill(empty(model_class, folder, changes), folder, source, placement, left_out=left_out)


def fill(
    model: nn.Module,
    folder: Path,
    source: Source,
    placement: Placement,
    *,
    left_out: Wanted = lambda name: False,
) -> nn.Module:
    """`model`, made empty of the config in `folder`, frozen and with weights from `source`.

    What is `left_out` stays without storage. Raises UserError where `source` lacks a tensor, or has one too many.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for piece in source.pieces(lambda name: not left_out(name)):
        if shapes.get(piece.name) != piece.shape:
            raise UserError(
                f"{folder}: {piece.name} {list(piece.shape)} is not of this model, expected "
                f"{list(shapes[piece.name]) if piece.name in shapes else 'no such tensor'}",
                remedy=shards.FETCH,
            )
        placement.put(model, piece)
    missing = [name for name, p in model.named_parameters() if p.is_meta and not left_out(name)]
    if missing:
        raise UserError(f"{folder} lacks {len(missing)} tensors, first {missing[0]}", remedy=shards.FETCH)
    if any(isinstance(module, _packed()) for module in model.modules()):
        model.is_loaded_in_4bit = True  # type: ignore[assignment]  # or peft wraps the layers as plain ones
    return model.requires_grad_(False)


def empty(model_class: Any, folder: Path, changes: Mapping[str, Any] | None = None) -> nn.Module:
    """A `model_class` without weights, of the config in `folder` with `changes`."""
    from accelerate import init_empty_weights

    config = {k: v for k, v in model_class.load_config(folder).items() if k != "quantization_config"}
    with init_empty_weights():
        model: nn.Module = model_class.from_config({**config, **(changes or {})})
    return model


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where `name` is in `model`."""
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _packed() -> Any:
    from bitsandbytes.nn import Linear4bit

    return Linear4bit
