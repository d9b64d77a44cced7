"""The key of a cache entry: a digest over everything that its tensors depend on."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runtime import files
from runtime.config.model import Config
from runtime.data.manifest import Manifest, Sample
from runtime.errors import DataError
from runtime.families.base import Family
from runtime.workspace import Workspace

RESIZE = "cover-crop-lanczos/1"  # named here so that a change of the rule makes every entry stale


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """An entry that the config asks for; the paths say where its pixels are."""

    id: str
    split: str
    document: dict[str, Any]
    key: str
    target: Path | None
    controls: tuple[Path, ...]

    @property
    def folder(self) -> str:
        return self.key[:16]


def settings(
    config: Config,
    family: Family,
    model: Path,
    dtypes: dict[str, str],
    made: Mapping[str, Path] | None = None,
) -> dict[str, Any]:
    """What all entries share. `dtypes`: of `text_encoder` and `vae`, for precision changes an embedding.

    `made`: by component, the folder of NF4 weights that are used instead of the model's.
    """
    processor = config.data.processor
    return {
        "family": family.name,
        "template_version": family.template_version,
        "processing": {
            "resize": RESIZE,
            "target_size": list(processor.target_size),
            "controls_size": list(processor.controls_size or ()),
            "vl_pixels": processor.vl_pixels,
        },
        "encoders": {
            name: _encoder(model / name, dtypes.get(name, ""), (made or {}).get(name))
            for name in ("text_encoder", "tokenizer", "processor", "vae")
        },
    }


def _encoder(own: Path, dtype: str, made: Path | None) -> dict[str, str]:
    if made is None:
        return {"fingerprint": files.weights_fingerprint(own), "dtype": dtype}
    return {"fingerprint": files.weights_fingerprint(made), "dtype": "nf4", "compute_dtype": dtype}


def wanted(
    config: Config, workspace: Workspace, manifest: Manifest, root: Path, common: dict[str, Any]
) -> list[Wanted]:
    """Every entry that fit and validation will read: training, held-out and prompt samples."""
    return [
        *(_sample(config, sample, root, common) for sample in manifest.samples),
        *(_prompt(config, workspace, index, common) for index in range(len(config.validation.samples))),
    ]


def _sample(config: Config, sample: Sample, root: Path, common: dict[str, Any]) -> Wanted:
    train = sample.split == "train"
    document = {
        **_document(config, sample.prompt, common, guided=not train),
        "target": sample.target.sha256,
        "controls": [control.sha256 for control in sample.controls],
        "mask": sample.mask.sha256 if sample.mask else None,
        "empty_prompt": train and config.data.caption_dropout_rate > 0,
    }
    return Wanted(
        id=sample.id,
        split=sample.split,
        document=document,
        key=files.document_digest(document),
        target=root / sample.target.path,
        controls=tuple(root / control.path for control in sample.controls),
    )


def _prompt(config: Config, workspace: Workspace, index: int, common: dict[str, Any]) -> Wanted:
    """A prompt of `validation.samples`: controls, no target."""
    asked = config.validation.samples[index]
    controls = tuple(workspace.resolve(image) for image in asked.images)
    for path in controls:
        if not path.is_file():
            raise DataError(
                f"validation.samples[{index}]: no image at {path}", remedy="correct the path in config.yaml"
            )
    document = {
        **_document(config, asked.prompt, common, guided=True),
        "target": None,
        "controls": [files.file_digest(path) for path in controls],
        "mask": None,
        "empty_prompt": False,
    }
    return Wanted(
        id=f"prompt-{index}",
        split="prompt",
        document=document,
        key=files.document_digest(document),
        target=None,
        controls=controls,
    )


def _document(config: Config, prompt: str, common: dict[str, Any], *, guided: bool) -> dict[str, Any]:
    validation = config.validation
    return {
        "schema": "cache-key/1",
        "settings": common,
        "prompt": prompt,
        "negative_prompt": validation.negative_prompt if guided and validation.guidance_scale > 1 else None,
    }


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Dotted names of what differs between two documents, with both values."""
    if isinstance(old, dict) and isinstance(new, dict):
        names = sorted(old.keys() | new.keys())
        return [d for n in names for d in differences(old.get(n), new.get(n), f"{path}.{n}" if path else n)]
    return [] if old == new else [f"{path}: {old} in the cache, {new} now"]
