"""An adapter from a file, in any of the namings of `naming`, under the denoiser's own module names."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime import files
from runtime.errors import UserError
from runtime.training import naming

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")  # of diffusers, of peft
PEFT_CONFIG = "adapter_config.json"
METADATA = "lora_adapter_metadata"
REMEDY = "give a LoRA that was trained on this base, as a .safetensors file"
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Factors:
    """What an adapter adds to one linear: scale * up @ down."""

    down: Tensor
    """A, [r, in], as stored."""
    up: Tensor
    """B, [out, r], as stored."""
    alpha: float
    """The file's, else the rank of this module: ranks may be mixed. With rank-stabilised scale, what makes
    alpha / r that scale."""
    magnitude: Tensor | None = None
    """DoRA's, [out]."""

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def delta(self) -> Tensor:
        """[out, in] in fp64; without the magnitude."""
        return self.scale * (self.up.double() @ self.down.double())


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    path: Path
    sha256: str
    modules: Mapping[str, Factors]
    ignored: tuple[str, ...]
    """Tensors that are recognisably of the text encoder."""


def linears(denoiser: nn.Module) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of each linear of the base, by its name without adapter and without compile."""
    return {
        naming.plain(name).removesuffix(".base_layer"): (module.out_features, module.in_features)
        for name, module in denoiser.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
    }


def read_adapter(path: Path, modules: Mapping[str, tuple[int, int]]) -> AdapterFile:
    """The adapter in a file, or in a folder that diffusers or peft wrote, for a denoiser with these linears.

    `modules`: by name, outputs and inputs. Raises UserError where no tensor or not every tensor belongs to
    a module, where half a pair is missing, or where a shape does not fit.
    """
    file = find(path)
    tensors, metadata = _load(file)
    read = naming.reader(modules)
    found: dict[str, dict[str, str]] = {}
    strange = []
    for key in tensors:
        part = read(key)
        if part is None:
            strange.append(key)
        elif (twin := found.setdefault(part.module, {}).setdefault(part.role, key)) != key:
            raise UserError(f"{file} holds {part.module} twice: {twin} and {key}", remedy=REMEDY)
    ignored = tuple(key for key in strange if naming.of_text_encoder(key))
    _refuse_strange(file, tensors, [key for key in strange if key not in ignored], matched=bool(found))
    return AdapterFile(
        path=file,
        sha256=files.file_digest(file),
        modules={
            name: _factors(file, name, {role: tensors[key] for role, key in keys.items()}, shape, metadata)
            for name, shape in modules.items()
            if (keys := found.get(name))
        },
        ignored=ignored,
    )


def find(path: Path) -> Path:
    """The file that `path` means. Raises UserError where there is none."""
    if path.is_file():
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    seen = f"holds no {' or '.join(FILES)}" if path.is_dir() else "is not there"
    raise UserError(f"{path}, given as an adapter, {seen}", remedy=REMEDY)


def _load(file: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors by their names in the file, and the settings of the adapter beside them, empty without."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, "pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118, not a dict
    except SafetensorError as error:
        raise UserError(f"{file} is no whole .safetensors file: {error}", remedy=REMEDY) from error
    beside = file.with_name(PEFT_CONFIG)
    try:
        if METADATA in metadata:
            return tensors, _unpacked(json.loads(metadata[METADATA]))
        if file.name == FILES[1] and beside.is_file():
            return tensors, dict(files.read_json(beside))
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{file}: its adapter settings can't be read: {error}", remedy=REMEDY) from error
    return tensors, {}


def _unpacked(packed: dict[str, Any]) -> dict[str, Any]:
    """Those of the denoiser; diffusers writes those of all components into one text."""
    return {
        key.removeprefix(naming.PREFIX): value
        for key, value in packed.items()
        if key.startswith(naming.PREFIX)
    }


def _refuse_strange(file: Path, tensors: Mapping[str, Tensor], strange: list[str], *, matched: bool) -> None:
    if not matched:
        from runtime.families import kinds

        kind = kinds.of_names(tensors)
        if kind not in ("adapter", "unknown"):
            raise UserError(kinds.refusal(file, kind, "adapter"), remedy=REMEDY)
        raise UserError(
            f"{file}: none of its {len(tensors)} tensors belongs to a linear of this denoiser; it begins with "
            f"{', '.join(list(tensors)[:SHOWN]) or 'nothing'}; known namings of a module M: {naming.KNOWN}",
            remedy=REMEDY,
        )
    if strange:
        raise UserError(
            f"{file}: {len(strange)} of its {len(tensors)} tensors belong to no linear of this denoiser: "
            + ", ".join(strange[:SHOWN]),
            remedy=REMEDY,
        )


def _factors(
    file: Path, module: str, parts: Mapping[str, Tensor], shape: tuple[int, int], metadata: Mapping[str, Any]
) -> Factors:
    names = {"down": "A (down)", "up": "B (up)"}
    absent = [name for role, name in names.items() if role not in parts]
    if absent:
        raise UserError(f"{file}: {module} has no {' and no '.join(absent)}", remedy=REMEDY)
    down, up, magnitude = parts["down"], parts["up"], parts.get("magnitude")
    fits = down.ndim == up.ndim == 2 and down.shape[0] == up.shape[1] > 0
    if not fits or (up.shape[0], down.shape[1]) != shape:
        raise UserError(
            f"{file}: {module} has A {list(down.shape)} and B {list(up.shape)}, expected A [r, {shape[1]}] and "
            f"B [{shape[0]}, r]",
            remedy=REMEDY,
        )
    if magnitude is not None and list(magnitude.shape) not in ([shape[0]], [shape[0], 1]):
        raise UserError(
            f"{file}: {module} has DoRA magnitudes {list(magnitude.shape)}, expected [{shape[0]}]",
            remedy=REMEDY,
        )
    if not all(bool(torch.isfinite(tensor.float()).all()) for tensor in parts.values()):
        raise UserError(f"{file}: {module} holds values that are not finite", remedy=REMEDY)
    rank = int(down.shape[0])
    written = float(parts["alpha"]) if "alpha" in parts else _alpha(metadata, module, rank)
    return Factors(
        down=down,
        up=up,
        alpha=written or float(rank),  # kohya writes 0 where it means the rank
        magnitude=None if magnitude is None else magnitude.flatten(),
    )


def _alpha(settings: Mapping[str, Any], module: str, rank: int) -> float | None:
    """From peft's settings. Its patterns match the end of a module's name, from a dot on."""
    alpha = settings.get("lora_alpha")
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if re.match(rf"(.*\.)?({pattern})$", module):
            alpha = value
            break
    if alpha is None:
        return None
    return float(alpha) * (math.sqrt(rank) if settings.get("use_rslora") else 1.0)
