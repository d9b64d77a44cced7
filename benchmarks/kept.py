"""What blocks without checkpointing keep for the backward pass: compiled ones, as a share of eager ones.

    python benchmarks/kept.py [--heads 4] [--size 128 128] [--quantize none nf4]

Without a compiler and without an accelerator: torch decides what a compiled block keeps before any code is made for it,
so the forward pass is traced, divided and then run as it is. Random weights, a rank-16 adapter on the attention of both
streams, one control of the target's size, 400 tokens of text. One JSON object a line: MiB of one block, the
parameters left out; `share` is compiled / eager.
"""

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from adapter_dtype import make, question
from torch import Tensor, nn

from runtime import device as devices
from runtime.config.model import Lora
from runtime.families import rotary
from runtime.memory import checkpointing
from runtime.training import trainables

TRACED = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
HEAD = 128  # the published width of one
Run = Callable[..., Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--heads", type=int, default=4, help="24 in the published shape")
    parser.add_argument("--size", type=int, nargs=2, default=(128, 128), help="height and width, pixels")
    parser.add_argument("--quantize", choices=("none", "nf4"), nargs="+", default=("none", "nf4"))
    wish = parser.parse_args()
    for quantized in wish.quantize:
        kept = {
            mode: one_block(wish.heads, quantized, tuple(wish.size), compiled=mode == "compiled")
            for mode in ("eager", "compiled")
        }
        print(json.dumps({"quantize": quantized, **kept, "share": kept["compiled"] / kept["eager"]}))


def one_block(heads: int, quantized: str, size: tuple[int, int], *, compiled: bool) -> float:
    """MiB."""
    where = devices.pick("cpu")
    shape = {"num_attention_heads": heads, "attention_head_dim": HEAD, "joint_attention_dim": 2 * HEAD}
    denoiser = make(where, 1, quantized, shape)
    trainables.add_adapter(denoiser, Lora(r=16, lora_alpha=16, target_modules="attention"), seed=1)
    run: Run = checkpointing._plain
    with patch.object(torch, "compile", TRACED):
        if compiled:
            torch._dynamo.reset()
            rotary.make_real(denoiser)
            checkpointing.apply(denoiser, False, "transformer_blocks", dropout=False, compiled=True)
            run = denoiser._gradient_checkpointing_func
        kept = Kept(denoiser, run)
        denoiser.enable_gradient_checkpointing(kept)
        denoiser(**question(where, denoiser, size))
    return sum(kept.sizes.values()) / 2**20


class Kept:
    """Runs blocks by `run` and counts what autograd saves of them, each memory once, that of parameters not at all."""

    def __init__(self, denoiser: nn.Module, run: Run) -> None:
        self.run = run
        self.own = {t.untyped_storage().data_ptr() for t in (*denoiser.parameters(), *denoiser.buffers())}
        self.sizes: dict[int, int] = {}

    def __call__(self, *given: Any) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(self.saved, lambda tensor: tensor):
            return self.run(*given)

    def saved(self, tensor: Tensor) -> Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in self.own:
            self.sizes[memory.data_ptr()] = memory.nbytes()
        return tensor


if __name__ == "__main__":
    main()
