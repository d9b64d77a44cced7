"""The key of a cache entry: a digest over everything that its tensors depend on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from runtime import files
from runtime.config.model import Config
from runtime.config.prompts import Prompt, prompts_of, refuse_broken_sizes
from runtime.data import buckets, images, manifest, order
from runtime.data.buckets import Placed, Places
from runtime.data.manifest import Manifest
from runtime.data.sample import Sample, Settings
from runtime.families.facts import Facts
from runtime.index import Index
from runtime.workspace import Workspace

SCHEMA = "cache-key/2"
RESIZE = "cover-crop-lanczos/2"  # named here so that a change of the rule makes every entry stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A file, and where it is cut and to which size it is brought."""

    path: Path
    placed: Placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An entry that the config asks for; the pictures say where its pixels are."""

    id: str
    split: str
    document: dict[str, Any]
    key: str
    target: Picture | None
    controls: tuple[Picture, ...]
    mask: Picture | None = None

    @property
    def folder(self) -> str:
        return self.key[:16]


def settings(
    config: Config, facts: Facts, model: Path, made: Mapping[str, Path] | None = None
) -> dict[str, Any]:
    """What all entries share, for a resolved config.

    `made`: by component, the folder of NF4 weights that are used instead of the model's.
    """
    dtypes = config.cache.dtypes
    encoders = {
        name: _encoder(model / name, getattr(dtypes, name, ""), (made or {}).get(name))
        for name in ("text_encoder", "tokenizer", "processor", "vae")
    }
    if config.cache.vae != "exact":  # which gives the bits that caches hold from before there was a choice
        encoders["vae"]["mode"] = config.cache.vae
    return {
        "family": facts.name,
        "template_version": facts.template_version,
        "processing": {
            "resize": RESIZE,
            "vl_pixels": config.data.processor.vl_pixels,
            "background": list(config.data.processor.background),
            "max_prompt_tokens": config.data.max_prompt_tokens,
        },
        "encoders": encoders,
    }


def _encoder(own: Path, dtype: str, made: Path | None) -> dict[str, str]:
    if made is None:
        return {"fingerprint": files.weights_fingerprint(own), "dtype": dtype}
    return {"fingerprint": files.weights_fingerprint(made), "dtype": "nf4", "compute_dtype": dtype}


def wanted(
    config: Config, workspace: Workspace, listed: Manifest, facts: Facts, common: dict[str, Any]
) -> list[Wanted]:
    """Every entry that fit and validation will read: training, held-out and prompt samples."""
    roots = manifest.roots(workspace, listed)
    sizings = {
        name: buckets.sizing(config.data.processor, kept, facts.size_multiple)
        for name, kept in listed.settings.items()
    }
    samples = [
        _sample(config, sample, roots[sample.source], sizings[sample.source], common)
        for sample in listed.samples
    ]
    asked = prompts_of(config, workspace)
    if not asked:
        return samples
    refuse_broken_sizes(asked, facts.size_multiple)
    index = Index.open(workspace.index_path)
    sizing = buckets.sizing(config.data.processor, Settings(), facts.size_multiple)
    prompts = [_prompt(config, prompt, sizing, common, index) for prompt in asked]
    index.save()
    return samples + prompts


def _sample(
    config: Config, sample: Sample, root: Path, sizing: buckets.Sizing, common: dict[str, Any]
) -> Wanted:
    train = sample.split == "train"
    placed = order.places(sample, sizing)
    document = {
        **_document(config, sample.prompt, common, placed, guided=not train),
        "alternatives": list(sample.alternatives) if train else [],
        "target": sample.target.sha256,
        "controls": [control.sha256 for control in sample.controls],
        "mask": sample.mask.sha256 if sample.mask else None,
        "empty_prompt": train and config.data.caption_dropout_rate > 0,
    }
    paths = [root / control.path for control in sample.controls]
    return Wanted(
        id=sample.id,
        split=sample.split,
        document=document,
        key=files.document_digest(document),
        target=_picture(root / sample.target.path, placed.target),
        controls=_pictures(paths, placed),
        mask=_picture(root / sample.mask.path, placed.mask) if sample.mask else None,
    )


def _picture(path: Path, placed: Placed | None) -> Picture:
    assert placed is not None  # a sample's target and mask have a place
    return Picture(path=path, placed=placed)


def _pictures(paths: Sequence[Path], placed: Places) -> tuple[Picture, ...]:
    return tuple(Picture(path=path, placed=place) for path, place in zip(paths, placed.controls, strict=True))


def _prompt(
    config: Config, prompt: Prompt, sizing: buckets.Sizing, common: dict[str, Any], index: Index
) -> Wanted:
    """An entry to paint from: a prompt and its controls, without a target."""
    asked, paths = prompt.asked, [path for _, path in prompt.images]
    known = [images.identify(path, name, index) for name, path in prompt.images]
    if asked.size is not None:
        sizing = replace(sizing, target=asked.size, enable_bucket=False)
    placed = buckets.place(
        sizing, target=None, controls=[(picture.height, picture.width) for picture in known], mask=None
    )
    document = {
        **_document(config, asked.prompt, common, placed, guided=True, negative=asked.negative_prompt),
        "alternatives": [],
        "target": None,
        "controls": [picture.sha256 for picture in known],
        "mask": None,
        "empty_prompt": False,
    }
    return Wanted(
        id=prompt.name,
        split="prompt",
        document=document,
        key=files.document_digest(document),
        target=None,
        controls=_pictures(paths, placed),
    )


def _document(
    config: Config,
    prompt: str,
    common: dict[str, Any],
    placed: Places,
    *,
    guided: bool,
    negative: str | None = None,
) -> dict[str, Any]:
    validation = config.validation
    negative = validation.negative_prompt if negative is None else negative
    return {
        "schema": SCHEMA,
        "settings": common,
        "sizes": {
            "target": list(placed.size),
            "controls": [list(control.size) for control in placed.controls],
        },
        # The same size can come of a picture scaled whole or cut unscaled; the mask follows the target's box.
        "boxes": {
            "target": list(placed.target.box) if placed.target is not None else None,
            "controls": [list(control.box) for control in placed.controls],
        },
        "prompt": prompt,
        "negative_prompt": negative if guided and validation.guidance_scale > 1 else None,
    }


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Dotted names of what differs between two documents, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{path}.{n}" if path else n)]
    return [] if old == new else [f"{path}: {old} in the cache, {new} now"]
