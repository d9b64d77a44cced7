"""An average of the trained weights over the steps, which generalises better than the weights of any one step.

It is what checkpoints offer for use; training goes on from the weights themselves.
"""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

STATE = "ema.safetensors"
UPDATES = "updates"


def decay_at(decay: float, updates: int) -> float:
    """Of update number `updates`, from 0: rises to `decay`, or the start would weigh on short runs.

    (1 + n) / (10 + n) is 0.1 at first, 0.92 after 100 and 0.97 after 300 updates.
    """
    return min(decay, (1 + updates) / (10 + updates))


class Ema:
    """fp32 averages of `named`, beside them on their device; one `update` after each step."""

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], decay: float) -> None:
        self.decay = decay
        self.updates = 0
        self._named = list(named)
        self._averages: dict[str, Tensor] = {name: p.detach().float().clone() for name, p in named}

    @torch.no_grad()
    def update(self) -> None:
        share = 1 - decay_at(self.decay, self.updates)
        for name, parameter in self._named:
            self._averages[name].lerp_(parameter.detach().float(), share)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The averages in place of the weights, for as long as the block runs; then the weights, bit for bit."""
        kept = [parameter.detach().clone() for _, parameter in self._named]
        try:
            with torch.no_grad():
                for name, parameter in self._named:
                    parameter.copy_(self._averages[name])
            yield
        finally:
            with torch.no_grad():
                for (_, parameter), value in zip(self._named, kept, strict=True):
                    parameter.copy_(value)

    def save(self, folder: Path) -> None:
        """The averages under the parameters' names in training, and how often they were updated."""
        from safetensors.torch import save_file

        tensors = {name: average.cpu().contiguous() for name, average in self._averages.items()}
        save_file(tensors, folder / STATE, metadata={UPDATES: str(self.updates)})

    def load(self, folder: Path) -> None:
        """Continue from `save`'s file. Raises KeyError where it is of another adapter."""
        from safetensors import safe_open

        with safe_open(folder / STATE, "pt") as handle:
            updates = int((handle.metadata() or {})[UPDATES])
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118, not a dict
        if differing := sorted(tensors.keys() ^ self._averages.keys()):
            raise KeyError(f"{folder / STATE} is of another adapter: {differing[:3]}")
        for name, average in self._averages.items():
            average.copy_(tensors[name])
        self.updates = updates
