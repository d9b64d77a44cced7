"""A healthy synthetic workspace, written with numpy and Pillow alone, for the gates to judge."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gates.evidence import dataset_digest, document_digest, file_digest, weights_fingerprint
from gates.selftest import nf4
from gates.selftest.editing import Made, write_json, write_yaml
from gates.selftest.fits import (
    HOLDOUT,
    HOST,
    NOW,
    SAMPLES,
    TOOL,
    cache_entry,
    drawn,
    trained_digest,
    write_run,
)
from gates.selftest.machines import ADAPTED_FROM, adaptation_data, environment_data, host_data

STEPS, INTERVAL, SMOKE = 60, 20, 5


def healthy(
    root: Path, device: str = "cpu", *, controls: int = 1, train: dict[str, Any] | None = None
) -> Made:
    """A workspace whose gates all pass; `train` goes into that section of its config."""
    made = Made(root)
    target = {
        "schema": "target/1", "device": device, "model": "models/base", "dataset": "data", "python": "3.11",
        "created_at": NOW,
    }  # fmt: skip
    write_json(root / ".gates" / "target.json", target)
    _model(root / "models" / "base")
    samples = _dataset(made, controls)
    config = _config(made, train or {})
    data = dataset_data("data", samples)
    digest = data["dataset_digest"]
    _evidence(made, "01-host", host_data(device))
    _evidence(made, "02-dataset", data)
    _evidence(made, "03-environment", environment_data(device))
    _evidence(made, "04-plan", _plan(config, digest, device))
    _evidence(made, "05-adaptation", adaptation_data(device), ADAPTED_FROM)
    nf4.write_made(root)
    _evidence(made, "06-quantize", nf4.data(root))
    manifest = _cache(made, samples, digest)
    roundtrip = {
        "manifest_digest": document_digest(manifest["entries"]), "tolerance": 0.02,
        "samples": [
            {"id": sample["id"], "embeds_error": error, "embeds_rounding": rounding, "latents_error": 0.002,
             "decoded_psnr_db": 28.5}
            for sample, (error, rounding) in zip(
                samples[:4], ((0.001, 0.0), (0.001, 0.001), (0.019, 0.001), (0.08, 0.083)), strict=True
            )
        ],
    }  # fmt: skip
    _evidence(made, "07-cache-roundtrip", roundtrip)
    facts = {
        "config": config, "device": device, "dataset_digest": digest,
        "cache_digest": trained_digest(manifest),
        "base": weights_fingerprint(root / "models" / "base" / "transformer"),
    }  # fmt: skip
    overrides = {
        "train.max_train_steps": SMOKE, "train.num_epochs": None, "train.checkpointing_steps": SMOKE
    }  # fmt: skip
    write_run(made.run("smoke"), "smoke", SMOKE, SMOKE, overrides, facts)
    write_run(made.run("full"), "full", STEPS, INTERVAL, {}, facts)
    validate(made)
    return made


def validate(made: Made, name: str = "v1") -> None:
    """Evidence 08 and its pictures, for the held-out samples of the last checkpoint of run `name`."""
    manifest = json.loads((made.root / "cache" / "manifest.json").read_text(encoding="utf-8"))
    run = json.loads((made.project / name / "run.json").read_text(encoding="utf-8"))
    lines = (made.project / name / "saves.jsonl").read_text(encoding="utf-8").splitlines()
    saves = [json.loads(line) for line in lines]
    last = [line for line in saves if line["kind"] == "checkpoint" and line["event"] == "save"][-1]
    held = [entry for entry in manifest["entries"] if entry["split"] == "holdout"]
    place = f"outputs/edit-lora/{name}/validation"
    shutil.rmtree(made.root / place, ignore_errors=True)
    samples = [_validated(made.root, place, entry) for entry in held]
    data = {
        "run": f"outputs/edit-lora/{name}", "run_id": run["run_id"], "checkpoint": last["path"],
        "adapter_sha256": next(iter(last["files"].values()))["sha256"], "device": run["device"]["type"],
        "cache_digest": document_digest(manifest["entries"]), "num_inference_steps": 20,
        "guidance_scale": 1.0, "seed": 42, "draws_per_sample": 32,
        "heldout_mean": heldout_mean(samples), "samples": samples,
    }  # fmt: skip
    _evidence(made, "08-validation", data)


def heldout_mean(samples: list[dict[str, Any]]) -> dict[str, float]:
    lines = [line for sample in samples for line in sample["draws"]]
    return {variant: sum(line[variant] for line in lines) / len(lines) for variant in ("base", "adapter")}


def _validated(root: Path, place: str, entry: dict[str, Any]) -> dict[str, Any]:
    """A sample whose edit brightens the right half, which the adapter does and the base does not."""
    control = (drawn(entry["id"] + "/picture", 32, 48, 3) * 30 + 110).clip(0, 255)
    target = control.copy()
    target[:, 24:] += 60
    shown = {"control": control, "target": target, "base": control, "zero": control, "adapter": target}
    pictures = {}
    for kind, pixels in shown.items():
        path = f"{place}/{kind}/{entry['folder']}.png"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(root / path)
        pictures[kind] = {"path": path, **file_size_and_digest(root / path)}
    noise = document_digest(["noise", entry["id"]])
    draws = [
        {"sigma": (i + 0.5) / 32, "noise": i, "base": 1.0 + 0.01 * (i % 5), "adapter": 0.8 + 0.01 * (i % 7)}
        for i in range(32)
    ]
    return {
        "id": entry["id"], "split": "holdout", "key": entry["key"], "prompt": "make it brighter",
        "noise_sha256": dict.fromkeys(("base", "adapter", "zero"), noise), "pictures": pictures, "draws": draws,
    }  # fmt: skip


def file_size_and_digest(path: Path) -> dict[str, Any]:
    return {"size": path.stat().st_size, "sha256": file_digest(path)}


def _model(folder: Path) -> None:
    write_json(folder / "model_index.json", {"_class_name": "QwenImageEditPipeline"})
    nf4.write_base(folder)


SETTINGS: dict[str, Any] = {
    "resolution": None, "enable_bucket": None, "bucket_no_upscale": None, "control_resolution": None,
    "no_resize_control": None, "batch_size": None, "views": 1, "weight": None, "max_samples": None,
    "regularisation": False, "trigger_word": "", "caption_lines": False,
}  # fmt: skip


def dataset_data(root: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Evidence 02-dataset of a folder in the recipe's layout."""
    source = {
        "name": "dataset", "kind": "folders", "root": root, "origin": root, "files": [],
        "settings": dict(SETTINGS), "dropped": 0,
    }  # fmt: skip
    data = {
        "root": root, "layout": "folders", "dataset_file": None, "sources": [source],
        "holdout_rule": "lowest sha256", "samples": samples, "dropped": [], "warnings": [],
    }  # fmt: skip
    return {**data, "dataset_digest": dataset_digest(data)}


