"""Which activations of the blocks are kept for the backward pass and which are made again; and compiled blocks.

    off           all are kept
    every block   a block's input is kept, the rest made again
    groups of n   only each n-th input is kept; n blocks at a time are made again
    selective     as every block, but outputs of attention are kept: the costliest operation is not done twice

None changes a gradient. Compiled, the checkpoint lies inside of what is compiled, so that the compiler sees forward
and second forward together and leaves out of the second what nobody reads.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from runtime.config.learning import Checkpointing

States = tuple[Tensor, Tensor]
"""Of text and image: what a block takes and gives, here in the order in which it gives."""

# What torch's attention is called underneath, by device and kernel; the last is XPU's.
ATTENTION = {
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    if hasattr(torch.ops.aten, name)
}


def apply(denoiser: Any, mode: Checkpointing, blocks: str, *, dropout: bool, compiled: bool) -> None:
    """Let the blocks of a diffusers model be run as `mode` says, in training only.

    `dropout`: whether something in a block draws random numbers, which a second forward must draw again.
    """
    if mode is False and not compiled:
        denoiser.disable_gradient_checkpointing()
        return
    if isinstance(mode, int) and not isinstance(mode, bool):
        last = list(getattr(denoiser, blocks))[-1]
        denoiser.enable_gradient_checkpointing(Groups(mode, last, dropout=dropout, compiled=compiled))
        return
    run = _plain if mode is False else functools.partial(checkpoint, _plain, **_options(mode, dropout))
    denoiser.enable_gradient_checkpointing(_compiled(run) if compiled else run)


def _plain(block: nn.Module, *given: Any) -> States:
    states: States = block(*given)
    return states


def _options(mode: Checkpointing, dropout: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": dropout}
    if mode == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _policy)
    return options


def _policy(context: Any, operation: Any, *given: Any, **named: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in ATTENTION else CheckpointPolicy.PREFER_RECOMPUTE


def _compiled(run: Callable[..., States]) -> Callable[..., States]:
    """`run` compiled once for all blocks, the length of the text left open."""

    @torch.compile
    def inside(*given: Any) -> States:
        return run(*given)

    def ask(
        block: nn.Module, image: Tensor, text: Tensor, mask: Any, rows: Tensor, rotary: Any, *rest: Any
    ) -> States:
        for tensor, side in ((text, 1), (rotary[1], 0)):
            torch._dynamo.maybe_mark_dynamic(tensor, side)
        return inside(block, image, text, mask, rows, rotary, *rest)

    return ask


class Groups:
    """Runs `size` blocks at a time under one checkpoint.

    A model asks block by block; until a group is full its blocks are remembered and the states handed on untouched.
    """

    def __init__(self, size: int, last: nn.Module, *, dropout: bool, compiled: bool) -> None:
        self.size, self.last = size, last
        self.options = _options(True, dropout)
        self.run = _compiled(_plain) if compiled else _plain
        self.waiting: list[nn.Module] = []

    def __call__(self, block: nn.Module, image: Tensor, text: Tensor, *rest: Any) -> States:
        self.waiting.append(block)
        if len(self.waiting) < self.size and block is not self.last:
            return text, image
        group, self.waiting = tuple(self.waiting), []
        states: States = checkpoint(self._through, group, image, text, *rest, **self.options)
        return states

    def _through(self, group: tuple[nn.Module, ...], image: Tensor, text: Tensor, *rest: Any) -> States:
        for block in group:
            text, image = self.run(block, image, text, *rest)
        return text, image
