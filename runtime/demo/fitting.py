"""The training loop that the tiny base's VAE and denoiser share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from runtime.device import has_graphs, replayed

if TYPE_CHECKING:
    import torch

AVERAGE_EVERY = 10  # updates between two steps of the weighted mean
AVERAGE_DECAY = 0.98  # of a tenth of the updates: about the last 500 count


def cosine(progress: float, steps_done: int, peak: float, warmup: int = 200) -> float:
    """Linear warm-up, then a cosine down to 2 % of `peak`; `progress` in 0..1."""
    decay = 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * min(1.0, (steps_done + 1) / warmup) * (0.02 + 0.98 * decay)


def fit(
    label: str,
    module: Any,
    loss_of: Callable[[], torch.Tensor],
    *,
    steps: int,
    peak_lr: float,
    record: bool = True,
) -> None:
    """Minimise `loss_of()` over the weights of `module`, and leave their weighted mean over time in it."""
    import torch

    weights = list(module.parameters())
    averaged = [w.detach().clone() for w in weights]
    device = weights[0].device
    rate = torch.tensor(peak_lr, device=device)
    capturable = has_graphs(device.type)
    optimizer = torch.optim.AdamW(
        weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.01, capturable=capturable
    )

    def update() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        return loss.detach()

    step_once = replayed(update, device) if record else update
    started = time.monotonic()
    for step in range(steps):
        rate.fill_(cosine(step / steps, step, peak_lr))
        loss = step_once()
        if step % AVERAGE_EVERY == 0:
            decay = min(AVERAGE_DECAY, step / (step + 10 * AVERAGE_EVERY))
            with torch.no_grad():
                torch._foreach_lerp_(averaged, weights, 1.0 - decay)
        if step % 500 == 0 or step == steps - 1:
            print(
                f"{label} {step}/{steps} loss {loss.item():.4f} {time.monotonic() - started:.0f} s",
                flush=True,
            )
    with torch.no_grad():
        torch._foreach_copy_(weights, averaged)
