"""What an fp32 adapter over a bf16 base costs: time of a step and peak of memory, for five ways to apply it.

    python benchmarks/adapter_dtype.py [--layers N] [--quantize none|nf4] [--steps 5] [--size 384 672] [--dora]

Blocks have the published shape and random weights, on the accelerator; without one, small blocks on the CPU, whose
figures say only that the script works. One JSON object a line. `peak_gib` is over what is resident before the step;
`error` is that of lora_B's gradients, relative, to those of the first line.

    ours              fp32 weights cast to the input's dtype, no autocast
    ours, autocast    the same under autocast
    peft, autocast    peft's layers, which bring the input to fp32, under autocast
    peft              the same without autocast
    bf16              peft's layers with bf16 weights, no autocast
"""

import argparse
import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import torch
from random_base import _drawn
from torch import Tensor, nn

from runtime import device as devices
from runtime.config.model import Lora
from runtime.device import Device
from runtime.quantize import nf4
from runtime.quantize.layers import nf4_linear
from runtime.training import layers, trainables

MODES = ("ours", "ours, autocast", "peft, autocast", "peft", "bf16")
TINY: dict[str, Any] = {"num_attention_heads": 2, "joint_attention_dim": 128, "attention_head_dim": 128}
TEXT = 400
WARM_UP = 2


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--size", type=int, nargs=2, default=(384, 672), help="of target and control, pixels")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--dora", action="store_true")
    parser.add_argument("--no-checkpointing", action="store_true")
    wish = parser.parse_args()
    where = devices.pick()
    shape = {} if where.is_accelerator else TINY
    count = wish.layers if where.is_accelerator else 2
    denoiser = make(where, count, wish.quantize, shape)
    if not wish.no_checkpointing:
        denoiser.enable_gradient_checkpointing()
    asked = question(where, denoiser, wish.size if where.is_accelerator else (64, 64))
    lora = Lora(r=wish.rank, lora_alpha=wish.rank, use_dora=wish.dora, target_modules="attention")
    reference: list[Tensor] | None = None
    for mode in MODES:
        taken, gradients = measured(where, denoiser, asked, lora, mode, wish.steps)
        reference = reference or gradients
        error = max(float((a - b).norm() / b.norm()) for a, b in zip(gradients, reference, strict=True))
        setup = {"device": where.name, "layers": count, "quantize": wish.quantize, "dora": wish.dora}
        print(json.dumps({"mode": mode, **setup, **taken, "error": error}), flush=True)


def make(where: Device, layers: int, quantized: str, shape: dict[str, Any]) -> Any:
    """A frozen bf16 denoiser of random weights, its blocks' linears in NF4 where asked."""
    from accelerate import init_empty_weights
    from diffusers import QwenImageTransformer2DModel

    with init_empty_weights():
        denoiser = QwenImageTransformer2DModel(num_layers=layers, **shape)
    generator = torch.Generator(where.type).manual_seed(0)
    for name, module in list(denoiser.named_modules()):
        for leaf, empty in list(module.named_parameters(recurse=False)):
            drawn = _drawn(f"{name}.{leaf}", empty, generator)
            setattr(module, leaf, nn.Parameter(drawn, requires_grad=False))
        if quantized == "nf4" and isinstance(module, nn.Linear) and "blocks." in name:
            packed, state = nf4.quantize(module.weight, devices.quantizing(where.type))
            made = nf4_linear(module, packed, state, where.type, torch.bfloat16)
            denoiser.set_submodule(name, made)
    return denoiser.to(where.type).train()


def question(where: Device, denoiser: Any, size: tuple[int, int]) -> dict[str, Any]:
    """Target and one control of the same size, and a prompt."""
    height, width = (side // 16 for side in size)
    generator = torch.Generator().manual_seed(1)

    def drawn(tokens: int, channels: int) -> Tensor:
        return torch.randn((1, tokens, channels), generator=generator).to(where.type, torch.bfloat16)

    return {
        "hidden_states": drawn(2 * height * width, denoiser.config.in_channels),
        "encoder_hidden_states": drawn(TEXT, denoiser.config.joint_attention_dim),
        "timestep": torch.tensor([0.5], device=where.type, dtype=torch.bfloat16),
        "img_shapes": [[(1, height, width)] * 2],
        "return_dict": False,
    }


@contextlib.contextmanager
def adapter(denoiser: Any, lora: Lora, mode: str) -> Iterator[list[tuple[str, nn.Parameter]]]:
    """The trained parameters of an adapter of that mode, its lora_B not zero; taken out at the end."""
    plain = layers.keep_input_dtype
    if not mode.startswith("ours"):
        layers.keep_input_dtype = lambda *given: None
    try:
        named = trainables.add_adapter(denoiser, lora, seed=1).named_parameters()
        dtype = torch.bfloat16 if mode == "bf16" else torch.float32
        generator = torch.Generator().manual_seed(2)
        for name, parameter in named:
            parameter.data = parameter.data.to(dtype)
            if "lora_B" in name:
                drawn = torch.randn(parameter.shape, generator=generator) * 0.01
                parameter.data.copy_(drawn.to(torch.bfloat16))
        yield named
    finally:
        layers.keep_input_dtype = plain
        denoiser.unload_lora()


def measured(
    where: Device, denoiser: Any, asked: dict[str, Any], lora: Lora, mode: str, steps: int
) -> tuple[dict[str, float], list[Tensor]]:
    """Seconds and GiB of a step, and the gradients of lora_B at the first."""
    times: list[float] = []
    gradients: list[Tensor] = []
    with adapter(denoiser, lora, mode) as named:
        optimizer = torch.optim.AdamW([parameter for _, parameter in named], lr=1e-6)
        for step in range(WARM_UP + steps):
            resident = devices.memory(where).alloc_gib
            devices.reset_peak(where)
            devices.synchronize(where)
            started = time.perf_counter()
            with torch.autocast(where.type, torch.bfloat16, enabled=mode.endswith("autocast")):
                (velocity,) = denoiser(**asked)
            velocity.float().square().mean().backward()
            if step == 0:
                gradients = [p.grad.float().cpu() for n, p in named if "lora_B" in n and p.grad is not None]
            optimizer.step()
            optimizer.zero_grad()
            devices.synchronize(where)
            times.append(time.perf_counter() - started)
            peak = devices.memory(where).peak_gib - resident
    taken = {
        "step_s": sorted(times[WARM_UP:])[steps // 2],
        "peak_gib": peak,
        "resident_gib": resident,
    }
    return taken, gradients


if __name__ == "__main__":
    main()
