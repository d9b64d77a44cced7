"""Names of adapter tensors in the tools that read them.

| tool | a module's name | factors | alpha |
|---|---|---|---|
| diffusers, peft | `transformer.<module>` | lora_A, lora_B | metadata |
| ComfyUI | `diffusion_model.<module>` | lora_A, lora_B | `<module>.alpha` |
| kohya | `lora_unet_<module with _ for .>` | lora_down, lora_up | `<module>.alpha` |

A reader that finds no alpha takes the rank for it, and the adapter's scale is lost; so each
form carries it the way its readers look for it.
"""

from collections.abc import Callable

import torch
from torch import Tensor

FORMATS = ("diffusers", "comfyui", "kohya")
PREFIX = "transformer."


def exported(tensors: dict[str, Tensor], alpha: float, form: str) -> dict[str, Tensor]:
    """Tensors as `Adapter.save` names them, renamed for `comfyui` or `kohya`, with alpha beside each."""
    name_of: Callable[[str], str] = _comfyui if form == "comfyui" else _kohya
    leaves = {"comfyui": ("lora_A.weight", "lora_B.weight"), "kohya": ("lora_down.weight", "lora_up.weight")}[
        form
    ]
    out: dict[str, Tensor] = {}
    for key, tensor in sorted(tensors.items()):
        module, _, factor = key.removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        out[f"{name_of(module)}.{leaves[factor == 'lora_B']}"] = tensor.contiguous()
        out[f"{name_of(module)}.alpha"] = torch.tensor(float(alpha))
    return out


def _comfyui(module: str) -> str:
    return f"diffusion_model.{module}"


def _kohya(module: str) -> str:
    return "lora_unet_" + module.replace(".", "_")
