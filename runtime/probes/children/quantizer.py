"""NF4 of a small weight: quantized on the CPU, used on the device. Argument: the device; see ../child.py.

In this order because the recipe needs no more: on XPU bitsandbytes dequantizes with SYCL kernels
and quantizes with Triton ones, which need a compiler that many machines lack.
"""

import json
import logging
import sys
from typing import Any

SIDE = 256
BLOCK = 64


def say(**facts: Any) -> None:
    print("@" + json.dumps(facts), flush=True)


def main() -> None:
    device = sys.argv[1]
    logging.disable(logging.WARNING)  # of kernels that bitsandbytes would like to have
    say(stage="import torch")
    import torch

    say(stage="import bitsandbytes")
    try:
        import bitsandbytes
        from bitsandbytes import functional
    except ModuleNotFoundError as error:
        if error.name != "bitsandbytes":
            raise
        return say(absent="bitsandbytes")
    say(bitsandbytes=str(bitsandbytes.__version__))

    def relative_error(packed: Any, state: Any) -> float:
        back = functional.dequantize_4bit(packed, state).float().cpu()
        return float((back - weight).norm() / weight.norm())

    weight = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    say(stage="quantize_4bit on cpu")
    packed, state = functional.quantize_4bit(
        weight, blocksize=BLOCK, quant_type="nf4", compress_statistics=True
    )
    say(stage=f"dequantize_4bit on {device}")
    state.to(device)
    say(dequantize_error=relative_error(packed.to(device), state))
    if device != "cpu":
        say(stage=f"quantize_4bit on {device}")
        there = weight.to(device=device, dtype=torch.bfloat16)
        packed, state = functional.quantize_4bit(
            there, blocksize=BLOCK, quant_type="nf4", compress_statistics=True
        )
        say(quantize_error=relative_error(packed, state))
    say(done=True)


if __name__ == "__main__":
    main()
