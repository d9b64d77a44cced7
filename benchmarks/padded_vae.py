"""The embedded base's VAE in a larger shape: what the small one computes, at the memory and time of the large one.

The small weights fill the first channels of each layer and all others are zero, so added channels hold zeros
throughout, and added residual blocks pass on what they are given. Two factors grow with the number of channels, and
are undone in the weights: that of norms in gamma, that of attention in the query. All else is kept to the bit.
"""

from collections.abc import Iterator
from itertools import groupby
from math import sqrt
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SPLIT = ("to_qkv", "time_conv")  # what they give is cut into parts, each as wide as what they take


@torch.no_grad()
def padded(folder: Path, base_dim: int = 96, num_res_blocks: int = 2) -> Any:
    """The AutoencoderKLQwenImage in `folder` in this shape, by default the published one; fp32, on the CPU.

    The rest of its config is kept, statistics of the latents too. Raises ValueError for a shape that can't hold it.
    """
    from accelerate import init_empty_weights
    from diffusers import AutoencoderKLQwenImage

    how = {"torch_dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    small = AutoencoderKLQwenImage.from_pretrained(folder, **how)
    wished = {"base_dim": base_dim, "num_res_blocks": num_res_blocks}
    least = {name: small.config[name] for name in wished}
    if any(wished[name] < least[name] for name in wished):
        raise ValueError(f"the VAE in {folder} does not fit into {wished}, expected at least {least}")
    with init_empty_weights():
        large = AutoencoderKLQwenImage.from_config(AutoencoderKLQwenImage.load_config(folder), **wished)
    large.to_empty(device="cpu")
    for weight in large.parameters():
        weight.zero_()
    for name, ours, theirs in _pairs("", small, large):
        parts = theirs.out_channels // theirs.in_channels if name in SPLIT else 1
        for kind, weight in ours.named_parameters(recurse=False):
            _put(weight, getattr(theirs, kind), parts)
        _undo_factor(ours, theirs)
    return large.requires_grad_(False).eval()


def _pairs(name: str, small: nn.Module, large: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Names of modules within their parents, each module of `small`, and the one of `large` that does its work.

    In lists, runs of one class meet: `large` may have more at the end of a run. So residual blocks of the encoder,
    which lie in one list with the samplers between them, meet those of their own level. Parents follow children.
    """
    runs = [(list(small.named_children()), list(large.named_children()))]
    if isinstance(small, nn.ModuleList) and isinstance(large, nn.ModuleList):
        runs = list(zip(_runs(small), _runs(large), strict=True))
    for ours, theirs in runs:
        for (inner, one), (_, other) in zip(ours, theirs, strict=False):
            yield from _pairs(inner, one, other)
    yield name, small, large


def _runs(blocks: nn.ModuleList) -> list[list[tuple[str, nn.Module]]]:
    return [list(run) for _, run in groupby(blocks.named_children(), key=lambda child: type(child[1]))]


def _put(weight: Tensor, room: Tensor, parts: int) -> None:
    """`weight` into the first places of `room`, of each of its parts."""
    given, wide = (tensor.view(parts, -1, *tensor.shape[1:]) for tensor in (weight, room))
    wide[tuple(slice(size) for size in given.shape)] = given


def _undo_factor(small: Any, large: Any) -> None:
    """A norm multiplies by the root of its channels, attention divides by it."""
    from diffusers.models.autoencoders import autoencoder_kl_qwenimage as classes

    if isinstance(small, classes.QwenImageRMS_norm):
        large.gamma *= small.scale / large.scale
    elif isinstance(small, classes.QwenImageAttentionBlock):
        for weight in (large.to_qkv.weight, large.to_qkv.bias):
            weight[: large.dim] *= sqrt(large.dim / small.dim)  # the query comes first
