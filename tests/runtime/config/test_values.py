"""Values of the adapter, the optimizer and the schedule: what is accepted, and the line about what is not."""

from typing import Any

import pytest
from jsonschema import Draft202012Validator

from runtime.config import load, schema
from runtime.errors import ConfigError

BASE: dict[str, Any] = {"model": {"pretrained_model_name_or_path": "x"}, "train": {"max_train_steps": 5}}

GOOD = [
    {"model.lora.target_modules": "attention"},
    {"model.lora.target_modules": "attention+mlp"},
    {"model.lora.target_modules": "all-linear"},
    {"model.lora.target_modules": ["to_q", "transformer_blocks.1*.attn.*"]},
    {"model.lora.use_dora": True, "model.lora.use_rslora": True},
    {"optimizer.init_args": {"lr": 1e-3, "beta1": None, "eps": [None, 1e-3], "foreach": False}},
    {"lr_scheduler.scheduler_type": "constant"},
    {"lr_scheduler.scheduler_type": "constant", "lr_scheduler.warmup_steps": 0},
    {"lr_scheduler.warmup_steps": 10},
    {"lr_scheduler.warmup_steps": 0.1},
    {"lr_scheduler.scheduler_type": "cosine_with_restarts", "lr_scheduler.num_cycles": 3},
    {"lr_scheduler.scheduler_type": "polynomial", "lr_scheduler.power": 0.5},
    {"train.max_grad_norm": 0.0, "train.clip_grad_value": 0.5},
]
BAD = [
    ({"model.lora.target_modules": "to_q"}, "model.lora.target_modules: saw \"to_q\" (text), expected a list"),
    ({"model.lora.target_modules": []}, "or one of attention, attention+mlp, all-linear"),
    ({"model.lora.target_modules": ["to_q", 1]}, "expected a list of module names or patterns"),
    ({"model.lora.target_modules": ["to_q", ""]}, "expected a list of module names or patterns"),
    ({"model.lora.target_modules": ["*.to_q", "*.to_q"]}, "expected each module once"),
    ({"optimizer.init_args": {"eps": "1e-8"}}, "optimizer.init_args.eps: saw \"1e-8\" (text), expected a number"),
    ({"optimizer.init_args": {"betas": [0.9, True]}}, "or a list of numbers"),
    ({"optimizer.init_args": {"lr": None}}, "optimizer.init_args.lr: saw null"),
    ({"lr_scheduler.warmup_steps": 1.0}, "lr_scheduler.warmup_steps: saw 1.0, expected a whole number"),
    ({"lr_scheduler.warmup_steps": 0.0}, "lr_scheduler.warmup_steps: saw 0.0, expected a whole number"),
    ({"lr_scheduler.warmup_steps": -1}, "or a fraction of the run between 0 and 1"),
    ({"lr_scheduler.warmup_steps": True}, "lr_scheduler.warmup_steps: saw true"),
    ({"lr_scheduler.warmup_steps": "10%"}, "lr_scheduler.warmup_steps: saw \"10%\" (text)"),
    (
        {"lr_scheduler.scheduler_type": "constant", "lr_scheduler.warmup_steps": 5},
        "lr_scheduler: warmup_steps: 5 does nothing for constant, expected it left out",
    ),
    ({"lr_scheduler.num_cycles": 1}, "lr_scheduler: num_cycles: 1 does nothing for cosine"),
    (
        {"lr_scheduler.scheduler_type": "linear", "lr_scheduler.power": 1.0},
        "lr_scheduler: power: 1.0 does nothing for linear",
    ),
    ({"lr_scheduler.scheduler_type": "cosine_with_restarts", "lr_scheduler.num_cycles": 0}, "num_cycles: saw 0"),
    ({"train.clip_grad_value": 0.5}, "clip_grad_value 0.5 requires max_grad_norm: 0, saw 1"),
    ({"train.max_grad_norm": 0.0, "train.clip_grad_value": 0.0}, "train.clip_grad_value: saw 0.0"),
]  # fmt: skip


@pytest.mark.parametrize("changes", GOOD)
def test_accepted_also_as_resolved_and_by_the_published_schema(changes: dict[str, Any]) -> None:
    written = load.apply_overrides(BASE, changes)
    config = load.parse(written)
    resolved = config.model_dump(mode="json")
    assert load.parse(resolved) == config
    for document in (written, resolved):
        Draft202012Validator(schema.build_schema()).validate(document)


@pytest.mark.parametrize(("changes", "told"), BAD)
def test_refused_in_one_line(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load.parse(load.apply_overrides(BASE, changes))
    head, *lines = caught.value.message.splitlines()
    assert head == "config.yaml"
    assert len(lines) == 1
    assert told in lines[0]
