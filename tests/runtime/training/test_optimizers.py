"""Optimizers by class path, the rate that each step is taken with, and clipping."""

import importlib
import io
import sys
from collections.abc import Iterator
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from runtime.config.learning import LrScheduler, Optimizer
from runtime.errors import ConfigError
from runtime.planning import estimate
from runtime.training import optimizers
from runtime.training.optimizers import PROVEN, Proven

RATE = 1e-3
TABLE = "skills/qwen-image-edit-aipc-finetune-04-config/references/optimizers.md"


def weights() -> list[nn.Parameter]:
    """lora_A and lora_B of a small linear, more than the 4096 elements below which 8-bit state is not 8 bits."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((16, 512), (512, 16), (512,))]


def make(
    class_path: str = "auto", parameters: list[nn.Parameter] | None = None, **arguments: Any
) -> torch.optim.Optimizer:
    init = {"lr": RATE, **arguments}
    config = Optimizer.model_validate({"class_path": class_path, "init_args": init})
    return optimizers.make_optimizer(config, parameters or weights())


def installed(proven: Proven) -> Proven:
    pytest.importorskip(proven.path.partition(".")[0])
    return proven


def on_cpu() -> list[Any]:
    return [pytest.param(proven, id=proven.path) for proven in PROVEN if not proven.paged]


def train(made: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for parameter in made.param_groups[0]["params"]:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        made.step()
        made.zero_grad(set_to_none=True)


def test_auto_is_adamw_in_fp32() -> None:
    """8-bit Adam aborts the process on some XPU drivers."""
    made = make()
    train(made, range(1))
    assert type(made) is torch.optim.AdamW
    assert {t.dtype for state in made.state.values() for t in state.values()} == {torch.float32}


@pytest.mark.parametrize("proven", on_cpu())
def test_a_restored_optimizer_continues_bit_for_bit(proven: Proven) -> None:
    """Six steps equal four, a save read without unpickling code, and two."""
    installed(proven)
    whole, first = weights(), weights()
    before = [p.detach().clone() for p in whole]
    train(make(proven.path, whole, **proven.arguments), range(6))
    stopped = make(proven.path, first, **proven.arguments)
    train(stopped, range(4))
    saved = io.BytesIO()
    torch.save(stopped.state_dict(), saved)
    saved.seek(0)
    later = [nn.Parameter(p.detach().clone()) for p in first]
    resumed = make(proven.path, later, **proven.arguments)
    resumed.load_state_dict(torch.load(saved, map_location="cpu", weights_only=True))
    train(resumed, range(4, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole, later, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(whole, before, strict=True))


@pytest.mark.parametrize("proven", on_cpu())
def test_planned_state_is_at_least_what_is_kept(proven: Proven) -> None:
    installed(proven)
    parameters = weights()[:2]
    made = make(proven.path, parameters, **proven.arguments)
    train(made, range(1))
    state = [t for s in made.state.values() for n, t in s.items() if torch.is_tensor(t) and "qmap" not in n]
    kept = sum(t.numel() * t.element_size() for t in state) / sum(p.numel() for p in parameters)
    planned = estimate.OPTIMIZER_BYTES.get(proven.path.rpartition(".")[2], estimate.ADAM_BYTES)
    assert kept == pytest.approx(planned, abs=0.05) or kept < planned == 1  # Adafactor keeps rows and columns


def test_the_table_for_users_is_the_one_that_is_proven() -> None:
    from runtime import demo

    text = (Path(demo.__file__).parents[2] / TABLE).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{t.path}` | {estimate.OPTIMIZER_BYTES.get(t.path.rpartition('.')[2], estimate.ADAM_BYTES)} | {t.advice} |"
        for t in PROVEN
    ]


def test_arguments_reach_the_optimizer() -> None:
    made = make("torch.optim.AdamW", betas=[0.5, 0.9], weight_decay=0.25, amsgrad=True, foreach=None)
    assert {name: made.defaults[name] for name in ("lr", "betas", "weight_decay", "amsgrad", "foreach")} == {
        "lr": 1e-3,
        "betas": (0.5, 0.9),
        "weight_decay": 0.25,
        "amsgrad": True,
        "foreach": None,
    }


def test_the_rate_stays_the_configs() -> None:
    """transformers' Adafactor would choose its own by default."""
    assert make("transformers.Adafactor").defaults["relative_step"] is False
    with pytest.raises(ConfigError, match="relative_step: true replaces lr and lr_scheduler"):
        make("transformers.Adafactor", relative_step=True)


