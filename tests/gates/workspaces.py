"""A healthy synthetic workspace, written with numpy and Pillow alone, for the gates to judge."""

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image
from safetensors.numpy import save_file
from synthetic_nf4 import data as nf4_data
from synthetic_nf4 import write_base, write_made

from gates.evidence import dataset_digest, document_digest, file_digest, weights_fingerprint
from gates.schema import with_defaults

NOW = "2026-11-30T12:00:00.000Z"
TOOL = {"name": "aipc-finetune", "version": "0.1.0"}
HOST = "0" * 64
SAMPLES, HOLDOUT = 14, 3
STEPS, INTERVAL, SMOKE = 60, 20, 5
MODULES = [f"blocks.{block}.attn.{name}" for block in range(5) for name in ("to_q", "to_v")]
PARAMETERS = len(MODULES) * 2 * 2 * 16
PACKAGES = {
    "python": "3.11.9", "torch": "2.13.0", "diffusers": "0.42.1", "transformers": "5.24.0", "peft": "0.21.2",
    "accelerate": "1.15.0", "bitsandbytes": "0.50.2", "safetensors": "0.8.0", "numpy": "2.4.6",
}  # fmt: skip


@dataclass(frozen=True)
class Made:
    root: Path

    @property
    def dataset(self) -> Path:
        return self.root / "data"

    @property
    def project(self) -> Path:
        return self.root / "outputs" / "edit-lora"

    def run(self, kind: str) -> Path:
        return self.project / ("v0" if kind == "smoke" else "v1")

    def evidence(self, name: str) -> Path:
        return self.root / ".gates" / "evidence" / f"{name}.json"

    def edit(self, path: Path | str, change: Callable[[Any], Any]) -> None:
        """Change a JSON document in place; what `change` returns replaces it, None keeps it."""
        place = self.root / path
        document = json.loads(place.read_text(encoding="utf-8"))
        result = change(document)
        write_json(place, document if result is None else result)

    def edit_lines(self, path: Path | str, change: Callable[[list[Any]], Any]) -> None:
        place = self.root / path
        lines = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
        result = change(lines)
        lines = lines if result is None else result
        place.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8", newline="\n")

    def edit_config(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change config.yaml, and make the plan one of the new config."""
        path = self.root / "config.yaml"
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        change(config)
        write_yaml(path, config)
        digest = document_digest(config)
        self.edit(self.evidence("04-plan"), lambda document: document["data"].update(config_digest=digest))

    def resave(self, run: str, path: Path) -> None:
        """Record the files of a checkpoint as they are now, as if they had been saved so."""
        folder = self.run(run)

        def change(lines: list[Any]) -> None:
            for line in lines:
                if line["path"] == path.name:
                    line["files"] = recorded(path)

        self.edit_lines(folder / "saves.jsonl", change)

    def rescan(self) -> None:
        """Let the dataset's digest be that of its listed samples, in all that names it."""
        document = json.loads(self.evidence("02-dataset").read_text(encoding="utf-8"))
        digest = dataset_digest(document["data"])
        document["data"]["dataset_digest"] = digest
        write_json(self.evidence("02-dataset"), document)
        self.edit(self.evidence("04-plan"), lambda d: d["data"].update(dataset_digest=digest))


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, sort_keys=True, indent=1) + "\n", encoding="utf-8", newline="\n")


def write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8", newline="\n")


def write_yaml(path: Path, value: Any) -> None:
    path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8", newline="\n")


