"""A workspace on which `finetune fit` runs at the true shape of a base, without an encoder having been loaded.

    python benchmarks/true_size.py BASE OUT [--size 384 672] [--controls 1] [--tokens 400] [--buckets 1]
                                   [--quantize nf4] [--set train.max_train_steps=20] [--set KEY=VALUE]
    finetune fit --workspace OUT

BASE is a folder of benchmarks/random_base.py. The pictures are smooth noise; the cache is filled by its own writer with
random tensors of the shapes and dtypes that the encoders would give, so a fit does all that it does on real data. With
`--tokens 120 180 ...` and `--buckets N` there is a sample for each text length in each bucket. Two controls need a
family that takes them: of a base of qwen-image-edit a copy as qwen-image-edit-plus is made in OUT, by hard links where
the disk allows. VALUE is read as YAML.
"""

import argparse
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from runtime import device, files
from runtime.cache import build, roundtrip
from runtime.cache.build import Job
from runtime.cache.encode import Encoded, texts
from runtime.cache.key import Wanted
from runtime.commands.dataset import scan
from runtime.commands.init import write_target
from runtime.config import load
from runtime.config.load import Loaded
from runtime.config.model import Config
from runtime.config.resolve import resolve
from runtime.families import registry
from runtime.workspace import Workspace

RECIPE: dict[str, Any] = {
    "model": {
        "quantize": "none",
        "lora": {"r": 16, "lora_alpha": 16, "target_modules": ["to_q", "to_k", "to_v", "to_out.0"]},
    },
    "data": {"batch_size": 1},
    "cache": {"use_cache": True},
    "train": {"max_train_steps": 10, "probe_samples": 1, "probe_draws": 1},
    "lr_scheduler": {"scheduler_type": "constant"},
}
ASPECTS = ((1.0, 1.0), (1.5, 0.7), (0.7, 1.5), (1.25, 0.8), (0.8, 1.25))
"""Height and width of the pictures of each bucket, relative to the size that is asked for."""
PLUS = "QwenImageEditPlusPipeline"
FEWEST = 4  # samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a sample is made of; sizes are (height, width) in pixels, multiples of 16."""

    size: tuple[int, int]
    controls: int = 1
    tokens: tuple[int, ...] = (400,)
    """Lengths of the embedded text."""
    buckets: int = 1

    @property
    def image_tokens(self) -> int:
        """Of target and controls in the first bucket."""
        return (1 + self.controls) * (self.size[0] // 16) * (self.size[1] // 16)

    @property
    def samples(self) -> int:
        return max(FEWEST, len(self.tokens) * self.buckets)


TINY = Shape(size=(64, 96), tokens=(24,))
"""For the embedded base, on a CPU."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("base", type=Path)
    parser.add_argument("out", type=Path, help="a folder that is not there yet")
    parser.add_argument("--size", type=int, nargs=2, default=(384, 672), help="height and width, pixels")
    parser.add_argument("--controls", type=int, default=1)
    parser.add_argument("--tokens", type=int, nargs="+", default=[400], help="lengths of the text")
    parser.add_argument("--buckets", type=int, choices=range(1, len(ASPECTS) + 1), default=1)
    parser.add_argument("--quantize", choices=("none", "nf4"), default="none")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the config")
    wish = parser.parse_args()
    height, width = wish.size
    shape = Shape(
        size=(height, width), controls=wish.controls, tokens=tuple(wish.tokens), buckets=wish.buckets
    )
    changes = {"model.quantize": wish.quantize, "hardware.device": wish.device, **read_changes(wish.set)}
    workspace = make(wish.out, wish.base, shape, changes)
    print(f"{workspace.root}: {shape.samples} samples; next: finetune fit --workspace {workspace.root}")


def read_changes(given: Sequence[str]) -> dict[str, Any]:
    """`train.compile=true` and the like, by dotted key."""
    pairs = [text.partition("=") for text in given]
    wrong = [key for key, sign, _ in pairs if not sign]
    if wrong:
        raise SystemExit(f"--set {wrong[0]}: expected KEY=VALUE, such as --set train.compile=true")
    return {key: yaml.safe_load(value) for key, _, value in pairs}


def make(out: Path, base: Path, shape: Shape, changes: Mapping[str, Any]) -> Workspace:
    """The workspace in `out`, its dataset scanned and its cache filled."""
    out = out.resolve()
    if shape.controls > registry.facts(base).max_controls:
        base = as_plus(base, out / "base")
    make_pictures(out / "pairs", shape)
    workspace = Workspace(out)
    target = write_target(workspace, model=str(base.resolve()), dataset=str(out / "pairs"), device="auto")
    scan(workspace, holdout=0)
    given = {
        "model.pretrained_model_name_or_path": target["model"],
        "data.processor.target_size": list(shape.size),
        "data.processor.enable_bucket": shape.buckets > 1,
    }
    loaded = configure(workspace, {**given, **changes})
    fill(workspace, loaded.config, shape)
    return workspace


def configure(workspace: Workspace, changes: Mapping[str, Any]) -> Loaded:
    """Write config.yaml: what it was, or RECIPE where there is none, with `changes`."""
    path = workspace.config_path
    before = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else RECIPE
    files.write_text(path, yaml.safe_dump(load.apply_overrides(before, changes), sort_keys=False))
    return load.load_config(path)


def as_plus(base: Path, copy: Path) -> Path:
    """`base` as qwen-image-edit-plus: the same weights under another pipeline's name."""
    for source in (path for path in sorted(base.rglob("*")) if path.is_file()):
        place = copy / source.relative_to(base)
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(source, place)
        except OSError:  # another disk, or one without links
            shutil.copy(source, place)
    index = files.read_json(base / "model_index.json")
    (copy / "model_index.json").unlink()
    files.write_json(copy / "model_index.json", {**index, "_class_name": PLUS})
    return copy


def make_pictures(folder: Path, shape: Shape) -> None:
    rng = np.random.default_rng(0)
    targets, controls = folder / "training_images", folder / "control_images"
    for made in (targets, controls):
        made.mkdir(parents=True)
    for index in range(shape.samples):
        tall, wide = ASPECTS[index % shape.buckets]
        size = round(shape.size[1] * wide), round(shape.size[0] * tall)
        names = [f"p{index:03d}", *(f"p{index:03d}_control_{n}" for n in range(1, shape.controls))]
        for place in (targets / names[0], *(controls / name for name in names[: shape.controls])):
            # Smooth, as pictures are: noise would make the files ten times as large.
            small = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8))
            small.resize(size, Image.Resampling.BICUBIC).save(place.with_suffix(".png"))
        files.write_text(targets / f"{names[0]}.txt", f"paint number {index} red")


