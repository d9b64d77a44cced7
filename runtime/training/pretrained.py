"""`model.lora.pretrained_weight`: a run that starts from an adapter, with fresh optimizer state."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from runtime import files
from runtime.config.model import Config
from runtime.errors import UserError
from runtime.training import adapter_file, naming
from runtime.training.adapter_file import AdapterFile, Factors
from runtime.training.trainables import Adapter
from runtime.workspace import Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Pretrained:
    """What a run started from, as its record says it."""

    sha256: str
    modules: int
    """Taken from the file."""
    fresh_modules: int
    """The run's own that the file has not."""

    def to_json(self) -> dict[str, Any]:
        return {"sha256": self.sha256, "modules": self.modules, "fresh_modules": self.fresh_modules}


def digest(workspace: Workspace, config: Config) -> str | None:
    """Of the file that the config names, before anything is loaded. Raises UserError where it is absent."""
    named = config.model.lora.pretrained_weight
    return files.file_digest(adapter_file.find(workspace.resolve(named))) if named is not None else None


def start(workspace: Workspace, config: Config, adapter: Adapter) -> Pretrained | None:
    """Fill a fresh adapter from the file that the config names; None where it names none."""
    named = config.model.lora.pretrained_weight
    if named is None:
        return None
    path = workspace.resolve(named)
    return load_pretrained(adapter, adapter_file.read_adapter(path, adapter_file.linears(adapter.denoiser)))


def load_pretrained(adapter: Adapter, file: AdapterFile) -> Pretrained:
    """Start `adapter`, which is fresh, from `file`, so that it adds exactly what the file's adapter adds.

    The factor between the file's scale and the run's goes into B; a power of two leaves it exact. Where the
    file's rank is smaller, B's further columns are zero and A's further rows stay as they were drawn: were
    both zero, neither would ever get a gradient. Raises UserError, with `adapter` unchanged, for a module that
    the run does not target, a larger rank, or DoRA on one side only.
    """
    layers = _layers(adapter)
    strange = [module for module in file.modules if module not in layers]
    if strange:
        raise UserError(
            f"{file.path} adapts {len(strange)} modules that this run does not: {', '.join(strange[:5])}",
            remedy="add them to model.lora.target_modules in config.yaml",
        )
    for module, factors in file.modules.items():
        _refuse_misfit(file, module, factors, layers[module], adapter.name)
    with torch.no_grad():
        for module, factors in file.modules.items():
            _fill(layers[module], factors, adapter.name)
    taken = len(file.modules)
    return Pretrained(sha256=file.sha256, modules=taken, fresh_modules=len(layers) - taken)


def _layers(adapter: Adapter) -> Mapping[str, Any]:
    """peft's layers by the name of the linear that each adapts."""
    return {
        naming.plain(name): module
        for name, module in adapter.denoiser.named_modules()
        if adapter.name in getattr(module, "lora_A", ())
    }


def _refuse_misfit(file: AdapterFile, module: str, factors: Factors, layer: Any, name: str) -> None:
    rank = layer.lora_A[name].weight.shape[0]
    if factors.rank > rank:
        raise UserError(
            f"{file.path} has rank {factors.rank} at {module}, this run has rank {rank}",
            remedy=f"set model.lora.r to {factors.rank} or more in config.yaml",
        )
    here, there = name in layer.lora_magnitude_vector, factors.magnitude is not None
    if here != there:
        what = ("is no DoRA", "this run is") if here else ("is a DoRA", "this run is not")
        raise UserError(
            f"{file.path} {what[0]} at {module}, {what[1]}",
            remedy=f"set model.lora.use_dora to {str(there).lower()} in config.yaml",
        )


def _fill(layer: Any, factors: Factors, name: str) -> None:
    down, up, rank = layer.lora_A[name].weight, layer.lora_B[name].weight, factors.rank
    down[:rank] = factors.down.to(down)
    up[:, :rank] = (factors.up.double() * (factors.scale / layer.scaling[name])).to(up)
    if factors.magnitude is not None:
        magnitude = layer.lora_magnitude_vector[name].weight
        magnitude.copy_(factors.magnitude.to(magnitude))
