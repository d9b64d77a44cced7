"""Names of adapter tensors in the tools that write and read them.

| tool | a module's name | factors | alpha |
|---|---|---|---|
| diffusers | `transformer.<module>` | lora_A, lora_B; once lora.down, lora.up | metadata |
| peft | `base_model.model.<module>` | lora_A, lora_B | adapter_config.json |
| DiffSynth | `<module>` | lora_A.default, lora_B.default | none: the rank |
| ComfyUI | `diffusion_model.<module>` | lora_A, lora_B or lora_down, lora_up | `<module>.alpha` |
| kohya | `lora_unet_<module with _ for .>` | lora_down, lora_up | `<module>.alpha` |
| distillations | `<module>` | lora_down, lora_up | `<module>.alpha` |

A reader that finds no alpha takes the rank for it, and the adapter's scale is lost; so each
form carries it the way its readers look for it.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.errors import UserError

FORMATS = ("diffusers", "comfyui", "kohya")
PREFIX = "transformer."
COMPILED = "_orig_mod."  # torch.compile's wrapper puts it into every name below it

PREFIXES = (
    "",
    PREFIX,
    "diffusion_model.",
    "model.diffusion_model.",
    "base_model.model.",
    "base_model.model.transformer.",
)
FLAT_PREFIXES = ("lora_unet_", "lora_transformer_")
KNOWN = (
    "transformer.M.lora_A.weight, transformer.M.lora.down.weight, base_model.model.M.lora_A.weight, "
    "M.lora_A.default.weight, diffusion_model.M.lora_A.weight, lora_unet_M.lora_down.weight, M.lora_down.weight"
)
_KEY = re.compile(
    r"(?P<stem>.+)\."
    r"(?:(?P<down>lora_A(?:\.[^.]+)?\.weight|lora_down\.weight|lora(?:_linear_layer)?\.down\.weight)"
    r"|(?P<up>lora_B(?:\.[^.]+)?\.weight|lora_up\.weight|lora(?:_linear_layer)?\.up\.weight)"
    r"|(?P<alpha>alpha)"
    r"|(?P<magnitude>lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?|dora_scale))"
)
_TEXT_ENCODER = re.compile(
    r"(?:base_model\.model\.)?(?:text_encoder(?:_\d)?|text_encoders|conditioner)\.|lora_te\d?_"
)


def plain(name: str) -> str:
    """`name` as it is without torch.compile."""
    return name.replace(COMPILED, "")


# ---- writing


def exported(tensors: dict[str, Tensor], alpha: float, form: str) -> dict[str, Tensor]:
    """Tensors as `Adapter.save` names them, renamed for `comfyui` or `kohya`, with alpha beside each.

    `alpha`: such that alpha / r is the adapter's scale. DoRA's magnitudes become `dora_scale` [out, 1].
    """
    name_of: Callable[[str], str] = _comfyui if form == "comfyui" else _kohya
    down, up = ("lora_A", "lora_B") if form == "comfyui" else ("lora_down", "lora_up")
    leaves = {"lora_A": f"{down}.weight", "lora_B": f"{up}.weight", "lora_magnitude_vector": "dora_scale"}
    out: dict[str, Tensor] = {}
    for key, tensor in sorted(tensors.items()):
        module, _, factor = plain(key).removeprefix(PREFIX).removesuffix(".weight").rpartition(".")
        shaped = tensor.reshape(-1, 1) if factor == "lora_magnitude_vector" else tensor
        out[f"{name_of(module)}.{leaves[factor]}"] = shaped.contiguous()
        out[f"{name_of(module)}.alpha"] = torch.tensor(float(alpha))
    return out


def _comfyui(module: str) -> str:
    return f"diffusion_model.{module}"


def _kohya(module: str) -> str:
    return "lora_unet_" + module.replace(".", "_")


# ---- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    module: str
    role: str
    """down (also called A), up (B), alpha or magnitude."""


def reader(modules: Collection[str]) -> Callable[[str], Part | None]:
    """What a tensor's name means for a denoiser with these `modules`; None where it means none of them.

    Kohya's names have lost their dots, so only the list tells `to_out.0` from `to_out_0`; a name that fits
    two modules of it raises UserError.
    """
    known = frozenset(modules)
    flat: dict[str, list[str]] = {}
    for module in sorted(known):
        flat.setdefault(module.replace(".", "_"), []).append(module)

    def read(key: str) -> Part | None:
        matched = _KEY.fullmatch(plain(key))
        if matched is None:
            return None
        stem, role = matched["stem"], next(r for r in ("down", "up", "alpha", "magnitude") if matched[r])
        module = _dotted(stem, known) or _undone(key, stem, flat)
        return Part(module=module, role=role) if module else None

    return read


def of_text_encoder(key: str) -> bool:
    """Whether a tensor that no module of the denoiser knows is recognisably the text encoder's."""
    return _TEXT_ENCODER.match(key) is not None


def _dotted(stem: str, known: Collection[str]) -> str | None:
    stripped = (stem.removeprefix(prefix) for prefix in PREFIXES if stem.startswith(prefix))
    return next((name for name in stripped if name in known), None)


def _undone(key: str, stem: str, flat: dict[str, list[str]]) -> str | None:
    for prefix in FLAT_PREFIXES:
        names = flat.get(stem.removeprefix(prefix), []) if stem.startswith(prefix) else []
        if len(names) > 1:
            raise UserError(
                f"{key} may mean {' or '.join(names)}: its naming has lost the dots",
                remedy="give the adapter in the naming of diffusers or ComfyUI",
            )
        if names:
            return names[0]
    return None
