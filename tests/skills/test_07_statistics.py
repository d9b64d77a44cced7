"""Gate 07 on planted numbers: memory that breathes, leaks or jumps, probes of few samples, weights that stayed."""

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from gates import registry

ADAPTER = "pytorch_lora_weights.safetensors"
STEPS = 600


def _memory(values: Callable[[int], float], buckets: int = 1) -> Any:
    """memory-stable, judged on a run of 600 steps whose resident memory is `values` in MiB."""
    from gates.judging import memory_growth

    training = registry.load_module(f"{registry.SERIES}07-training")
    lines = [
        {"step": step, "bucket": str(step % buckets), "rss_gib": values(step) / 1024}
        for step in range(1, STEPS + 1)
    ]
    rise = memory_growth(lines, "rss_gib", after=STEPS / 2)
    return rise is not None and rise <= training.RSS_GROWTH_MAX


def _noisy(values: Callable[[int], float], seed: int) -> Callable[[int], float]:
    draw = random.Random(seed)
    return lambda step: 8000 + values(step) + draw.gauss(0, 20)


MEMORY: dict[str, tuple[Callable[[int], float], int, bool]] = {
    "flat": (lambda step: 0.0, 1, True),
    "1 MiB a step": (lambda step: step, 1, False),
    "1 MiB a step of two buckets": (lambda step: step + 3000 * (step % 2), 2, False),
    "two buckets alternating": (lambda step: 3000 * (step % 2), 2, True),
    "32 MiB every 32 steps, kept": (lambda step: 32 * (step // 32), 1, False),
    "64 MiB every 32 steps, collected": (lambda step: 2 * (step % 32), 1, True),
    "2 GiB once, at a checkpoint": (lambda step: 2048 * (step >= 500), 1, True),
    "2 GiB once, at the last step but one": (lambda step: 2048 * (step >= STEPS - 1), 1, True),
    "2 GiB once, and 1 MiB a step": (lambda step: 2048 * (step >= 400) + step, 1, False),
    "a first half that fills up": (lambda step: 10 * min(step, 290), 1, True),
}


@pytest.mark.parametrize("name", MEMORY)
def test_memory(name: str) -> None:
    values, buckets, stable = MEMORY[name]
    assert [_memory(_noisy(values, seed), buckets) for seed in range(25)] == [stable] * 25
    assert _memory(values, buckets) == stable  # without noise too


def _adapter(made: Any, change: Callable[[str, Any], Any]) -> None:
    """Change the tensors of every adapter file of the full run, recorded as if they had been saved so."""
    for path in sorted(made.run("full").glob("checkpoint-*")):
        for file in (ADAPTER, "model.safetensors"):
            if (path / file).is_file():
                tensors = {name: change(name, tensor) for name, tensor in load_file(path / file).items()}
                save_file(tensors, path / file)
        made.resave("full", path)


WEIGHTS: dict[str, tuple[Callable[[str, Any], Any], bool]] = {
    "as trained": (lambda name, tensor: tensor, True),
    "lora_B of zeros": (lambda name, tensor: tensor * (".lora_B" not in name), False),
    "lora_B of rounding noise": (
        lambda name, tensor: tensor * np.float32(1e-8 if ".lora_B" in name else 1), False,
    ),
    "lora_B of one small update": (
        lambda name, tensor: tensor * np.float32(1e-3 if ".lora_B" in name else 1), True,
    ),
    "lora_B NaN": (lambda name, tensor: tensor * np.float32("nan" if ".lora_B" in name else 1), False),
}  # fmt: skip


@pytest.mark.parametrize("name", WEIGHTS)
def test_adapter_learned(name: str, made: Any, judge: Any) -> None:
    change, learned = WEIGHTS[name]
    _adapter(made, change)
    checks = {check.id: check.status for check in judge(made, "07").checks if check.phase == "full"}
    assert checks["adapter-learned"] == ("pass" if learned else "fail")
    assert checks["adapter-only"] == "pass"


def test_magnitudes_of_dora_are_of_the_adapter(made: Any, judge: Any) -> None:
    """Ten vectors more, counted as trained."""
    for path in sorted(made.run("full").glob("checkpoint-*")):
        for file in (ADAPTER, "model.safetensors"):
            if (path / file).is_file():
                tensors = load_file(path / file)
                ups = [name for name in tensors if ".lora_B" in name]
                vectors = {
                    name.split(".lora_B")[0] + ".lora_magnitude_vector": np.ones(16, np.float32)
                    for name in ups
                }
                save_file({**tensors, **vectors}, path / file)
        made.resave("full", path)
    made.edit(
        made.run("full") / "run.json",
        lambda d: d["trainable"].update(parameters=d["trainable"]["parameters"] + 160),
    )
    verdict = judge(made, "07")
    assert verdict.passes, [(check.id, check.message) for check in verdict.checks if check.status == "fail"]


def test_a_fall_of_one_sample_alone_is_none(made: Any, judge: Any, assert_turned: Any) -> None:
    """Its four draws fell by half; by items that passes, by samples it does not."""

    def change(lines: list[Any]) -> None:
        trained = sorted({item["sample"] for item in lines[0]["items"] if item["split"] == "train"})
        for first, last in zip(lines[0]["items"], lines[-1]["items"], strict=True):
            share = {trained[0]: 0.3, trained[1]: 0.8}.get(first["sample"], 1.0)
            last["loss"] = first["loss"] * share

    made.edit_lines(made.run("full") / "probe.jsonl", change)
    verdict = judge(made, "07")
    assert_turned(verdict, fail={"full/loss-fell"})
    check = next(check for check in verdict.checks if check.id == "loss-fell")
    assert check.observed["relative_drop"] > 0.1 and check.expected["t"] == "> 4.09"


def test_the_verdict_tells_a_rise_in_mib(made: Any, judge: Any) -> None:
    path = made.run("full") / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    text = "".join(json.dumps({**line, "rss_gib": 1 + line["step"] / 1024}) + "\n" for line in lines)
    path.write_text(text, encoding="utf-8", newline="\n")
    check = next(check for check in judge(made, "07").checks if check.id == "memory-stable")
    assert (check.status, check.observed, check.expected) == ("fail", 1.0, "at most 0.45")
