"""A cache and runs as training leaves them, of small tensors that are a function of their names."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from gates.evidence import document_digest
from gates.schema import with_defaults
from gates.selftest.editing import recorded, write_json, write_lines
from gates.selftest.machines import PACKAGES

NOW = "2026-11-30T12:00:00.000Z"
TOOL = {"name": "aipc-finetune", "version": "0.1.0"}
HOST = "0" * 64
SAMPLES, HOLDOUT = 14, 3
MODULES = [f"blocks.{block}.attn.{name}" for block in range(5) for name in ("to_q", "to_v")]
PARAMETERS = len(MODULES) * 2 * 2 * 16


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
        **{f"control_{n}": drawn(digest, 4, 4, 6) for n, digest in enumerate(document["controls"])},
        "prompt_embeds": drawn("".join((document["prompt"], *document["controls"])), 5, 8),
        **beside,
    }
    save_file(tensors, folder / "tensors.safetensors")
    listed = {"key": key, "files": recorded(folder)}
    shapes = {name: {"shape": list(tensor.shape), "dtype": "float32"} for name, tensor in tensors.items()}
    told = {"schema": "cache-entry/1", "document": document, "tensors": shapes, "notes": []}
    write_json(folder / "entry.json", {**told, **listed})
    return {**listed, "id": sample["id"], "split": sample["split"], "folder": key[:16]}


def trained_digest(manifest: dict[str, Any]) -> str:
    return document_digest([entry for entry in manifest["entries"] if entry["split"] == "train"])


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
    write_lines(folder / "metrics.jsonl", [metric(step, facts) for step in range(1, steps + 1)])
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


def metric(step: int, facts: dict[str, Any]) -> dict[str, Any]:
    device, count = facts["device"], facts["config"]["train"].get("gradient_accumulation_steps", 1)
    return {
        "step": step, "epoch": step // 11, "loss": 0.5 + 0.1 * (step % 3), "loss_ema": 0.55, "lr": 1e-4,
        "grad_norm": 0.3, "clipped": False, "step_s": 0.1, "tokens": 100, "samples": ["s03"] * count,
        "sigmas": [0.5] * count,
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
