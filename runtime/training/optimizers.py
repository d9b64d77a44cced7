"""The optimizer by class path and the schedule of its learning rate."""

import importlib
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from runtime.config.model import LrScheduler
from runtime.config.model import Optimizer as OptimizerConfig
from runtime.errors import ConfigError

DEFAULT = "torch.optim.AdamW"  # 8-bit Adam aborts the whole process on some XPU drivers


def make_optimizer(config: OptimizerConfig, parameters: list[torch.nn.Parameter]) -> Optimizer:
    """`config.class_path(parameters, **config.init_args)`. Raises ConfigError where that can't be."""
    path = DEFAULT if config.class_path == "auto" else config.class_path
    optimizer_class = _import(path)
    try:
        made: Optimizer = optimizer_class(parameters, **config.init_args.model_dump())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.init_args: {path} refuses them: {error}", remedy="correct optimizer.init_args"
        ) from error
    return made


def _import(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.class_path: {path} can't be imported: {error}",
            remedy=f"install its package, or set optimizer.class_path: {DEFAULT}",
        ) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(
            f"optimizer.class_path: {path} is no torch optimizer", remedy=f"optimizer.class_path: {DEFAULT}"
        )
    return found


def make_schedule(config: LrScheduler, optimizer: Optimizer, steps: int) -> LRScheduler:
    """The rate of each step from `config` and the number of steps alone, so a resume continues it."""
    from diffusers.optimization import get_scheduler

    schedule: LRScheduler = get_scheduler(
        config.scheduler_type, optimizer, num_warmup_steps=config.warmup_steps, num_training_steps=steps
    )
    return schedule
