"""Pre-training of the tiny base's denoiser on random recolourings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from runtime.demo.components import latents, predict
from runtime.demo.fitting import fit

if TYPE_CHECKING:
    import torch

PEAK_LR = 1.5e-3
TEXT_NOISE = (
    0.05  # of embeddings with a root mean square of 1: an NF4 or bf16 text encoder then still steers the base
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Training pairs: pictures uint8 [N, H, W, 3], embeddings float16 [N, L, D], their mask bool [N, L]."""

    controls: NDArray[np.uint8]
    targets: NDArray[np.uint8]
    text: NDArray[np.float16]
    mask: NDArray[np.bool_]

    @staticmethod
    def join(parts: list[Pairs]) -> Pairs:
        length = max(part.text.shape[1] for part in parts)

        def padded(x: Any) -> Any:
            return np.pad(x, [(0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])

        return Pairs(
            controls=np.concatenate([part.controls for part in parts]),
            targets=np.concatenate([part.targets for part in parts]),
            text=np.concatenate([padded(part.text) for part in parts]),
            mask=np.concatenate([padded(part.mask) for part in parts]),
        )


def encoded(vae: Any, images: NDArray[np.uint8]) -> torch.Tensor:
    import torch

    return torch.cat([latents(vae, images[i : i + 256]) for i in range(0, len(images), 256)])


def draw_sigma(count: int, device: str) -> torch.Tensor:
    """Half uniform, half logit-normal: a LoRA may train, and a sampler step, at any sigma."""
    import torch

    uniform, normal = torch.rand(count, device=device), torch.sigmoid(torch.randn(count, device=device))
    return torch.where(torch.rand(count, device=device) < 0.5, uniform, normal)


@contextmanager
def no_lengths() -> Iterator[None]:
    """Leave out the per-sample text lengths, which the transformer computes and ignores.

    They put a Python number on the device, a copy that can't be recorded in a CUDA graph.
    """
    from diffusers.models.transformers import transformer_qwenimage

    original = transformer_qwenimage.compute_text_seq_len_from_mask
    transformer_qwenimage.compute_text_seq_len_from_mask = lambda text, mask: (text.shape[1], None, mask)
    try:
        yield
    finally:
        transformer_qwenimage.compute_text_seq_len_from_mask = original


def train(
    transformer: Any,
    vae: Any,
    pairs: Pairs,
    *,
    steps: int,
    batch: int,
    device: str,
    seed: int,
    record: bool = True,
) -> None:
    """Train `transformer` in place on the edits of `pairs`."""
    import torch

    torch.manual_seed(seed)
    vae.to(device)
    transformer.to(device).train()
    targets, controls = encoded(vae, pairs.targets), encoded(vae, pairs.controls)
    text, mask = torch.from_numpy(pairs.text).to(device), torch.from_numpy(pairs.mask).to(device)

    def loss() -> torch.Tensor:
        i = torch.randint(len(targets), (batch,), device=device)
        x0, sigma = targets[i], draw_sigma(batch, device)
        eps, s = torch.randn_like(x0), sigma.view(-1, 1, 1)
        prompt = text[i].float()
        prompt = prompt + TEXT_NOISE * torch.randn_like(prompt)
        velocity = predict(transformer, (1 - s) * x0 + s * eps, controls[i], sigma, prompt, mask[i])
        return torch.nn.functional.mse_loss(velocity, eps - x0)

    with no_lengths():
        fit("dit", transformer, loss, steps=steps, peak_lr=PEAK_LR, record=record)
    transformer.eval()
