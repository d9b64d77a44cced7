"""Denoiser, adapter and VAE on one device, painting from a cache entry's tensors."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image
from torch import Tensor

from runtime import device
from runtime.config.model import Config
from runtime.families.base import Family
from runtime.inference import sampler
from runtime.inference.sampler import Task
from runtime.training import trainables
from runtime.training.objective import predictor
from runtime.training.trainables import Adapter

VARIANTS = ("base", "adapter", "zero")


class Painter:
    """Three ways to ask the same denoiser: without the adapter, with it, with it zeroed."""

    def __init__(
        self,
        family: Family,
        model: Path,
        config: Config,
        checkpoint: Path | None,
        made: Mapping[str, Path] | None = None,
    ) -> None:
        self.family, self.model, self.config = family, model, config
        self.device = device.pick(config.hardware.device)
        self.dtype = device.compute_dtype(self.device, config.train.mixed_precision)
        denoiser = family.load_denoiser(
            model,
            device=self.device.type,
            dtype=self.dtype,
            quantize=config.model.quantize,
            made=(made or {}).get("transformer"),
            weight=(made or {}).get("transformer_weight"),
        )
        self.adapter: Adapter | None = None
        if checkpoint is not None:
            self.adapter = trainables.load_adapter(denoiser, checkpoint)
        self.predict = predictor(family, denoiser.eval(), self.device, self.dtype)
        self.vae = family.load_vae(model, device=self.device.type, dtype=self.dtype)

    @contextlib.contextmanager
    def variant(self, name: str) -> Iterator[None]:
        """`base`, `adapter` or `zero` for as long as the block runs."""
        if self.adapter is None or name == "adapter":
            yield
        elif name == "base":
            with self.adapter.disabled():
                yield
        else:
            with self.adapter.zeroed():
                yield

    def sample(self, task: Task, tensors: dict[str, Tensor]) -> tuple[Tensor, str]:
        """Latents [1, C, h, w] for the conditioning in `tensors`, and the digest of the noise they began as."""
        return sampler.paint(self.family, self.predict, self.model, task, tensors)

    def picture(self, latents: Tensor) -> Image.Image:
        """Normalised latents [1, C, h, w] decoded."""
        return sampler.to_image(self.family.decode(self.vae, latents.to(self.device.type))[0])