def _dataset(made: Made, controls: int) -> list[dict[str, Any]]:
    samples = []
    for index in range(SAMPLES):
        stem = f"s{index:02d}"
        inputs = [f"control_images/{stem}{f'_control_{n}' if n else ''}.png" for n in range(controls)]
        target = f"training_images/{stem}.png"
        for shift, path in enumerate([target, *inputs]):
            place = made.dataset / path
            place.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((48, 64, 3), (index * 9, (40 + 90 * shift) % 256, 200 - index * 5), np.uint8)
            Image.fromarray(pixels).save(place)
        prompt = f"paint square number {index} blue"
        caption = f"training_images/{stem}.txt"
        (made.dataset / caption).write_text(prompt + "\n", encoding="utf-8", newline="\n")
        samples.append(
            {
                "id": stem,
                "source": "dataset",
                "split": "holdout" if index < HOLDOUT else "train",
                "prompt": prompt,
                "alternatives": [],
                "mask": None,
                "caption": file_record(made.dataset, caption),
                "target": image_record(made.dataset, target),
                "controls": [image_record(made.dataset, path) for path in inputs],
            }
        )
    return samples


def file_record(root: Path, path: str) -> dict[str, Any]:
    return {"path": path, "size": (root / path).stat().st_size, "sha256": file_digest(root / path)}


def image_record(root: Path, path: str) -> dict[str, Any]:
    with Image.open(root / path) as image:
        return {**file_record(root, path), "width": image.width, "height": image.height}


def _config(made: Made, train: dict[str, Any]) -> dict[str, Any]:
    config = {
        "model": {"pretrained_model_name_or_path": "models/base", "lora": {"r": 2, "lora_alpha": 2}},
        "data": {"processor": {"target_size": [32, 48]}},
        "train": {"max_train_steps": STEPS, "checkpointing_steps": INTERVAL, **train},
    }
    write_yaml(made.root / "config.yaml", config)
    return config


def _plan(config: dict[str, Any], digest: str, device: str) -> dict[str, Any]:
    phase = {
        "components_gib": {"denoiser": 1.0, "activations": 0.5}, "resident_gib": 1.0, "peak_gib": 1.5,
        "largest": "denoiser", "reserve_gib": 0.25, "host_gib": {"process": 0.5, "loading": 0.25},
        "host_peak_gib": 0.75,
    }  # fmt: skip
    return {
        "config_digest": document_digest(config), "dataset_digest": digest, "device": device,
        "family": "qwen-image-edit", "size_multiple": 16, "budget_gib": 8.0, "budget_source": "measured",
        "margin_gib": 6.25, "host_budget_gib": 8.0, "unified_memory": False, "choices": {},
        "disk": {"needed_gib": 1.0, "free_gib": 50.0},
        "phases": {"cache": phase, "fit": phase, "validate": phase},
        "steps": {"samples": 11, "per_epoch": 11, "planned": STEPS, "checkpoints": 3, "epochs": 5.5},
    }  # fmt: skip


def _evidence(made: Made, name: str, data: dict[str, Any], config: dict[str, Any] | None = None) -> None:
    document = {
        "schema": "evidence/1", "gate": name[:2], "name": name, "run_id": "e1", "measured_at": NOW,
        "host_id": HOST, "tool": TOOL, "command": "finetune", "inputs": {"files": {}, "config": config or {}},
        "complete": True, "data": data,
    }  # fmt: skip
    write_json(made.evidence(name), document)


def _cache(made: Made, samples: list[dict[str, Any]], digest: str) -> dict[str, Any]:
    settings = {
        "family": "qwen-image-edit", "template_version": "1",
        "encoders": {
            "text_encoder": {
                "fingerprint": weights_fingerprint(made.root / "models" / "nf4" / "text_encoder"),
                "dtype": "nf4", "compute_dtype": "fp32",
            },
            "vae": {"fingerprint": "0" * 64, "dtype": "fp32"},
        },
        "processing": {"vl_pixels": 1024, "background": [255, 255, 255], "max_prompt_tokens": 1024},
    }  # fmt: skip
    entries = [cache_entry(made.root / "cache", sample, settings) for sample in samples]
    manifest = {
        "schema": "cache-manifest/1", "complete": True, "tool": TOOL, "updated_at": NOW,
        "dataset_digest": digest, "settings": settings, "entries": entries,
        "counts": {"train": SAMPLES - HOLDOUT, "holdout": HOLDOUT, "prompt": 0},
    }  # fmt: skip
    write_json(made.root / "cache" / "manifest.json", manifest)
    return manifest
