"""One training step as the fit makes it: forward, loss, backward, optimizer, on any device in any dtype.

Two bases: the embedded one, and one block of the published model's true width with weights from noise,
for a kernel can be right at 128 channels and wrong at 3072. Inputs and weights are functions of a
seed, made on the CPU, so that two processes on two devices take the same step.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from runtime import demo
from runtime import device as devices
from runtime.adaptation.parity import EMBEDDED_BASE
from runtime.config.learning import Checkpointing, Optimizer, OptimizerArguments
from runtime.config.model import Lora
from runtime.families import base
from runtime.families.base import Conditioning, Family
from runtime.families.registry import load_family
from runtime.memory import checkpointing
from runtime.training import draws, optimizers, trainables
from runtime.training.batches import MicroBatch
from runtime.training.objective import Draw, FlowMatching, Predictor
from runtime.training.trainables import Adapter

EMBEDDED = Path(demo.__file__).resolve().parent / "base"
SEED = 42
LR = 1e-3
TEXT_TOKENS = (7, 4)  # of the two samples: the second is padded, so attention gets a mask
# bf16 holds them exactly: diffusers rounds sigma before it embeds it a thousandfold, and what that changes
# is the model's own doing on every device.
SIGMAS = (0.75, 0.375)
LATENT, CONTROL = (8, 8), (4, 4)  # 16 and 4 tokens; more would only take longer
# Weights of the wide block: noise of the published model's size, tiled, since drawing 380 M numbers
# takes 5 s. The length is odd, so that no two rows are equal.
POOL, POOL_STD = 4_000_037, 0.02
WIDE = {"num_layers": 1, "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 3584}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    base: str
    device: str
    precision: str
    """no or bf16, as train.mixed_precision"""
    optimizer: str
    checkpointing: Checkpointing
    masked: bool
    """two samples whose prompts differ in length, else one"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """`tensors`: `gradient.NAME` and `update.NAME` of each adapter parameter, fp32 on the CPU."""

    facts: dict[str, Any]
    tensors: dict[str, Tensor]


def take(setup: Setup) -> Taken:
    """The step of `setup`, and what is seen of it before its tensors are gone."""
    where = devices.pick(setup.device)
    dtype = devices.compute_dtype(where, setup.precision)
    family = load_family(EMBEDDED)
    denoiser = make_base(setup.base, family, where.type, dtype)
    frozen = list(denoiser.parameters())
    checkpointing.apply(denoiser, setup.checkpointing, family.facts.blocks, dropout=False, compiled=False)
    adapter = _adapter(denoiser)
    denoiser.train()
    named = adapter.named_parameters()
    optimizer = optimizers.make_optimizer(
        Optimizer(class_path=setup.optimizer, init_args=OptimizerArguments(lr=LR)), adapter.parameters()
    )
    batch = make_batch(family, denoiser, masked=setup.masked)
    objective = FlowMatching(family=family, seed=SEED)
    watch = Watch(denoiser.get_submodule(family.facts.blocks))
    with watch:
        predict = Predictor(family, denoiser, where, dtype)
        losses = objective.losses(predict, batch.target, batch.conditioning, make_draw(batch))
    loss = losses.sum() / len(batch.ids)
    torch.autograd.backward(loss)
    gradients = {name: _gradient(parameter) for name, parameter in named}
    before = {name: _plain(parameter) for name, parameter in named}
    optimizer.step()
    used = devices.memory(where)
    tensors = {f"gradient.{name}": _plain(gradient) for name, gradient in gradients.items()}
    tensors |= {f"update.{name}": _plain(parameter) - before[name] for name, parameter in named}
    seen = {
        "base": frozen,
        "adapter": [parameter for _, parameter in named],
        "gradients": list(gradients.values()),
        "optimizer_state": list(_state(optimizer)),
    }
    facts = {
        "loss": float(loss.detach()),
        "samples": len(batch.ids),
        "compute": _name(dtype),
        "devices": {name: _places(items) for name, items in seen.items()}
        | {"activations": sorted(watch.devices)},
        "dtypes": {name: _kinds(items) for name, items in seen.items() if name != "gradients"}
        | {"attention": [list(kinds) for kinds in sorted(watch.attention)]},
        "memory": {
            "base_gib": trainables.tensor_bytes(frozen) / devices.GIB,
            "alloc_gib": used.alloc_gib,
            "peak_gib": used.peak_gib,
        },
    }
    return Taken(facts=facts, tensors=tensors)


def make_base(name: str, family: Family, device: str, dtype: torch.dtype) -> Any:
    """One of `parity.BASES`, frozen."""
    if name == EMBEDDED_BASE:
        return family.load_denoiser(EMBEDDED, device=device, dtype=dtype, quantize="none")
    return make_block(WIDE, device, dtype)


def make_block(shape: dict[str, int], device: str, dtype: torch.dtype) -> nn.Module:
    """A denoiser of `shape` whose weights are noise: the same numbers on every device, rounded to `dtype`."""
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel

    with init_empty_weights():
        model: nn.Module = QwenImageTransformer2DModel(**shape)
    pool = draws.noise((POOL,), "pool") * POOL_STD
    offset = 0
    for name, parameter in list(model.named_parameters()):
        count = parameter.numel()
        values = pool.roll(-offset).repeat(-(-count // POOL))[:count].view(parameter.shape)
        if name.endswith("weight") and parameter.dim() == 1:  # of a norm
            values = values + 1
        module, _, leaf = name.rpartition(".")
        frozen = nn.Parameter(values.to(device, dtype), requires_grad=False)
        setattr(model.get_submodule(module), leaf, frozen)
        offset = (offset + count) % POOL
    return model


def make_batch(family: Family, denoiser: Any, *, masked: bool) -> MicroBatch:
    width = int(denoiser.config.joint_attention_dim)
    items = [
        Conditioning(
            embeds=draws.noise((1, tokens, width), "embeds", index),
            mask=None,
            controls=(draws.noise((1, family.facts.latent_channels, *CONTROL), "control", index),),
        )
        for index, tokens in enumerate(TEXT_TOKENS[: 2 if masked else 1])
    ]
    targets = [draws.noise((family.facts.latent_channels, *LATENT), "target", i) for i in range(len(items))]
    return MicroBatch(
        ids=tuple(f"s{index}" for index in range(len(items))),
        epoch=0,
        target=torch.stack(targets),
        conditioning=base.collate(items),
        mask=None,
        regularisation=False,
        dropped=(),
        bucket="parity",
    )


def make_draw(batch: MicroBatch) -> Draw:
    count = len(batch.ids)
    noise = [draws.noise(batch.target.shape[1:], SEED, index) for index in range(count)]
    return Draw(sigmas=torch.tensor(SIGMAS[:count]), noise=torch.stack(noise))


def _adapter(denoiser: Any) -> Adapter:
    """A fresh one whose lora_B is not zero, or lora_A would get no gradient to compare."""
    adapter = trainables.add_adapter(denoiser, Lora(), seed=SEED)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(draws.noise(parameter.shape, name) * POOL_STD)
    return adapter


class Watch(TorchFunctionMode):
    """Sees, while it is entered, what reaches attention and where the blocks compute."""

    def __init__(self, blocks: nn.Module) -> None:
        super().__init__()
        self.attention: set[tuple[str, ...]] = set()
        self.devices: set[str] = set()
        for block in blocks.children():
            block.register_forward_hook(self._output)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is nn.functional.scaled_dot_product_attention:
            named = [kwargs[name] for name in ("query", "key", "value") if name in kwargs]
            self.attention.add(tuple(_kinds([*args[:3], *named])))
        return func(*args, **kwargs)

    def _output(self, module: nn.Module, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        self.devices |= {tensor.device.type for tensor in tensors}


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("an adapter parameter got no gradient: base and adapter are not connected")
    return parameter.grad


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Tensors as large as their parameter: a step count is no state that precision matters for."""
    for parameter, state in optimizer.state.items():
        for value in state.values():
            if isinstance(value, Tensor) and value.numel() >= parameter.numel():
                yield value


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def _places(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({tensor.device.type for tensor in tensors})


def _kinds(tensors: Iterable[Tensor]) -> list[str]:
    return sorted({_name(tensor.dtype) for tensor in tensors})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
