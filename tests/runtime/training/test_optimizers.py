"""Optimizers by class path, and the rate that each step is taken with."""

from math import cos, pi
from typing import Any

import pytest
import torch

from runtime.config.model import LrScheduler, Optimizer
from runtime.errors import ConfigError
from runtime.training import optimizers


def weights() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.ones(3))]


def make(class_path: str = "auto", **arguments: Any) -> torch.optim.Optimizer:
    init = {"lr": 1e-3, **arguments}
    return optimizers.make_optimizer(
        Optimizer.model_validate({"class_path": class_path, "init_args": init}), weights()
    )


def test_auto_is_adamw_in_fp32() -> None:
    """8-bit Adam aborts the process on some XPU drivers."""
    assert type(make()) is torch.optim.AdamW


@pytest.mark.parametrize(
    "path",
    [
        "torch.optim.AdamW",
        "torch.optim.SGD",
        "torch.optim.Adafactor",
        "bitsandbytes.optim.AdamW8bit",
        "transformers.Adafactor",
    ],
)
def test_any_torch_optimizer_takes_a_step(path: str) -> None:
    extra = {"relative_step": False, "scale_parameter": False} if path.startswith("transformers") else {}
    made = make(path, **extra)
    (parameter,) = made.param_groups[0]["params"]
    parameter.grad = torch.ones(3)
    made.step()
    assert float(parameter.detach().max()) < 1.0
    assert f"{type(made).__module__.partition('.')[0]}" == path.partition(".")[0]


def test_arguments_reach_the_optimizer() -> None:
    made = make("torch.optim.AdamW", betas=[0.5, 0.9], weight_decay=0.25, amsgrad=True)
    assert {name: made.defaults[name] for name in ("lr", "betas", "weight_decay", "amsgrad")} == {
        "lr": 1e-3,
        "betas": (0.5, 0.9),
        "weight_decay": 0.25,
        "amsgrad": True,
    }


@pytest.mark.parametrize(
    ("path", "arguments", "told"),
    [
        ("torch.optim.Adamw", {}, "optimizer.class_path: torch.optim.Adamw can't be imported"),
        ("nowhere.at.All", {}, "optimizer.class_path: nowhere.at.All can't be imported"),
        ("torch.nn.Linear", {}, "torch.nn.Linear is no torch optimizer"),
        ("torch.optim.lr_scheduler", {}, "torch.optim.lr_scheduler is no torch optimizer"),
        ("torch.optim.AdamW", {"momentum": 0.9}, "optimizer.init_args: torch.optim.AdamW refuses them"),
        ("torch.optim.AdamW", {"betas": [2.0, 0.9]}, "optimizer.init_args: torch.optim.AdamW refuses them"),
    ],
)
def test_what_can_not_be_made_is_told_by_its_key(path: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")) as caught:
        make(path, **arguments)
    assert caught.value.remedy


def rates(kind: str, warmup: int, steps: int) -> list[float]:
    """The learning rate that each step was taken with."""
    optimizer = make(lr=1.0)
    config = LrScheduler.model_validate({"scheduler_type": kind, "warmup_steps": warmup})
    schedule = optimizers.make_schedule(config, optimizer, steps)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return seen


@pytest.mark.parametrize(
    ("kind", "warmup", "steps", "expected"),
    [
        ("constant", 3, 4, [1, 1, 1, 1]),
        ("constant_with_warmup", 2, 4, [0, 0.5, 1, 1]),
        ("linear", 1, 5, [0, 1, 0.75, 0.5, 0.25]),
        ("cosine", 0, 4, [0.5 * (1 + cos(pi * step / 4)) for step in range(4)]),
        ("cosine", 2, 4, [0, 0.5, 1, 0.5]),
        ("cosine", 50, 5, [step / 50 for step in range(5)]),  # a smoke fit ends within the warm-up
    ],
)
def test_rate_of_each_step(kind: str, warmup: int, steps: int, expected: list[float]) -> None:
    assert rates(kind, warmup, steps) == pytest.approx(expected)
