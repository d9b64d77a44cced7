"""Weights of a denoiser from wherever they lie, under the names that diffusers gives them.

    a folder                  of diffusers: the component's, or the model's that holds transformer/
    an index                  *.safetensors.index.json
    a shard                   NAME-00001-of-0000N.safetensors stands for all of them
    a single file             with a prefix before every name or without

ComfyUI marks a Qwen-Image-Edit-2511 denoiser by a tensor that is no weight; it becomes `zero_cond_t`.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runtime import files, shards
from runtime.errors import UserError
from runtime.families import kinds
from runtime.families.facts import Facts
from runtime.memory.loading import Piece, Wanted
from runtime.shards import Entry

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.")
OTHERS = ("first_stage_model.", "vae.", "cond_stage_model.", "text_encoders.", "conditioner.")
MARKER = "__index_timestep_zero__"
COMPILED = "_orig_mod."
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
FLOAT8 = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
SCALES = ("scale_weight", "weight_scale")
# Beside scales: what a kernel in fp8 would need; weights are read without.
FLOAT8_EXTRAS = ("scale_input", "input_scale", "comfy_quant", "scaled_fp8")
COMFY_FORMATS = ("float8_e4m3fn", "float8_e5m2")
REMEDY = "give model.transformer_weight a bf16 checkpoint of this base's denoiser"
SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    file: Path
    entry: Entry

    def read(self) -> Tensor:
        if self.entry.dtype in FLOAT8:
            raw = shards.read_tensor(self.file, replace(self.entry, dtype="U8"))
            return raw.view(FLOAT8[self.entry.dtype])
        return shards.read_tensor(self.file, self.entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A checkpoint whose headers are read; a tensor is read when it is asked for."""

    path: Path
    files: tuple[Path, ...]
    places: Mapping[str, Place]
    scales: Mapping[str, Place]
    """By the name of the fp8 weight."""
    config: Path | None
    """The config.json beside a folder's weights."""
    zero_cond_t: bool | None
    """Whether control tokens are modulated as at sigma 0 (2511); None where the files don't tell."""

    def read(self, name: str) -> Tensor:
        """As stored; fp8 in fp32, multiplied by its scale where it has one."""
        tensor = self.places[name].read()
        if self.places[name].entry.dtype not in FLOAT8:
            return tensor
        scale = self.scales[name].read().float() if name in self.scales else torch.ones(())
        return tensor.float() * (scale.reshape(-1, 1) if scale.numel() > 1 else scale)

    def pieces(self, wanted: Wanted) -> Iterator[Piece]:
        """As `runtime.memory.loading.Source`."""
        for name in filter(wanted, self.places):
            yield Piece(name=name, tensor=self.read(name))

    def fingerprint(self) -> str:
        """Identity of what is loaded: the files by name, without their folder."""
        return files.files_fingerprint([*self.files, *([self.config] if self.config else [])])


# ---- finding


def files_of(path: Path) -> list[Path]:
    """All files of the checkpoint that `path` means. Raises UserError where one is absent."""
    if path.is_dir():
        return shards.find(_component(path))
    if not path.is_file():
        raise UserError(f"{path} is not there", remedy=REMEDY)
    if path.name.endswith(".index.json"):
        return _indexed(path)
    matched = SHARD.fullmatch(path.name)
    return _siblings(path, matched[1], matched[3]) if matched else [path]


def _component(folder: Path) -> Path:
    return folder / "transformer" if (folder / "transformer").is_dir() else folder


def _indexed(index: Path) -> list[Path]:
    try:
        return shards.listed(index.parent, index)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} is no index of shards: {error}", remedy=shards.FETCH) from error


def _siblings(path: Path, stem: str, count: str) -> list[Path]:
    every = [
        path.with_name(f"{stem}-{number:05d}-of-{count}.safetensors") for number in range(1, int(count) + 1)
    ]
    absent = [file.name for file in every if not file.is_file()]
    if absent:
        raise UserError(f"{path.parent} is incomplete; shards not there: {', '.join(absent)}", remedy=REMEDY)
    return every


# ---- opening


