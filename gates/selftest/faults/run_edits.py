"""Edits of runs and their checkpoints, for the faults of gate 07."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from gates.selftest.faults.row import Spoil

ADAPTER = "pytorch_lora_weights.safetensors"
LAST = "checkpoint-last-5-60-last"
SMOKE_TOO = {"full/smoke-passed-as-configured"}
INPUTS = {"smoke/run-matches-inputs", "full/run-matches-inputs"}


def truncate(path: Callable[[Any], Path]) -> Spoil:
    def spoil(made: Any) -> None:
        place = path(made)
        place.write_bytes(place.read_bytes()[:-7])

    return spoil


def record(kind: str, /, **values: Any) -> Spoil:
    return lambda made: made.edit(made.run(kind) / "run.json", lambda document: document.update(values))


def metrics(kind: str, change: Callable[[list[Any]], Any]) -> Spoil:
    return lambda made: made.edit_lines(made.run(kind) / "metrics.jsonl", change)


def probes(change: Callable[[list[Any]], Any]) -> Spoil:
    return lambda made: made.edit_lines(made.run("full") / "probe.jsonl", change)


def no_fall(lines: list[Any]) -> None:
    """One item fell a lot and the rest rose: the mean fell, the test of pairs sees nothing."""
    for first, last in zip(lines[0]["items"], lines[-1]["items"], strict=True):
        last["loss"] = first["loss"] * 1.001
    lines[-1]["items"][-1]["loss"] = 0.0


def small_fall(lines: list[Any]) -> None:
    for first, last in zip(lines[0]["items"], lines[-1]["items"], strict=True):
        last["loss"] = first["loss"] * 0.985


def grow(name: str, mib: float) -> Spoil:
    def change(lines: list[Any]) -> None:
        for line in lines:
            line[name] += mib / 1024 * line["step"]

    return metrics("full", change)


def merge(made: Any) -> None:
    """Base weights in a checkpoint, recorded as if it had been saved so."""
    path = made.run("full") / "checkpoint-3-40"
    tensors = load_file(path / ADAPTER)
    tensors["transformer.blocks.0.attn.to_q.weight"] = np.ones((64, 64), np.float32)
    save_file(tensors, path / ADAPTER)
    made.resave("full", path)


def merge_state(made: Any) -> None:
    path = made.run("full") / LAST
    tensors = load_file(path / "model.safetensors")
    tensors["blocks.0.attn.to_q.base_layer.weight"] = np.ones((64, 64), np.float32)
    save_file(tensors, path / "model.safetensors")
    made.resave("full", path)


def adapter(change: Callable[[str, Any], Any], steps: tuple[int, ...] = (60,)) -> Spoil:
    """Change the tensors of checkpoints, recorded as if they had been saved so."""

    def spoil(made: Any) -> None:
        for path in made.run("full").glob("checkpoint-[0-9]*"):
            if int(path.name.split("-")[2]) in steps:
                tensors = {name: change(name, t) for name, t in load_file(path / ADAPTER).items()}
                save_file(tensors, path / ADAPTER)
                made.resave("full", path)

    return spoil


def zero_up(name: str, tensor: Any) -> Any:
    return tensor * 0 if "lora_B" in name and "blocks.0" not in name else tensor


def one_nan(name: str, tensor: Any) -> Any:
    if "blocks.0.attn.to_q.lora_A" in name:
        tensor = tensor.copy()
        tensor[0, 0] = np.nan
    return tensor


def double_last(made: Any, kind: str, epoch: int = 9) -> None:
    """A copy of -last- under another epoch."""
    run = made.run(kind)
    path = next(run.glob("checkpoint-last-*-last"))
    shutil.copytree(path, run / f"checkpoint-last-{epoch}-{path.name.split('-')[3]}-last")


def state_of(step: int) -> Spoil:
    def spoil(made: Any) -> None:
        path = made.run("full") / LAST
        made.edit(path / "trainer_state.json", lambda document: document.update(step=step))
        made.resave("full", path)

    return spoil


def packages(kind: str, **values: str) -> Spoil:
    return lambda made: made.edit(made.run(kind) / "run.json", lambda d: d["packages"].update(values))


def drop_save(lines: list[Any]) -> list[Any]:
    return [line for line in lines if (line["kind"], line["step"]) != ("checkpoint", 40)]


def override(kind: str, key: str, value: Any) -> Spoil:
    return lambda made: made.edit(made.run(kind) / "run.json", lambda d: d["overrides"].update({key: value}))


def config(change: Callable[[dict[str, Any]], Any]) -> Spoil:
    return lambda made: made.edit_config(change)


def nan_line(made: Any) -> None:
    path = made.run("full") / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[30] = lines[30].replace('"loss": 0.6', '"loss": NaN').replace('"loss": 0.5', '"loss": NaN')
    assert "NaN" in lines[30]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")


def nan_memory(made: Any) -> None:
    """Of one step in the second half: medians alone would not show it."""
    path = made.run("full") / "metrics.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    lines[50] = json.dumps({**json.loads(lines[50]), "rss_gib": float("nan")})
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="\n")