def fill(workspace: Workspace, config: Config, shape: Shape) -> None:
    """What `finetune cache` would leave behind, evidence of its roundtrip included, with random tensors."""
    import torch

    job = build.plan(workspace, resolve(workspace, config).config)
    rng = torch.Generator().manual_seed(0)
    for want in job.wants:
        number = int(want.id.rpartition("p")[2]) // shape.buckets
        job.store.write(want, _encoded(job, want, shape.tokens[number % len(shape.tokens)], rng))
    entries = {want.folder: build._kept(job.store.entry(want.folder)) for want in job.wants}
    job.store.write_manifest(job.wants, job.common, job.dataset_digest, entries)
    job.store.index.save()
    recording = workspace.begin_evidence(roundtrip.NAME, "benchmarks/true_size.py")
    recording.write(inputs={"files": roundtrip._inputs(workspace, job.store)}, data={})


def _encoded(job: Job, want: Wanted, tokens: int, rng: Any) -> Encoded:
    import torch

    sizes, dtypes = want.document["sizes"], job.config.cache.dtypes
    named = {"target": sizes["target"], **{f"control_{n}": size for n, size in enumerate(sizes["controls"])}}
    channels = job.facts.latent_channels
    tensors = {
        name: torch.randn(channels, height // 8, width // 8, generator=rng).to(device.dtype_of(dtypes.vae))
        for name, (height, width) in named.items()
    }
    text_width = read_denoiser(job.model)["joint_attention_dim"]
    for name in texts(want.document):
        drawn = torch.randn(tokens, text_width, generator=rng)
        tensors[name] = drawn.to(device.dtype_of(dtypes.text_encoder))
    return Encoded(tensors=tensors)


def read_denoiser(base: Path) -> dict[str, Any]:
    """The config of a base's denoiser, without the entries that name its class."""
    document = json.loads((base / "transformer" / "config.json").read_text(encoding="utf-8"))
    return {name: value for name, value in document.items() if not name.startswith("_")}


if __name__ == "__main__":
    main()