def open_denoiser_weights(path: Path) -> Weights:
    """The checkpoint at `path`, headers read. Raises UserError for what is no denoiser, or not whole."""
    found = files_of(path)
    stored = {file: shards.read_header(file) for file in found}
    names = [name for header in stored.values() for name in header]
    kind = kinds.of_names(names)
    if kind != "denoiser":
        seen = f"; it begins with {', '.join(names[:SHOWN])}" if kind == "unknown" else ""
        raise UserError(kinds.refusal(path, kind, "denoiser") + seen, remedy=REMEDY)
    places = _places(path, stored)
    marked = places.pop(MARKER, None) is not None
    config = _component(path) / "config.json" if path.is_dir() else None
    config = config if config is not None and config.is_file() else None
    told = bool(files.read_json(config).get("zero_cond_t", False)) if config else None
    weights, scales = _without_scales(path, places)
    return Weights(
        path=path,
        files=tuple(found),
        places=weights,
        scales=scales,
        config=config,
        zero_cond_t=True if marked else told,
    )


def _places(path: Path, stored: Mapping[Path, Mapping[str, Entry]]) -> dict[str, Place]:
    """By name without prefix; other components of a file that holds a whole pipeline left out."""
    every = [name for header in stored.values() for name in header]
    prefix = next((p for p in PREFIXES if any(name.startswith(p) for name in every)), "")
    places: dict[str, Place] = {}
    for file, header in stored.items():
        for stored_name, entry in header.items():
            if prefix and stored_name.startswith(OTHERS):
                continue
            name = stored_name.removeprefix(prefix).replace(COMPILED, "")
            if name in places:
                raise UserError(
                    f"{path} holds {name} twice, in {places[name].file.name} and {file.name}: "
                    "several checkpoints in one folder, or one of them twice",
                    remedy="give model.transformer_weight one file, shard or index of them",
                )
            places[name] = Place(file=file, entry=entry)
    return places


def _without_scales(path: Path, places: Mapping[str, Place]) -> tuple[dict[str, Place], dict[str, Place]]:
    """Weights, and the scales of those in fp8. Raises UserError for a scheme that is not read here."""
    if not any(place.entry.dtype in FLOAT8 for place in places.values()):
        return dict(places), {}
    weights, scales = {}, {}
    for name, place in places.items():
        module, _, leaf = name.rpartition(".")
        if leaf in SCALES:
            scales[f"{module}.weight"] = place
        elif leaf == "comfy_quant":
            _refuse_format(path, name, place)
        elif leaf not in FLOAT8_EXTRAS:
            weights[name] = place
    for name, scale in scales.items():
        entry = weights[name].entry if name in weights else None
        if entry is None or entry.dtype not in FLOAT8 or scale.entry.elements not in (1, entry.shape[0]):
            raise UserError(
                f"{path}: the scale {list(scale.entry.shape)} of {name} is of a scheme that is not read here; "
                "one for the weight, or one for each of its rows, is",
                remedy=REMEDY,
            )
    return weights, scales


def _refuse_format(path: Path, name: str, place: Place) -> None:
    text = bytes(place.read().tolist())
    try:
        form = json.loads(text)["format"]
    except (ValueError, KeyError, TypeError):
        form = repr(text[:40])
    if form not in COMFY_FORMATS:
        raise UserError(
            f"{path}: {name} says {form}, which is not read here; {' and '.join(COMFY_FORMATS)} are",
            remedy=REMEDY,
        )


# ---- fitting a base


def changes_of(weights: Weights, facts: Facts) -> dict[str, Any]:
    """What of the base's config the checkpoint overrules. Raises UserError for a denoiser of another family."""
    if weights.zero_cond_t and facts.max_controls < 2:
        raise UserError(
            f"{weights.path} is a denoiser of Qwen-Image-Edit-2511, the base is of the family {facts.name}, which "
            "is prompted otherwise",
            remedy="set model.pretrained_model_name_or_path to Qwen-Image-Edit-2511",
        )
    return {} if weights.zero_cond_t is None else {"zero_cond_t": weights.zero_cond_t}


def refuse_differences(model: nn.Module, weights: Weights) -> None:
    """Raises UserError where names or shapes are not those of `model`, which may be without storage."""
    wanted = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    there = {name: place.entry.shape for name, place in weights.places.items()}
    faults = {
        "missing": [name for name in wanted if name not in there],
        "unexpected": [name for name in there if name not in wanted],
        "of another shape": [
            f"{name} {list(there[name])} instead of {list(shape)}"
            for name, shape in wanted.items()
            if name in there and there[name] != shape
        ],
    }
    if any(faults.values()):
        told = "; ".join(
            f"{len(names)} {what}: {', '.join(names[:SHOWN])}" for what, names in faults.items() if names
        )
        raise UserError(f"{weights.path} is no denoiser of this base: {told}", remedy=REMEDY)
