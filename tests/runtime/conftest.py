"""Configs of a base without weights and a workspace over them; and `lab`, where the embedded base trains."""

import gc
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import yaml
from PIL import Image

from runtime import files
from runtime.config import load
from runtime.config.load import Loaded
from runtime.progress import Progress
from runtime.workspace import Workspace

if TYPE_CHECKING:
    from torch import Tensor

    from runtime.cache import build
    from runtime.data import manifest
    from runtime.training import record, session

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch: two workers with two threads each are ten times slower

PIPELINE = {"qwen-image-edit": "QwenImageEditPipeline", "qwen-image-edit-plus": "QwenImageEditPlusPipeline"}
TINY = {
    "transformer": {
        "num_layers": 2,
        "num_attention_heads": 4,
        "attention_head_dim": 32,
        "joint_attention_dim": 64,
        "in_channels": 64,
        "out_channels": 16,
        "patch_size": 2,
    },
    "vae": {"base_dim": 16, "temperal_downsample": [False, True, True]},
    "text_encoder": {
        "text_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 1100,
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
}
# Published Qwen-Image-Edit; the text encoder's file is flat, as it is there.
REAL = {
    "transformer": {
        "num_layers": 60,
        "num_attention_heads": 24,
        "attention_head_dim": 128,
        "joint_attention_dim": 3584,
        "in_channels": 64,
        "out_channels": 16,
        "patch_size": 2,
    },
    "vae": {"base_dim": 96, "temperal_downsample": [False, True, True]},
    "text_encoder": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "vision_config": {
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
}

MakeModel = Callable[..., Path]
MakeDataset = Callable[..., Path]


@pytest.fixture
def make_model(tmp_path: Path) -> MakeModel:
    """Folder of a base's configs; `real=True` for the published sizes."""

    def make(*, real: bool = False, family: str = "qwen-image-edit", name: str = "base") -> Path:
        root = tmp_path / name
        documents: dict[str, dict[str, Any]] = REAL if real else TINY
        for component, document in documents.items():
            (root / component).mkdir(parents=True)
            (root / component / "config.json").write_text(json.dumps(document), encoding="utf-8")
        index = json.dumps({"_class_name": PIPELINE[family]})
        (root / "model_index.json").write_text(index, encoding="utf-8")
        return root

    return make


@pytest.fixture
def make_dataset(tmp_path: Path) -> MakeDataset:
    """`count` pairs s00, s01, ... of `size` (width, height), each with `controls` controls."""

    def make(
        count: int = 12, *, size: tuple[int, int] = (64, 64), controls: int = 1, name: str = "pairs"
    ) -> Path:
        root = tmp_path / name
        (root / "training_images").mkdir(parents=True)
        (root / "control_images").mkdir()
        for index in range(count):
            stem = f"s{index:02d}"
            Image.new("RGB", size, (index * 9, 40, 90)).save(root / "training_images" / f"{stem}.png")
            for number in range(controls):
                suffix = f"_control_{number}" if number else ""
                picture = Image.new("RGB", size, (index * 9, 200, number * 20))
                picture.save(root / "control_images" / f"{stem}{suffix}.png")
            (root / "training_images" / f"{stem}.txt").write_text(f"edit number {index}", encoding="utf-8")
        return root

    return make


@pytest.fixture
def read_dataset(tmp_path: Path) -> "Callable[[Path], manifest.Manifest]":
    """The manifest of a folder, its holdout by the default rule."""
    from runtime.data import reading

    def read(root: Path) -> "manifest.Manifest":
        reader = Workspace(tmp_path / "reader")
        return reading.build(reader, reader.refer(root, "dataset"))

    return read


@pytest.fixture
def workspace(tmp_path: Path, make_model: MakeModel, make_dataset: MakeDataset) -> Workspace:
    """Initialised for the CPU with the tiny base and twelve pairs, nothing scanned yet."""
    from runtime.commands.init import write_target

    made = Workspace(tmp_path / "work")
    write_target(made, model=str(make_model()), dataset=str(make_dataset()), device="cpu")
    return made


SCHEMAS = Path(__file__).parents[2] / "schemas"
# Quick, and nothing at a value that would hide a fault: alpha is not r, dropouts are on where a test says so.
RECIPE: dict[str, Any] = {
    "model": {"pretrained_model_name_or_path": "external:model", "lora": {"r": 4, "lora_alpha": 8}},
    "data": {"batch_size": 2, "processor": {"target_size": [64, 64]}},
    "cache": {"use_cache": True},
    "train": {"max_train_steps": 6, "checkpointing_steps": 3, "probe_samples": 1, "probe_draws": 1},
    "optimizer": {"init_args": {"lr": 1e-2}},
    "lr_scheduler": {"scheduler_type": "constant", "warmup_steps": 0},
    "validation": {"num_inference_steps": 2},
    "hardware": {"device": "cpu"},
}
PROMPTS = (
    "paint the circle red",
    "make the background blue",
    "paint the circle red",
    "turn the star white and leave all the rest of the picture as it was",
)


@dataclass(frozen=True, slots=True)
class Lab:
    """A workspace with a scanned dataset, a config and a built cache, and the ways to work in it."""

    workspace: Workspace

    @property
    def root(self) -> Path:
        return self.workspace.root

    @property
    def project(self) -> Path:
        return self.root / "outputs" / "edit-lora"

    def configure(self, changes: dict[str, Any] | None = None) -> Loaded:
        """config.yaml anew: the recipe with dotted keys changed."""
        document = load.apply_overrides(RECIPE, changes or {})
        self.workspace.config_path.write_text(yaml.safe_dump(document), encoding="utf-8", newline="\n")
        return load.load_config(self.workspace.config_path)

    def scan(self, holdout: int = 3) -> None:
        from runtime.data import reading

        found = reading.build(self.workspace, "dataset", holdout)
        recording = self.workspace.begin_evidence("02-dataset", "finetune dataset")
        recording.write(inputs={}, data=found.to_json())

    def job(self, changes: dict[str, Any] | None = None) -> "build.Job":
        from runtime.cache import build
        from runtime.config.resolve import resolve

        return build.plan(self.workspace, resolve(self.workspace, self.configure(changes).config).config)

    def cache(self, changes: dict[str, Any] | None = None) -> "build.Summary":
        from runtime.cache import build

        return build.build(self.job(changes), Progress(quiet=True))

    def launch(
        self, changes: dict[str, Any] | None = None, *, smoke: bool = False, resume: str | None = None
    ) -> "session.Session":
        from runtime.training import session

        return session.launch(self.workspace, self.configure(changes), smoke=smoke, resume=resume)

    def fit(
        self, changes: dict[str, Any] | None = None, *, smoke: bool = False, resume: str | None = None
    ) -> "record.Run":
        """A run from launch to its end."""
        from runtime.training import loop

        launched = self.launch(changes, smoke=smoke, resume=resume)
        loop.fit(launched, Progress(quiet=True))
        return launched.run

    def adapter(self, run: Path) -> "dict[str, Tensor]":
        """What the newest resumable checkpoint of `run` holds."""
        from safetensors.torch import load_file

        from runtime.training import checkpoints

        return load_file(checkpoints.lasts(run)[-1] / "model.safetensors")


@pytest.fixture(scope="session")
def prepared(tmp_path_factory: pytest.TempPathFactory, nano: Path) -> Path:
    """Eight pairs to train on, three held out, and their cache; tests take copies."""
    from runtime.demo import shapes

    root = tmp_path_factory.mktemp("prepared") / "work"
    rng = np.random.default_rng(5)
    for folder in ("training_images", "control_images"):
        (root / "dataset" / folder).mkdir(parents=True)
    for index in range(11):
        edit = shapes.edit(rng)
        shapes.draw(edit.control).save(root / "dataset" / "control_images" / f"p{index}.png")
        shapes.draw(edit.target).save(root / "dataset" / "training_images" / f"p{index}.png")
        caption = root / "dataset" / "training_images" / f"p{index}.txt"
        caption.write_text(PROMPTS[index % len(PROMPTS)], encoding="utf-8")
    lab = Lab(Workspace(root))
    files.write_json(
        lab.workspace.target_path,
        {
            "schema": "target/1",
            "device": "cpu",
            "model": "external:model",
            "dataset": "dataset",
            "python": "3.11",
            "created_at": files.utc_now(),
        },
    )
    files.write_json(lab.workspace.local_path, {"external": {"model": str(nano)}})
    lab.scan()
    lab.cache()
    gc.freeze()  # encoders are unloaded with a collection, which takes 0.3 s where it walks all that was imported
    return root


@pytest.fixture
def lab(tmp_path: Path, prepared: Path) -> Lab:
    shutil.copytree(prepared, tmp_path / "lab")
    return Lab(Workspace(tmp_path / "lab"))


@pytest.fixture(scope="session")
def conforms() -> Callable[[Any, str], None]:
    """Fails where a document does not follow the published schema of that name."""
    from jsonschema import Draft202012Validator

    def check(document: Any, name: str) -> None:
        schema = json.loads((SCHEMAS / f"{name}.schema.json").read_text(encoding="utf-8"))
        Draft202012Validator(schema).validate(document)

    return check
