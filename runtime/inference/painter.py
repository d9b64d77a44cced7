"""Denoiser, adapter and VAE on one device, painting from a cache entry's tensors."""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path

from PIL import Image
from torch import Tensor

from runtime import device, shards
from runtime.config.model import Config
from runtime.families.base import Family
from runtime.inference import sampler
from runtime.inference.sampler import Task
from runtime.memory import offload
from runtime.memory.modulation import Request
from runtime.training import naming, trainables
from runtime.training.objective import Predictor
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
        table: Request | None = None,
    ) -> None:
        """`table`: the sigmas that will be asked for, where modulation is to be a table."""
        self.family, self.model, self.config = family, model, config
        self.device = device.pick(config.hardware.device)
        self.dtype = device.compute_dtype(self.device, config.train.mixed_precision)
        live = checkpoint is not None and _moves_modulation(family, checkpoint)
        denoiser = family.load_denoiser(
            model,
            device=self.device.type,
            dtype=self.dtype,
            quantize=config.model.quantize,
            keep=config.model.nf4_keep,
            made=(made or {}).get("transformer"),
            weight=(made or {}).get("transformer_weight"),
            streamed=config.train.streamed,
            table=None if live else table,
        )
        self.note = (
            "the adapter moves modulation, whose weights are loaded after all" if live and table else ""
        )
        """What differs from what was asked for."""
        self.adapter: Adapter | None = None
        if checkpoint is not None:
            self.adapter = trainables.load_adapter(denoiser, checkpoint)
        blocks = getattr(denoiser, family.facts.blocks)
        streamed = offload.stream(blocks, config.train.streamed, self.device)
        self.note = self.note or streamed.note
        self.predict = Predictor(family, denoiser.eval(), self.device, self.dtype)
        self.vae = family.load_vae(model, device=self.device.type, dtype=self.dtype, mode=config.cache.vae)

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


def _moves_modulation(family: Family, checkpoint: Path) -> bool:
    """Whether the adapter, which may be of another config, has been trained on what a table would replace."""
    header = shards.read_header(checkpoint / trainables.WEIGHTS)
    modules = {name.removeprefix(naming.PREFIX).partition(".lora_")[0] for name in header}
    return bool(family.facts.move_modulation(modules))
