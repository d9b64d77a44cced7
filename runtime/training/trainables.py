"""What gets gradients. In this slice a LoRA adapter; the base stays frozen."""

import contextlib
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime import device
from runtime.config.model import Lora
from runtime.config.targets import is_pattern, matching
from runtime.errors import UserError
from runtime.training import draws, layers, naming

WEIGHTS = "pytorch_lora_weights.safetensors"
STATE = "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """LoRA layers inside `denoiser`: fp32 whatever the base's precision, applied in that of their input."""

    denoiser: Any
    config: Lora
    name: str = "default"

    @property
    def scale(self) -> float:
        """By which the adapter's output is multiplied."""
        rank = math.sqrt(self.config.r) if self.config.use_rslora else self.config.r
        return self.config.lora_alpha / rank

    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        named = self.denoiser.named_parameters()
        return [(naming.plain(name), p) for name, p in named if p.requires_grad]

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """The base without the adapter, for as long as the block runs; one within another changes nothing."""
        if not self.parameters():  # peft takes requires_grad away from an adapter that is off
            yield
            return
        self.denoiser.disable_adapters()
        try:
            yield
        finally:
            self.denoiser.enable_adapters()

    @contextlib.contextmanager
    def zeroed(self) -> Iterator[None]:
        """The adapter with every lora_B at zero and DoRA's lengths those of the base, which adds nothing."""
        kept = [(p, p.detach().clone()) for name, p in self.named_parameters() if ".lora_A." not in name]
        try:
            with torch.no_grad():
                for name, parameter in self.named_parameters():
                    if ".lora_B." in name:
                        parameter.zero_()
            for magnitude in layers.magnitudes(self.denoiser):
                magnitude.reset()
            yield
        finally:
            with torch.no_grad():
                for parameter, value in kept:
                    parameter.copy_(value)

    def save(self, folder: Path) -> None:
        """The adapter as diffusers and peft read it, with rank and alpha in the metadata.

        Without that metadata readers assume alpha = rank, and the adapter's scale is lost.
        """
        from diffusers import QwenImageEditPipeline
        from peft.utils import get_peft_model_state_dict

        metadata = self.denoiser.peft_config[self.name].to_dict()
        plain = json.loads(json.dumps(metadata, default=_plain))
        QwenImageEditPipeline.save_lora_weights(
            folder,
            transformer_lora_layers={
                naming.plain(name): tensor
                for name, tensor in get_peft_model_state_dict(self.denoiser, adapter_name=self.name).items()
            },
            transformer_lora_adapter_metadata=plain,
            weight_name=WEIGHTS,
        )

    def save_state(self, folder: Path) -> None:
        """The trainable parameters under their names in training; never base weights."""
        from safetensors.torch import save_file

        tensors = {name: p.detach().cpu().contiguous() for name, p in self.named_parameters()}
        save_file(tensors, folder / STATE)

    def load_state(self, folder: Path) -> None:
        """Fill the parameters from `save_state`'s file. Raises KeyError where the names differ."""
        from safetensors.torch import load_file

        tensors = load_file(folder / STATE)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(tensors.pop(name))
        if tensors:
            raise KeyError(f"{folder / STATE} holds more than this adapter: {sorted(tensors)[:3]}")


def add_adapter(denoiser: Any, config: Lora, *, seed: int) -> Adapter:
    """Put a fresh adapter into `denoiser`: lora_A drawn on the CPU from `seed`, lora_B zero."""
    from peft import LoraConfig

    peft_config = LoraConfig(
        r=config.r,
        lora_alpha=config.lora_alpha,
        lora_dropout=config.lora_dropout,
        init_lora_weights=config.init_lora_weights,
        target_modules=_modules(denoiser, config),
        use_dora=config.use_dora,
        use_rslora=config.use_rslora,
    )
    adapter = Adapter(denoiser=denoiser, config=config)
    with device.seeded(draws.seed_of("adapter", seed)):
        denoiser.add_adapter(peft_config, adapter_name=adapter.name)
    layers.keep_input_dtype(denoiser, adapter.name)
    return adapter


def _modules(denoiser: Any, config: Lora) -> list[str]:
    """For peft: names as they were given; presets and patterns as the linears that they mean."""
    # bitsandbytes' Linear4bit is an nn.Linear as well, and so are the factors of an adapter that is there already.
    names = [
        name.removesuffix(".base_layer")
        for name, module in denoiser.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    ]
    wanted = config.target_modules
    chosen = matching(names, wanted)
    given = not isinstance(wanted, str) and not any(is_pattern(target) for target in wanted)
    return list(wanted) if given else chosen


def load_adapter(denoiser: Any, folder: Path) -> Adapter:
    """An adapter that `Adapter.save` wrote, put into `denoiser` for inference.

    Raises UserError for a file that lacks rank and alpha, or that was trained on another base.
    """
    from safetensors import safe_open
    from safetensors.torch import load_file

    with safe_open(folder / WEIGHTS, "pt") as handle:
        written = (handle.metadata() or {}).get("lora_adapter_metadata")
    if written is None:
        raise UserError(
            f"{folder / WEIGHTS} does not tell the adapter's rank and alpha",
            remedy="finetune validate --checkpoint last",
        )
    metadata = json.loads(written)
    targets = metadata["transformer.target_modules"]
    config = Lora(
        r=metadata["transformer.r"],
        lora_alpha=metadata["transformer.lora_alpha"],
        target_modules=tuple(sorted(targets)),
        use_dora=metadata.get("transformer.use_dora", False),
        use_rslora=metadata.get("transformer.use_rslora", False),
    )
    adapter = add_adapter(denoiser, config, seed=0)
    tensors = {_training_name(n): t for n, t in load_file(folder / WEIGHTS).items()}
    parameters = dict(adapter.named_parameters())
    differing = sorted(tensors.keys() ^ parameters.keys())
    differing += [n for n in tensors.keys() & parameters.keys() if tensors[n].shape != parameters[n].shape]
    if differing:
        raise UserError(
            f"{folder / WEIGHTS} was trained on another base: {len(differing)} tensors are missing or of "
            f"another shape, first {differing[0]}",
            remedy="set model.pretrained_model_name_or_path to the base that this run used (its config.yaml)",
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
    return adapter


def _training_name(published: str) -> str:
    """`transformer.x.lora_A.weight` to the parameter's name, `x.lora_A.default.weight`.

    peft writes `x.lora_magnitude_vector` without its leaf.
    """
    return f"{published.removeprefix('transformer.').removesuffix('.weight')}.default.weight"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)


def tensor_bytes(tensors: list[nn.Parameter] | list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
