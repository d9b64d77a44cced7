"""The loss on a fixed set of (sample, sigma, noise): what "it learned" is judged by.

The loss of a step swings with its sigma far more than with what was learned. Here sample,
sigma and noise are the same at every measurement, so the difference is the learning.
"""

from typing import Any

import torch

from runtime.families import base
from runtime.training import draws
from runtime.training.batches import Batches
from runtime.training.objective import Draw, FlowMatching, Predict


class Probe:
    """`samples` training samples and as many held-out ones, `count` draws of (sigma, noise) each."""

    def __init__(self, batches: Batches, objective: FlowMatching, *, samples: int, count: int) -> None:
        self.batches, self.objective, self.count = batches, objective, count
        self.chosen = [
            (split, name)
            for split in ("train", "holdout")
            for name in sorted(_of(batches, split), key=lambda n: draws.seed_of("probe", objective.seed, n))[
                :samples
            ]
        ]

    @property
    def sigmas(self) -> list[float]:
        """Of the draws of each sample."""
        return [(index + 0.5) / self.count for index in range(self.count)]

    @torch.no_grad()
    def measure(self, predict: Predict, step: int) -> dict[str, Any]:
        """A line of probe.jsonl."""
        items = [item for split, name in self.chosen for item in self._sample(predict, split, name)]
        return {
            "step": step,
            "items": items,
            "train_mean": _mean([i["loss"] for i in items if i["split"] == "train"]),
            "holdout_mean": _mean([i["loss"] for i in items if i["split"] == "holdout"]),
        }

    def _sample(self, predict: Predict, split: str, name: str) -> list[dict[str, Any]]:
        tensors = self.batches.read(self.batches.folders[split, name])
        target = tensors["target"].float()[None]
        conditioning = base.conditioning_of(tensors)
        items = []
        for index, sigma in enumerate(self.sigmas):
            label = (
                draws.seed_of("probe", self.objective.seed, name, index) % 2**53
            )  # exact in any JSON reader
            draw = Draw(sigmas=torch.tensor([sigma]), noise=draws.noise(target.shape, label))
            loss = float(self.objective.losses(predict, target, conditioning, draw)[0])
            known = {"sample": name, "split": split, "sigma": sigma, "noise": label}
            items.append({**known, "loss": loss if _finite(loss) else None})
        return items


def _finite(value: float) -> bool:
    return value == value and abs(value) != float("inf")


def _mean(values: list[float | None]) -> float | None:
    finite = [value for value in values if value is not None]
    return sum(finite) / len(finite) if finite and len(finite) == len(values) else None


def _of(batches: Batches, split: str) -> list[str]:
    """What is to be learned, or held out; a set that holds the base's behaviour tells nothing of learning."""
    return batches.learned() if split == "train" else batches.ids(split)