@pytest.mark.parametrize(
    ("path", "arguments", "told"),
    [
        ("torch.optim.Adamw", {}, "torch.optim.Adamw can't be imported"),
        ("torch.optim.Adamw", {}, "expected torch.optim.AdamW or torch.optim.Adam"),
        ("nowhere.at.All", {}, "nowhere.at.All can't be imported"),
        ("nowhere.at.All", {}, "expected one such as torch.optim.AdamW, "),
        ("torch.nn.Linear", {}, "torch.nn.Linear is no torch optimizer"),
        ("torch.optim.lr_scheduler", {}, "torch.optim.lr_scheduler is no torch optimizer"),
        (
            "torch.optim.AdamW",
            {"momentum": 0.9},
            "torch.optim.AdamW has no momentum; it takes lr, betas, eps",
        ),
        ("torch.optim.AdamW", {"params": 1}, "torch.optim.AdamW has no params; it takes lr, "),
        ("torch.optim.AdamW", {"betas": [2.0, 0.9]}, "torch.optim.AdamW refuses them: Invalid beta"),
        ("torch.optim.LBFGS", {}, "torch.optim.LBFGS can't train and resume on cpu: TypeError: "),
        (
            "torch.optim.SparseAdam",
            {},
            "torch.optim.SparseAdam can't train and resume on cpu: RuntimeError: ",
        ),
        ("torch.optim.SGD", {"lr": 3e38}, "torch.optim.SGD can't train and resume on cpu: its update is not"),
        ("bitsandbytes.optim.PagedAdamW8bit", {}, "PagedAdamW8bit needs an accelerator, saw the CPU"),
    ],
)
def test_what_can_not_train_is_told_at_launch(path: str, arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make(path, **arguments)
    assert told in caught.value.message
    assert caught.value.message.startswith("optimizer.")
    assert caught.value.remedy


def test_the_remedy_for_a_paged_optimizer_is_its_plain_twin() -> None:
    with pytest.raises(ConfigError) as caught:
        make("bitsandbytes.optim.PagedAdam8bit")
    assert caught.value.remedy == "set optimizer.class_path: bitsandbytes.optim.Adam8bit"
    assert type(make("bitsandbytes.optim.Adam8bit")).__name__ == "Adam8bit"


def test_a_missing_package_comes_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(ConfigError, match="prodigyopt, which is not installed") as caught:
        make("prodigyopt.Prodigy")
    assert caught.value.remedy == "pip install prodigyopt"
    assert "\n" not in caught.value.message


class Pickled(torch.optim.SGD):
    """An optimizer whose state is code."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "odd": Pickled}


def test_an_optimizer_whose_state_needs_unpickling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pickled_optimizer", sys.modules[__name__])
    with pytest.raises(ConfigError, match=r"can't train and resume on cpu: .*UnpicklingError"):
        make("pickled_optimizer.Pickled")


def walk(config: LrScheduler, steps: int, stop: int | None = None, peak: float = 1.0) -> Iterator[float]:
    """The learning rate that each step is taken with; at `stop` all is saved and made anew."""

    def fresh() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=peak)
        return optimizer, optimizers.make_schedule(config, optimizer, steps)

    optimizer, schedule = fresh()
    for step in range(steps):
        if step == stop:
            saved = io.BytesIO()
            torch.save([optimizer.state_dict(), schedule.state_dict()], saved)
            saved.seek(0)
            states = torch.load(saved, weights_only=True)
            optimizer, schedule = fresh()
            optimizer.load_state_dict(states[0])
            schedule.load_state_dict(states[1])
        yield optimizer.param_groups[0]["lr"]
        optimizer.step()
        schedule.step()


def fallen(step: int, warmup: int, steps: int) -> float:
    return (step - warmup) / (steps - warmup)


def rises(warmup: int) -> list[float]:
    return [step / warmup for step in range(warmup)]


N, W = 12, 3
AFTER = range(W, N)
END = 1e-7
SHAPES: list[tuple[dict[str, Any], list[float]]] = [
    ({"scheduler_type": "constant"}, [1.0] * N),
    ({"scheduler_type": "constant", "warmup_steps": 0}, [1.0] * N),
    ({"scheduler_type": "constant_with_warmup", "warmup_steps": W}, rises(W) + [1.0] * (N - W)),
    ({"scheduler_type": "constant_with_warmup", "warmup_steps": 0.25}, rises(W) + [1.0] * (N - W)),
    ({"scheduler_type": "constant_with_warmup", "warmup_steps": 0.01}, [0.0] + [1.0] * (N - 1)),
    ({"scheduler_type": "constant_with_warmup"}, [step / 50 for step in range(N)]),
    ({"scheduler_type": "linear", "warmup_steps": W}, rises(W) + [1 - fallen(s, W, N) for s in AFTER]),
    (
        {"scheduler_type": "cosine", "warmup_steps": W},
        rises(W) + [0.5 + 0.5 * cos(pi * fallen(s, W, N)) for s in AFTER],
    ),
    (
        {"scheduler_type": "cosine_with_restarts", "warmup_steps": W},
        rises(W) + [0.5 + 0.5 * cos(pi * fallen(s, W, N)) for s in AFTER],
    ),
    (
        {"scheduler_type": "cosine_with_restarts", "warmup_steps": W, "num_cycles": 3},
        rises(W) + [0.5 + 0.5 * cos(pi * ((s - W) % 3) / 3) for s in AFTER],
    ),
    (
        {"scheduler_type": "polynomial", "warmup_steps": W},
        rises(W) + [END + (1 - END) * (1 - fallen(s, W, N)) for s in AFTER],
    ),
    (
        {"scheduler_type": "polynomial", "warmup_steps": W, "power": 2.0},
        rises(W) + [END + (1 - END) * (1 - fallen(s, W, N)) ** 2 for s in AFTER],
    ),
    ({"scheduler_type": "polynomial", "warmup_steps": N}, rises(N)),  # its last fall would be 0 / 0
    ({"scheduler_type": "cosine", "warmup_steps": 50}, [step / 50 for step in range(N)]),  # a smoke fit
]


@pytest.mark.parametrize(("written", "expected"), SHAPES, ids=[str(index) for index in range(len(SHAPES))])
def test_rate_of_each_step_of_a_run_and_of_every_resume(
    written: dict[str, Any], expected: list[float]
) -> None:
    config = LrScheduler.model_validate(written)
    whole = list(walk(config, N))
    assert whole == pytest.approx(expected, abs=1e-12)
    for stop in range(N):
        assert list(walk(config, N, stop)) == whole, f"resumed at {stop}"


def test_a_schedule_scales_the_configured_rate() -> None:
    config = LrScheduler(scheduler_type="linear", warmup_steps=0)
    assert list(walk(config, 4, peak=2e-4)) == pytest.approx([2e-4, 1.5e-4, 1e-4, 0.5e-4])


def test_polynomial_needs_a_rate_above_its_end() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.init_args\.lr: saw 1e-07"):
        list(walk(LrScheduler(scheduler_type="polynomial", warmup_steps=0), 4, peak=1e-7))


GRADIENTS = ((3.0, -4.0), (12.0,))


@pytest.mark.parametrize(
    ("norm_limit", "value_limit", "clipped", "after"),
    [
        (0.0, None, False, [3.0, -4.0, 12.0]),
        (13.5, None, False, [3.0, -4.0, 12.0]),
        (6.5, None, True, [1.5, -2.0, 6.0]),
        (0.0, 12.0, False, [3.0, -4.0, 12.0]),
        (0.0, 3.5, True, [3.0, -3.5, 3.5]),
        (1.0, 3.5, True, [3.0, -3.5, 3.5]),
    ],
)
def test_clipping(norm_limit: float, value_limit: float | None, clipped: bool, after: list[float]) -> None:
    parameters = [nn.Parameter(torch.zeros(len(values))) for values in (*GRADIENTS, (1.0,))]
    for parameter, values in zip(parameters, GRADIENTS, strict=False):  # the last has no gradient
        parameter.grad = torch.tensor(values)
    assert optimizers.clip(parameters, norm_limit, value_limit) == (13.0, clipped)
    found = [value for p in parameters if p.grad is not None for value in p.grad.tolist()]
    assert found == pytest.approx(after, rel=1e-6)


def test_a_gradient_that_is_not_finite_is_seen_in_the_norm() -> None:
    (parameter,) = [nn.Parameter(torch.zeros(2))]
    for limits in ((1.0, None), (0.0, 1.0), (0.0, None)):
        parameter.grad = torch.tensor([1.0, float("nan")])
        assert optimizers.clip([parameter], *limits)[0] != optimizers.clip([parameter], *limits)[0]
