"""Floating-point operations of a training step, counted from shapes, and the rate of this machine's matrix products.

    python benchmarks/flops.py [--base BASE] [--size 1024 1024] [--controls 1] [--tokens 400] [--rank 16] [--measure]

Two for each multiply-add, of a LoRA on to_q, to_k, to_v and to_out.0 over a frozen base, batch 1. Counted is what a
step needs, and nothing that a way of saving memory or a kernel adds. Of the published shape at 1024 x 1024 with one
control that is 397 TFLOP; checkpointing every block adds its forward pass of 172, and flash attention, whose backward
pass is not twice but two and a half times its forward, 27. A token meets the weights of its own stream only, a third
of all; the modulation layers see one vector a sample. Weights of a frozen base have no gradient, so a layer's
backward pass costs what its forward does, but where nothing before it is trained: the embeddings, the modulations,
and the first block's products of queries, keys and values. Of the last block's text stream no output is used, so it
has no backward pass beyond attention. Normalisations and other elementwise work is left out.
`tests/benchmarks/test_flops.py` compares all of it with torch's own counter.
"""

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from true_size import Shape, read_denoiser

from runtime import device as devices
from runtime.demo.series import BASE
from runtime.device import Device

PUBLISHED: dict[str, Any] = {
    "num_layers": 60,
    "num_attention_heads": 24,
    "attention_head_dim": 128,
    "joint_attention_dim": 3584,
    "in_channels": 64,
    "out_channels": 16,
    "patch_size": 2,
}
SINUSOID = 256  # features of a timestep before its embedding
TARGETS = 4  # adapted linears of a block, each width x width, all of the image stream
SIDE = 8192
WARM_UP, REPEATS = 20, 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Of one step; `forward` and `backward` together are what a step needs."""

    forward: float
    backward: float

    @property
    def step(self) -> float:
        return self.forward + self.backward


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base", type=Path, help="a folder whose denoiser is counted.  [default: published]")
    parser.add_argument("--size", type=int, nargs=2, default=(1024, 1024), help="height and width, pixels")
    parser.add_argument("--controls", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--measure", action="store_true", help="the matrix rate too")
    parser.add_argument("--tiny", action="store_true", help="of the embedded base, rate of small matrices")
    wish = parser.parse_args()
    base = BASE if wish.tiny else wish.base
    config = PUBLISHED if base is None else read_denoiser(base)
    height, width = wish.size
    shape = Shape(size=(height, width), controls=wish.controls, tokens=(wish.tokens,))
    counted = step_flops(config, shape, wish.rank)
    line: dict[str, Any] = {
        "weights_a_token_meets": met_by_a_token(config),
        "forward_tflop": counted.forward / 1e12,
        "backward_tflop": counted.backward / 1e12,
        "step_tflop": counted.step / 1e12,
    }
    if wish.measure or wish.tiny:
        line["matrix_tflop_s"] = matrix_rate(devices.pick(), side(wish.tiny)) / 1e12
    print(json.dumps(line))


def side(tiny: bool) -> int:
    """Of the matrices whose product is timed."""
    return 256 if tiny else SIDE


def width_of(config: Mapping[str, Any]) -> int:
    return int(config["num_attention_heads"] * config["attention_head_dim"])


def met_by_a_token(config: Mapping[str, Any]) -> int:
    """Weights of all blocks through which one token goes: attention's four products, and the MLP's of 4 x width."""
    return 12 * width_of(config) ** 2 * int(config["num_layers"])


def step_flops(config: Mapping[str, Any], shape: Shape, rank: int = 16) -> Flops:
    """Of the shape's first text length and bucket, batch 1."""
    d, layers = width_of(config), int(config["num_layers"])
    image, text = shape.image_tokens, shape.tokens[0]
    square = 2 * d * d
    tokens = layers * 12 * square * (image + text)
    attention = layers * 4 * (image + text) ** 2 * d
    adapter = layers * TARGETS * 4 * rank * d * image
    return Flops(
        forward=tokens + attention + adapter + _modulation(config) + _ends(config, image, text),
        backward=tokens
        - _without_backward(square, image, text)
        + 2 * attention
        + 2 * adapter
        - 3 * 2 * rank * d * image  # the first block's queries, keys and values pass nothing on
        + _last_product(config, image),
    )


def _without_backward(square: int, image: int, text: int) -> int:
    """The first block's queries, keys and values of both streams; the last one's text after attention."""
    return 3 * square * (image + text) + 9 * square * text


def _modulation(config: Mapping[str, Any]) -> int:
    """Six vectors for each stream of a block, and two before the last product, from one vector a sample.

    Edit-2511 (zero_cond_t) asks for the time embedding and the image stream's twice: for sigma and for zero.
    """
    d, layers = width_of(config), int(config["num_layers"])
    vectors = 2 if config.get("zero_cond_t") else 1
    embedded = vectors * 2 * (SINUSOID * d + d * d)
    return embedded + layers * (vectors + 1) * 2 * d * 6 * d + 2 * d * 2 * d


def _ends(config: Mapping[str, Any], image: int, text: int) -> int:
    """What tokens pass before and after the blocks."""
    d = width_of(config)
    before = 2 * d * (config["in_channels"] * image + config["joint_attention_dim"] * text)
    return int(before) + _last_product(config, image)


def _last_product(config: Mapping[str, Any], image: int) -> int:
    return 2 * width_of(config) * int(config["patch_size"]) ** 2 * int(config["out_channels"]) * image


def matrix_rate(where: Device, n: int = SIDE) -> float:
    """Floating-point operations a second of bf16 products of n x n matrices."""
    import torch

    one, other = (torch.randn(n, n, device=where.type, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(WARM_UP):
        one @ other
    devices.synchronize(where)
    started = time.perf_counter()
    for _ in range(REPEATS):
        one @ other
    devices.synchronize(where)
    return float(2 * n**3 * REPEATS / (time.perf_counter() - started))


if __name__ == "__main__":
    main()
