"""Random numbers as pure functions of where they are used.

Noise, sigma and every other choice depend on (seed, step, sample slot) alone and are drawn
on the CPU, so they are the same after a resume, on another device, and known ahead.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def seed_of(*labels: object) -> int:
    """A 63-bit seed from anything that has a stable repr."""
    digest = hashlib.blake2b(repr(labels).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(*labels: object) -> torch.Generator:
    return torch.Generator().manual_seed(seed_of(*labels))


def noise(shape: Sequence[int], *labels: object) -> Tensor:
    """Standard normal fp32 of `shape`."""
    return torch.randn(tuple(shape), generator=generator("noise", *labels))


def uniform(*labels: object) -> float:
    """One number in [0, 1)."""
    return float(torch.rand((), generator=generator("uniform", *labels), dtype=torch.float64))
