"""The optimizer by class path, the schedule of its learning rate, and clipping.

Any class of a torch optimizer is accepted. Before the run one is made for small stand-in weights on the same device,
takes a step, and has its state saved and read back: what can't work there is told at launch, not in the first step.
"""

import difflib
import importlib
import inspect
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from runtime.config.learning import LrScheduler
from runtime.config.learning import Optimizer as OptimizerConfig
from runtime.errors import ConfigError

DEFAULT = "torch.optim.AdamW"  # 8-bit Adam aborts the whole process on some XPU drivers
DEFAULT_WARMUP = 50
POLYNOMIAL_END = 1e-7  # diffusers' get_scheduler has no argument for it
PACKAGES = {
    "bitsandbytes": "bitsandbytes",
    "transformers": "transformers",
    "prodigyopt": "prodigyopt",
    "lion_pytorch": "lion-pytorch",
}
# bitsandbytes keeps fp32 state for less than 4096 elements, and pages none of less than 100000.
STAND_IN = {1: (4096,), 2: (320, 320)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """An optimizer whose training and bit-exact resume a test holds, on the CPU unless `paged`."""

    path: str
    advice: str
    arguments: Mapping[str, Any]
    """Beside lr, in the test; what the advice asks for among them."""

    @property
    def paged(self) -> bool:
        return _is_paged(self.path)


def _proven(path: str, advice: str, **arguments: Any) -> Proven:
    return Proven(path=path, advice=advice, arguments=arguments)


PROVEN = (
    _proven(DEFAULT, "the default (auto)", weight_decay=0.01),
    _proven("torch.optim.Adam", "weight_decay is added to the gradient, not decoupled", betas=(0.9, 0.99)),
    _proven("torch.optim.SGD", "takes a rate 100 times higher; momentum: 0.9", momentum=0.9),
    _proven("torch.optim.Adafactor", "least memory", eps=(None, 1e-3)),
    _proven(
        "transformers.optimization.Adafactor",
        "least memory; scale_parameter: false, or lora_B, which starts at zero, hardly moves",
        scale_parameter=False,
        beta1=None,
    ),
    _proven("bitsandbytes.optim.Adam8bit", "CPU, CUDA; XPU where step 05 found it to work"),
    _proven("bitsandbytes.optim.AdamW8bit", "as Adam8bit", weight_decay=0.01),
    _proven("bitsandbytes.optim.Lion8bit", "as Adam8bit; a third of AdamW's rate"),
    _proven(
        "bitsandbytes.optim.PagedAdam8bit", "accelerator only; state lives in host memory until a resume"
    ),
    _proven("bitsandbytes.optim.PagedAdamW8bit", "as PagedAdam8bit"),
    _proven("bitsandbytes.optim.PagedAdam32bit", "as PagedAdam8bit"),
    _proven("bitsandbytes.optim.PagedAdamW32bit", "as PagedAdam8bit"),
    _proven("prodigyopt.Prodigy", "finds its rate: lr: 1.0 and scheduler_type: constant; most memory"),
    _proven("lion_pytorch.Lion", "a third of AdamW's rate"),
)


def make_optimizer(config: OptimizerConfig, parameters: list[nn.Parameter]) -> Optimizer:
    """`config.class_path(parameters, **config.init_args)`. Raises ConfigError where that can't train."""
    path = DEFAULT if config.class_path == "auto" else config.class_path
    device = parameters[0].device
    if _is_paged(path) and device.type == "cpu":
        raise ConfigError(
            f"optimizer.class_path: {path} needs an accelerator, saw the CPU, where it would page nothing",
            remedy=f"set optimizer.class_path: {path.replace('.Paged', '.')}",
        )
    optimizer_class = _import(path)
    arguments = _arguments(path, optimizer_class, config.init_args.model_dump())
    _rehearse(path, optimizer_class, arguments, parameters)
    return _made(path, optimizer_class, arguments, parameters)


def _is_paged(path: str) -> bool:
    return path.startswith("bitsandbytes.") and path.rpartition(".")[2].startswith("Paged")


def _import(path: str) -> Any:
    module_name, _, name = path.rpartition(".")
    module: Any = None
    try:
        module = importlib.import_module(module_name)
        found = getattr(module, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise _not_found(path, module, error) from error
    if not (isinstance(found, type) and issubclass(found, Optimizer)):
        raise ConfigError(
            f"optimizer.class_path: {path} is no torch optimizer, expected {_optimizers(path, module)}",
            remedy=f"optimizer.class_path: {DEFAULT}",
        )
    return found


def _not_found(path: str, module: Any, error: Exception) -> ConfigError:
    root = path.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and error.name == root and root in PACKAGES:
        return ConfigError(
            f"optimizer.class_path: {path} is of the package {root}, which is not installed",
            remedy=f"pip install {PACKAGES[root]}",
        )
    return ConfigError(
        f"optimizer.class_path: {path} can't be imported: {error}; expected {_optimizers(path, module)}",
        remedy=f"install its package, or set optimizer.class_path: {DEFAULT}",
    )


def _optimizers(path: str, module: Any) -> str:
    """The nearest optimizers of `module`, else the proven ones."""
    own = vars(module) if module else {}
    found = {
        name.lower(): f"{module.__name__}.{name}"
        for name, value in own.items()
        if isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
    }
    close = difflib.get_close_matches(path.rpartition(".")[2].lower(), found, n=3)
    if close:
        return " or ".join(found[name] for name in close)
    return "one such as " + ", ".join(proven.path for proven in PROVEN)


def _arguments(path: str, optimizer_class: Any, given: dict[str, Any]) -> dict[str, Any]:
    """`given`, if the class knows them all; its rate left to the config and the schedule."""
    parameters = inspect.signature(optimizer_class).parameters
    known = [name for name in parameters if name not in ("self", "params", "args", "kwargs")]
    unknown = [name for name in given if name not in known]
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    if unknown and ("params" in unknown or not takes_any):
        raise ConfigError(
            f"optimizer.init_args: {path} has no {', '.join(unknown)}; it takes {', '.join(known)}",
            remedy="correct optimizer.init_args",
        )
    if "relative_step" not in known:
        return given
    if given.get("relative_step"):
        raise ConfigError(
            "optimizer.init_args: relative_step: true replaces lr and lr_scheduler, expected false",
            remedy="take relative_step out of optimizer.init_args",
        )
    return {**given, "relative_step": False}  # true is transformers' default


def _made(
    path: str, optimizer_class: Any, arguments: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> Optimizer:
    try:
        made: Optimizer = optimizer_class(list(parameters), **arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.init_args: {path} refuses them: {error}", remedy="correct optimizer.init_args"
        ) from error
    return made


def _rehearse(
    path: str, optimizer_class: Any, arguments: Mapping[str, Any], parameters: Sequence[nn.Parameter]
) -> None:
    """One step, save and restore on stand-ins of the same device, dtype and dimensions as the weights."""
    kinds = {(p.device, p.dtype, p.ndim) for p in parameters}
    stand_ins = [
        nn.Parameter(torch.ones(STAND_IN[ndim], device=where, dtype=dtype))
        for where, dtype, ndim in sorted(kinds, key=str)
    ]
    made = _made(path, optimizer_class, arguments, stand_ins)
    for parameter in stand_ins:
        parameter.grad = torch.ones_like(parameter)
    try:
        made.step()
        written = io.BytesIO()
        torch.save(made.state_dict(), written)
        written.seek(0)
        made.load_state_dict(torch.load(written, map_location="cpu", weights_only=True))
        made.step()
        sound = all(bool(parameter.isfinite().all()) for parameter in stand_ins)
    except Exception as error:  # whatever another package's kernels raise
        lines = str(error).strip().splitlines() or [""]
        raise _unusable(path, stand_ins[0].device, f"{type(error).__name__}: {lines[0]}") from error
    if not sound:
        raise _unusable(path, stand_ins[0].device, "its update is not finite")


def _unusable(path: str, where: torch.device, seen: str) -> ConfigError:
    return ConfigError(
        f"optimizer.class_path: {path} can't train and resume on {where.type}: {seen}",
        remedy=f"correct optimizer.init_args, or set optimizer.class_path: {DEFAULT}",
    )


def warmup_steps(config: LrScheduler, steps: int) -> int:
    """Of a run of `steps`; a share of it counts at least one."""
    given = DEFAULT_WARMUP if config.warmup_steps is None else config.warmup_steps
    return max(1, round(given * steps)) if isinstance(given, float) else int(given)


def make_schedule(config: LrScheduler, optimizer: Optimizer, steps: int) -> LambdaLR:
    """The rate of each step from `config` and the number of steps alone, so a resume continues it."""
    from diffusers.optimization import get_scheduler

    warmup = warmup_steps(config, steps)
    rate = optimizer.defaults["lr"]
    if config.scheduler_type == "polynomial" and not rate > POLYNOMIAL_END:
        raise ConfigError(
            f"optimizer.init_args.lr: saw {rate:g}, polynomial falls to {POLYNOMIAL_END:g} and needs more",
            remedy="set a higher optimizer.init_args.lr or another lr_scheduler.scheduler_type",
        )
    schedule: LambdaLR = get_scheduler(
        config.scheduler_type,
        optimizer,
        num_warmup_steps=warmup,
        # A run that ends within its warm-up never falls; polynomial would divide by zero after the last step.
        num_training_steps=max(steps, warmup + 1),
        num_cycles=config.num_cycles or 1,
        power=config.power or 1.0,
    )
    return schedule


def set_rate(optimizer: Optimizer, schedule: LambdaLR) -> None:
    """The rate of the next step by the schedule as it is planned now, after both were restored.

    The same bits where the run's length is the same; where it has become longer, the rate that the longer run
    would have had there.
    """
    for group, base, factor in zip(
        optimizer.param_groups, schedule.base_lrs, schedule.lr_lambdas, strict=True
    ):
        group["lr"] = base * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in optimizer.param_groups]


def clip(
    parameters: Sequence[nn.Parameter], norm_limit: float, value_limit: float | None
) -> tuple[float, bool]:
    """Clip gradients in place: by value where `value_limit` is given, else by norm, 0 is off.

    Returns the norm over all gradients before, and whether anything was clipped.
    """
    limit = norm_limit if norm_limit and value_limit is None else math.inf
    norm = float(nn.utils.clip_grad_norm_(parameters, limit))
    if value_limit is None:
        return norm, norm > limit
    largest = torch.stack([p.grad.abs().max() for p in parameters if p.grad is not None]).max()
    nn.utils.clip_grad_value_(parameters, value_limit)
    return norm, float(largest) > value_limit