def recorded(folder: Path) -> dict[str, Any]:
    return {
        path.name: {"size": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted(folder.iterdir())
    }


def healthy(root: Path, device: str = "cpu") -> Made:
    """A workspace whose gates all pass."""
    made = Made(root)
    target = {
        "schema": "target/1", "device": device, "model": "models/base", "dataset": "data", "python": "3.11",
        "created_at": NOW,
    }  # fmt: skip
    write_json(root / ".gates" / "target.json", target)
    _model(root / "models" / "base")
    samples = _dataset(made)
    config = _config(made)
    data = dataset_data("data", samples)
    digest = data["dataset_digest"]
    _evidence(made, "01-host", host_data(device))
    _evidence(made, "02-dataset", data)
    _evidence(made, "03-environment", environment_data(device))
    _evidence(made, "04-plan", _plan(config, digest, device))
    _evidence(made, "05-adaptation", adaptation_data(device), ADAPTED_FROM)
    write_made(root)
    _evidence(made, "06-quantize", nf4_data(root))
    manifest = _cache(made, samples, digest)
    roundtrip = {
        "manifest_digest": document_digest(manifest["entries"]), "tolerance": 0.02,
        "samples": [
            {"id": sample["id"], "embeds_error": 0.001, "latents_error": 0.002, "decoded_psnr_db": 28.5}
            for sample in samples[:4]
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


def validate(made: Made) -> None:
    """Evidence 08 and its pictures, for the held-out samples of the full run's last checkpoint."""
    manifest = json.loads((made.root / "cache" / "manifest.json").read_text(encoding="utf-8"))
    run = json.loads((made.run("full") / "run.json").read_text(encoding="utf-8"))
    saves = [json.loads(line) for line in (made.run("full") / "saves.jsonl").read_text("utf-8").splitlines()]
    last = [line for line in saves if line["kind"] == "checkpoint" and line["event"] == "save"][-1]
    held = [entry for entry in manifest["entries"] if entry["split"] == "holdout"]
    place = "outputs/edit-lora/v1/validation"
    shutil.rmtree(made.root / place, ignore_errors=True)
    samples = [_validated(made.root, place, entry) for entry in held]
    data = {
        "run": "outputs/edit-lora/v1", "run_id": run["run_id"], "checkpoint": last["path"],
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


def trained_digest(manifest: dict[str, Any]) -> str:
    return document_digest([entry for entry in manifest["entries"] if entry["split"] == "train"])


def _model(folder: Path) -> None:
    write_json(folder / "model_index.json", {"_class_name": "QwenImageEditPipeline"})
    write_base(folder)


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


def _dataset(made: Made) -> list[dict[str, Any]]:
    samples = []
    for index in range(SAMPLES):
        stem = f"s{index:02d}"
        paths = {"target": f"training_images/{stem}.png", "control": f"control_images/{stem}.png"}
        for shift, path in enumerate(paths.values()):
            place = made.dataset / path
            place.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((48, 64, 3), (index * 9, 40 + 90 * shift, 200 - index * 5), np.uint8)
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
                "target": image_record(made.dataset, paths["target"]),
                "controls": [image_record(made.dataset, paths["control"])],
            }
        )
    return samples


def file_record(root: Path, path: str) -> dict[str, Any]:
    return {"path": path, "size": (root / path).stat().st_size, "sha256": file_digest(root / path)}


def image_record(root: Path, path: str) -> dict[str, Any]:
    with Image.open(root / path) as image:
        return {**file_record(root, path), "width": image.width, "height": image.height}


def _config(made: Made) -> dict[str, Any]:
    config = {
        "model": {"pretrained_model_name_or_path": "models/base", "lora": {"r": 2, "lora_alpha": 2}},
        "data": {"processor": {"target_size": [32, 48]}},
        "train": {"max_train_steps": STEPS, "checkpointing_steps": INTERVAL},
    }
    write_yaml(made.root / "config.yaml", config)
    return config


def _plan(config: dict[str, Any], digest: str, device: str) -> dict[str, Any]:
    phase = {
        "components_gib": {"denoiser": 1.0, "activations": 0.5}, "resident_gib": 1.0, "peak_gib": 1.5,
        "largest": "denoiser",
    }  # fmt: skip
    return {
        "config_digest": document_digest(config), "dataset_digest": digest, "device": device,
        "family": "qwen-image-edit", "size_multiple": 16, "budget_gib": 8.0, "budget_source": "measured",
        "margin_gib": 6.5, "choices": {}, "disk": {"needed_gib": 1.0, "free_gib": 50.0},
        "phases": {"cache": phase, "fit": phase, "validate": phase},
        "steps": {"samples": 11, "per_epoch": 11, "planned": STEPS, "checkpoints": 3, "epochs": 5.5},
    }  # fmt: skip


FINDING = {"status": "ok", "seconds": 1.0, "exit": 0, "reason": ""}
PYTHON = {
    "version": "3.11.9", "minor": "3.11", "implementation": "CPython", "bits": 64, "environment": True
}  # fmt: skip
BOUNDS = {
    "torch": ">=2.9,<3", "diffusers": ">=0.42,<0.43", "transformers": ">=5.17,<6", "peft": ">=0.21,<0.22",
    "accelerate": ">=1.13,<2", "bitsandbytes": ">=0.48.2,<0.51", "safetensors": ">=0.5",
}  # fmt: skip
BUILDS = {"cpu": "2.13.0+cpu", "xpu": "2.13.0+xpu", "cuda": "2.13.0+cu128"}
SEEN = {
    "xpu": {
        "name": "Intel(R) Arc(TM) 140V GPU (16GB)", "total_gib": 16.48, "driver": "1.6.34666",
        "integrated": True, "device_id": "64a0",
    },
    "cuda": {
        "name": "NVIDIA H200", "total_gib": 139.8, "driver": None, "integrated": False, "device_id": None
    },
}  # fmt: skip
ADAPTERS = {
    "xpu": {
        "name": "Intel(R) Arc(TM) 140V GPU (16GB)", "vendor": "intel", "kind": "integrated",
        "xpu_family": True, "pci": "8086:64a0", "driver": "display driver",
        "driver_version": "32.0.101.6987", "memory_gib": None, "problem": 0,
    },
    "cuda": {
        "name": "NVIDIA H200", "vendor": "nvidia", "kind": "card", "xpu_family": False, "pci": "10de:2335",
        "driver": "nvidia", "driver_version": "570.86.15", "memory_gib": 140.4, "problem": None,
    },
}  # fmt: skip


def torch_data(device: str) -> dict[str, Any]:
    seen = {
        kind: {"available": kind == device, "devices": [SEEN[kind]] if kind == device else []}
        for kind in SEEN
    }
    built = {"xpu": "20260000" if device == "xpu" else None, "cuda": "12.8" if device == "cuda" else None}
    return {**FINDING, "version": BUILDS[device], "built": {**built, "hip": None}, **seen}


def host_data(device: str) -> dict[str, Any]:
    """A 32 GB AI PC for xpu, a Linux server for the others."""
    windows = device == "xpu"
    return {
        "system": {
            "name": "Windows" if windows else "Linux", "release": "11" if windows else "6.8.0",
            "build": 26100 if windows else None, "machine": "AMD64" if windows else "x86_64",
        },
        "python": PYTHON, "ram_gib": 31.6, "ram_limit_gib": None,
        "adapters": [ADAPTERS[device]] if device in ADAPTERS else [],
        "memory": {"share_percent": 57 if windows else None, "kernel_limit_gib": None},
        "torch": torch_data(device),
        "base": {
            "reference": "models/base", "local": True, "source": "the folder's weights",
            "components": {"transformer": {"parameters": 256, "disk_gib": 0.000001}},
        },
        "disk": [
            {"place": "workspace", "free_gib": 50.0, "volume": "a"},
            {"place": "model cache", "free_gib": 50.0, "volume": "a"},
        ],
        "long_paths": True if windows else None,
        "probes": {"powershell" if windows else "lspci": FINDING},
    }  # fmt: skip


def environment_data(device: str) -> dict[str, Any]:
    installed = {**PACKAGES, "torch": BUILDS[device]}
    tritons = {
        "xpu": [{"name": "triton-xpu", "version": "3.7.1"}],
        "cuda": [{"name": "triton", "version": "3.7.0"}],
    }
    return {
        "device": device, "python": PYTHON,
        "packages": [{"name": name, "bounds": b, "version": installed[name]} for name, b in BOUNDS.items()],
        "torch": torch_data(device), "tritons": tritons.get(device, []),
        "quantizer": {
            **FINDING, "device": device, "dequantize_error": 0.0916,
            "quantize_error": None if device == "cpu" else 0.0916,
        },
        "imports": {**FINDING, "modules": dict.fromkeys(BOUNDS, "")},
        "names": {
            **FINDING, "packages": [{"name": n, "ours": True, "where": ""} for n in ("gates", "runtime")],
            "distributions": [], "scripts": [],
        },
        "ipex": None,
    }  # fmt: skip


ADAPTED_FROM = {
    "hardware.device": "auto", "optimizer.class_path": "auto", "train.gradient_checkpointing": True,
    "train.mixed_precision": "auto",
}  # fmt: skip


def adaptation_data(device: str) -> dict[str, Any]:
    """All probes ok; on the CPU one step in fp32, elsewhere two in bf16."""
    probes = ("bf16-kernel", "adam8bit-step", "nf4-layer", "masked-sdpa", "attention-backends", "compile")
    bases = ("embedded base",) if device == "cpu" else ("embedded base", "block of true width")
    devices = torch_data(device).get(device, {}).get("devices", [])
    return {
        "device": {"type": device, "name": "a device", "driver": devices[0]["driver"] if devices else None},
        "probes": [
            {
                "name": name, "status": "ok", "seconds": 0.1, "reason": "", "error": 0.003, "tolerance": 0.03,
                "facts": {}, "fallback": None,
            }
            for name in probes
        ],
        "choices": {
            "train.mixed_precision": {
                "value": "no" if device == "cpu" else "bf16", "reason": "it works", "probe": "bf16-kernel",
            },
            "optimizer.class_path": {
                "value": "torch.optim.AdamW", "reason": "small", "probe": "adam8bit-step"
            },
        },
        "step_parity": [parity_step(what, device) for what in bases],
        "versions": {**PACKAGES, "torch": BUILDS[device]},
    }  # fmt: skip


def parity_step(what: str, device: str) -> dict[str, Any]:
    compute, error = ("float32", 0.0) if device == "cpu" else ("bfloat16", 0.01)
    names = ("base", "adapter", "activations", "gradients", "optimizer_state")
    return {
        "what": what, "status": "ok", "reason": "", "seconds": 1.0, "samples": 2, "masked": True,
        "checkpointing": True, "optimizer": "torch.optim.AdamW", "compute": compute,
        "loss_device": 2.0 * (1 + error), "loss_reference": 2.0, "loss_error": error, "gradient_norm": 1.5,
        "gradient_error": error, "update_norm": 0.3, "update_error": error,
        "devices": {name: [device] for name in names},
        "dtypes": {
            "base": [compute], "adapter": ["float32"], "optimizer_state": ["float32"], "attention": [[compute]]
        },
        "memory": {
            "base_gib": 0.01, "alloc_gib": 0.0 if device == "cpu" else 0.02,
            "peak_gib": 0.0 if device == "cpu" else 0.03,
        },
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
        "encoders": {name: {"fingerprint": "0" * 64, "dtype": "fp32"} for name in ("text_encoder", "vae")},
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


def cache_entry(
    cache: Path,
    sample: dict[str, Any],
    settings: dict[str, Any],
    *,
    document: dict[str, Any] | None = None,
    tensors: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Write one entry, with what is given beside the usual; returns what the manifest lists of it."""
    beside = tensors or {}
    document = {
        "schema": "cache-key/2", "settings": settings, "prompt": sample["prompt"], "negative_prompt": None,
        "target": sample["target"]["sha256"], "mask": None, "empty_prompt": False, "alternatives": [],
        "controls": [control["sha256"] for control in sample["controls"]],
        "sizes": {"target": [32, 48], "controls": [[32, 48] for _ in sample["controls"]]},
        "boxes": {"target": [0, 0, 48, 32], "controls": [[0, 0, 48, 32] for _ in sample["controls"]]},
        **(document or {}),
    }  # fmt: skip
    key = document_digest(document)
    folder = cache / key[:16]
    folder.mkdir(parents=True)
    tensors = {
        "target": drawn(document["target"], 4, 4, 6),
        "control_0": drawn(document["controls"][0], 4, 4, 6),
        "prompt_embeds": drawn(document["prompt"] + document["controls"][0], 5, 8),
        **beside,
    }
    save_file(tensors, folder / "tensors.safetensors")
    listed = {"key": key, "files": recorded(folder)}
    shapes = {name: {"shape": list(tensor.shape), "dtype": "float32"} for name, tensor in tensors.items()}
    told = {"schema": "cache-entry/1", "document": document, "tensors": shapes, "notes": []}
    write_json(folder / "entry.json", {**told, **listed})
    return {**listed, "id": sample["id"], "split": sample["split"], "folder": key[:16]}


def drawn(seed: str, *shape: int) -> Any:
    """Noise that is a function of `seed`."""
    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4], "little")
    return np.random.default_rng(number).standard_normal(shape).astype(np.float32)


def write_run(
    folder: Path, kind: str, steps: int, interval: int, overrides: dict[str, Any], facts: dict[str, Any]
) -> None:
    """A completed run with metrics, probes, checkpoints and one -last-."""
    folder.mkdir(parents=True)
    record = run_record(folder.name, kind, steps, interval, overrides, facts)
    write_json(folder / "run.json", record)
    write_lines(folder / "metrics.jsonl", [metric(step, facts["device"]) for step in range(1, steps + 1)])
    saves = []
    for step in record["planned_checkpoints"]:
        saves.append(save_plain(folder, step))
        saves += save_last(folder, step)
    write_lines(folder / "saves.jsonl", saves)
    write_lines(folder / "probe.jsonl", [probe(step, steps) for step in (0, *record["planned_checkpoints"])])


def run_record(
    name: str, kind: str, steps: int, interval: int, overrides: dict[str, Any], facts: dict[str, Any]
) -> dict[str, Any]:
    resolved = with_defaults(facts["config"])
    for dotted, value in overrides.items():
        section, _, key = dotted.partition(".")
        resolved[section][key] = value
    resolved["hardware"]["device"] = facts["device"]
    resolved["model"]["quantize"] = "none"
    return {
        "schema": "run/1", "run_id": f"run-{name}", "kind": kind, "state": "completed", "launched_at": NOW,
        "heartbeat_at": NOW, "ended_at": NOW, "host_id": HOST, "tool": TOOL, "pid": 1, "choices": {},
        "config": facts["config"], "config_digest": document_digest(facts["config"]), "overrides": overrides,
        "resolved": resolved, "dataset_digest": facts["dataset_digest"],
        "cache_digest": facts["cache_digest"],
        "model": {
            "family": "qwen-image-edit", "name": "models/base", "fingerprints": {"transformer": facts["base"]}
        },
        "device": {"type": facts["device"], "name": "a device", "total_gib": 16.0}, "packages": PACKAGES,
        "trainable": {
            "name": "lora", "parameters": PARAMETERS, "tensors": 2 * len(MODULES), "scale": 1.0,
            "base_parameters": 10_000_000, "base_gib": 0.02,
        },
        "planned_steps": steps, "done_steps": steps, "best": None, "resumed_from": None,
        "planned_checkpoints": sorted({*range(interval, steps + 1, interval), steps}),
        "outcome": "trained", "reason": f"stopped at step {steps} as planned",
    }  # fmt: skip


def metric(step: int, device: str) -> dict[str, Any]:
    return {
        "step": step, "epoch": step // 11, "loss": 0.5 + 0.1 * (step % 3), "loss_ema": 0.55, "lr": 1e-4,
        "grad_norm": 0.3, "clipped": False, "step_s": 0.1, "tokens": 100, "samples": ["s03"], "sigmas": [0.5],
        "dropped": [], "bucket": "32x48", "device": device, "alloc_gib": 0.0 if device == "cpu" else 1.1,
        "reserved_gib": 1.2, "peak_gib": 1.4, "rss_gib": 0.6 + 0.0001 * (step % 7), "at": NOW,
    }  # fmt: skip


def probe(step: int, steps: int) -> dict[str, Any]:
    items = []
    for number in range(8):
        for draw in range(4):
            start = 0.4 + 0.05 * number + 0.1 * draw
            loss = start * (1 - (0.2 + 0.01 * number) * step / steps)
            sample = f"s{number + (0 if number < HOLDOUT else 3):02d}"
            split = "holdout" if number < HOLDOUT else "train"
            items.append(
                {"sample": sample, "split": split, "sigma": (draw + 0.5) / 4, "noise": number, "loss": loss}
            )
    means = {
        split: float(np.mean([item["loss"] for item in items if item["split"] == split]))
        for split in ("train", "holdout")
    }
    return {
        "step": step, "items": items, "at": NOW,
        "train_mean": means["train"], "holdout_mean": means["holdout"],
    }  # fmt: skip


def adapter(step: int) -> dict[str, Any]:
    """Tensors as training names them without the infix; lora_B moves with the step."""
    tensors = {}
    for module in MODULES:
        tensors[f"{module}.lora_A"] = drawn(module, 2, 16)
        tensors[f"{module}.lora_B"] = drawn(module + "B", 16, 2) * np.float32(step / 100)
    return tensors


def save_adapter(folder: Path, tensors: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    published = {f"transformer.{name}.weight": tensor for name, tensor in tensors.items()}
    save_file(published, folder / "pytorch_lora_weights.safetensors")


def save_plain(run: Path, step: int) -> dict[str, Any]:
    folder = run / f"checkpoint-{step // 11}-{step}"
    save_adapter(folder, adapter(step))
    return save_line("save", "checkpoint", step, folder)


def save_last(run: Path, step: int) -> list[dict[str, Any]]:
    """Roll -last- forward; returns the lines of saves.jsonl."""
    older = sorted(run.glob("checkpoint-last-*-last"))
    folder = run / f"checkpoint-last-{step // 11}-{step}-last"
    save_adapter(folder, adapter(step))
    save_file(
        {f"{name}.default.weight": t for name, t in adapter(step).items()}, folder / "model.safetensors"
    )
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
        (folder / name).write_bytes(name.encode())
    write_json(folder / "trainer_state.json", {"schema": "trainer-state/1", "step": step})
    lines = [save_line("save", "last", step, folder)]
    for path in older:
        lines.append(save_line("prune", "last", int(path.name.split("-")[3]), path))
        for item in path.iterdir():
            item.unlink()
        path.rmdir()
    return lines


def save_line(event: str, kind: str, step: int, folder: Path) -> dict[str, Any]:
    return {
        "event": event, "kind": kind, "step": step, "epoch": step // 11, "path": folder.name,
        "files": recorded(folder), "reason": "scheduled", "at": NOW,
    }  # fmt: skip
