"""A run directory of qflux, written from the facts of its layout: config, event file, checkpoints."""

import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from gates.qflux.events import masked_crc

ADAPTER = "pytorch_lora_weights.safetensors"
RANK, MODULES = 4, [f"transformer_blocks.{b}.attn.{name}" for b in range(5) for name in ("to_q", "to_out.0")]


def record(data: bytes) -> bytes:
    head = struct.pack("<Q", len(data))
    return head + struct.pack("<I", masked_crc(head)) + data + struct.pack("<I", masked_crc(data))


def varint(value: int) -> bytes:
    value &= 2**64 - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def field(number: int, data: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(tag: str, step: int, value: float) -> bytes:
    summary = field(1, field(1, tag.encode()) + b"\x15" + struct.pack("<f", value))
    return b"\x09" + struct.pack("<d", 1.0) + (b"\x10" + varint(step) if step else b"") + field(5, summary)


class Run:
    def __init__(self, root: Path) -> None:
        self.root = root

    def events(self, losses: Sequence[float], first: int = 0) -> None:
        """As update_progressbar logs a step: its loss, qflux's smooth loss, and the rest."""
        smooth, rows = 0.0, [record(b"\x09" + struct.pack("<d", 1.0) + field(3, b"brain.Event:2"))]
        for step, loss in enumerate(losses, first):
            smooth = 0.9 * smooth + 0.1 * loss
            values = {"loss": loss, "smooth_loss": smooth, "lr": 1e-4, "epoch": step // 30, "fps": 0.1}
            rows += [record(event(tag, step, value)) for tag, value in values.items()]
        (self.root / "events.out.tfevents.1700000000.host").write_bytes(b"".join(rows))

    def checkpoint(self, step: int, *, last: bool = False, epoch: int = 0) -> Path:
        name = f"checkpoint-last-{epoch}-{step}-last" if last else f"checkpoint-{epoch}-{step}"
        folder = self.root / name
        folder.mkdir()
        save_file(
            {f"transformer.{name}.weight": tensor for name, tensor in adapter(step).items()}, folder / ADAPTER
        )
        if last:
            state = {f"{name}.default.weight": tensor for name, tensor in adapter(step).items()}
            save_file(state, folder / "model.safetensors")
            for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl"):
                (folder / name).write_bytes(b"x")
        state_json = {"global_step": step, "epoch": epoch, "is_last": last}
        (folder / "state.json").write_text(json.dumps(state_json), encoding="utf-8")
        return folder

    def config(self, change: Callable[[dict[str, Any]], Any]) -> None:
        path = self.root / "train_config.yaml"
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
        change(document)
        path.write_text(yaml.dump(document, sort_keys=False), encoding="utf-8")

    def adapter(self, change: Callable[[str, Any], Any], folder: str = "*", file: str = ADAPTER) -> None:
        """`change` each tensor of the adapters that match; None leaves it out."""
        for path in sorted(self.root.glob(f"{folder}/{file}")):
            tensors = {name: change(name, tensor) for name, tensor in load_file(path).items()}
            save_file({name: t for name, t in tensors.items() if t is not None}, path)

    def add(self, folder: str, tensors: dict[str, Any], file: str = ADAPTER) -> None:
        for path in sorted(self.root.glob(f"{folder}/{file}")):
            save_file({**load_file(path), **tensors}, path)


def adapter(step: int) -> dict[str, Any]:
    draw = np.random.default_rng(0)
    tensors: dict[str, Any] = {}
    for module in MODULES:
        tensors[f"{module}.lora_A"] = draw.standard_normal((RANK, 16)).astype(np.float32)
        up = draw.standard_normal((16, RANK)) * step * 1e-4
        tensors[f"{module}.lora_B"] = up.astype(np.float32)
    return tensors


def losses(steps: int, drop: float = 0.7, seed: int = 3) -> list[float]:
    """Noise of a factor, and a fall of `drop` that settles."""
    draw = random.Random(seed)
    return [
        math.exp(draw.gauss(-1.5, 0.7)) * (1 - drop * (1 - math.exp(-step / (0.15 * steps))))
        for step in range(steps)
    ]


@pytest.fixture
def qflux(tmp_path: Path) -> Callable[..., Run]:
    """qflux(steps=300) -> a healthy run of that many."""

    def make(steps: int = 300, interval: int | None = None) -> Run:
        run = Run(tmp_path / "edit" / "v3")
        run.root.mkdir(parents=True)
        interval = interval or (100 if steps >= 100 else steps)
        config = {
            "trainer": "QwenImageEdit", "mode": "fit",
            "model": {"lora": {"r": RANK, "lora_alpha": RANK, "target_modules": ["to_q", "to_out.0"]}},
            "logging": {"output_dir": "out/edit/v3", "report_to": "tensorboard"},
            "train": {"max_train_steps": steps, "num_epochs": 3, "checkpointing_steps": interval},
        }  # fmt: skip
        (run.root / "train_config.yaml").write_text(yaml.dump(config, sort_keys=False), encoding="utf-8")
        run.events(losses(steps))
        for step in range(interval, steps + 1, interval):
            run.checkpoint(step)
        run.checkpoint(steps, last=True)
        return run

    return make
