"""What fits where: the published base on machines of 16 to 96 GiB and on cards, planned without weights or device.

    python benchmarks/what_fits.py [--size 384 672] [--controls 1] [--machines pc16 card24 ...] [--set KEY=VALUE]

Writes the published base's config.json files and four plain pictures into a temporary workspace, then asks
`finetune plan --for`. Needs no torch. The figures are planned, not measured; benchmarks/memory_plan.py measures.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import yaml
from PIL import Image

from runtime.commands import dataset
from runtime.commands.init import write_target
from runtime.commands.plan import elsewhere
from runtime.config.load import apply_overrides
from runtime.planning.machines import MACHINES
from runtime.workspace import Workspace

PUBLISHED: dict[str, dict[str, Any]] = {
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
PIPELINES = {1: "QwenImageEditPipeline", 2: "QwenImageEditPlusPipeline"}
PAIRS = 4
CAPTION = (
    "make the sky of this picture a deep evening red and leave all the rest of it exactly as it was before"
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=int, nargs=2, default=(384, 672), help="height and width, pixels")
    parser.add_argument("--controls", type=int, default=1, choices=(1, 2))
    parser.add_argument("--machines", nargs="+", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of config.yaml, as YAML")
    parser.add_argument("--json", action="store_true")
    wish = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        changes = {key: yaml.safe_load(value) for key, _, value in (item.partition("=") for item in wish.set)}
        workspace = prepare(Path(folder), tuple(wish.size), wish.controls, changes)
        elsewhere(workspace, wish.machines, as_json=wish.json)


def prepare(root: Path, size: tuple[int, int], controls: int, changes: dict[str, Any]) -> Workspace:
    model = write_configs(root / "base", controls)
    pairs = write_pairs(root / "pairs", size, controls)
    workspace = Workspace(root / "work")
    write_target(workspace, model=str(model), dataset=str(pairs), device="cpu")
    dataset.scan(workspace)
    document = {
        "model": {"pretrained_model_name_or_path": "external:model"},
        "train": {"max_train_steps": 1000},
        "data": {"processor": {"target_size": list(size)}},
    }
    text = yaml.safe_dump(apply_overrides(document, changes))
    workspace.config_path.write_text(text, encoding="utf-8", newline="\n")
    return workspace


def write_configs(folder: Path, controls: int) -> Path:
    for component, document in PUBLISHED.items():
        (folder / component).mkdir(parents=True)
        (folder / component / "config.json").write_text(json.dumps(document), encoding="utf-8", newline="\n")
    index = json.dumps({"_class_name": PIPELINES[controls]})
    (folder / "model_index.json").write_text(index, encoding="utf-8", newline="\n")
    return folder


def write_pairs(folder: Path, size: tuple[int, int], controls: int) -> Path:
    (folder / "training_images").mkdir(parents=True)
    (folder / "control_images").mkdir()
    for index in range(PAIRS):
        picture = Image.new("RGB", size[::-1], (40 * index, 90, 160))
        picture.save(folder / "training_images" / f"p{index}.png")
        (folder / "training_images" / f"p{index}.txt").write_text(CAPTION, encoding="utf-8", newline="\n")
        for number in range(controls):
            suffix = f"_control_{number}" if number else ""
            Image.new("RGB", size[::-1], (90, 40 * index, 60)).save(
                folder / "control_images" / f"p{index}{suffix}.png"
            )
    return folder


if __name__ == "__main__":
    main()
