"""Every key of config.yaml changes something.

The framework that this recipe grew from accepts ten keys that do nothing. Here each key has
two values and something that differs between them; a key that is missing fails the last test.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from runtime import files
from runtime.cache import build, encode
from runtime.config import load
from runtime.errors import UserError
from runtime.inference import heldout, validate
from runtime.progress import Progress
from runtime.training import checkpoints, loop

Changes = dict[str, Any]
Observe = Callable[[Any, Changes], Any]

SHORT = {"train.max_train_steps": 3, "train.checkpointing_steps": 3}
PROMPT = {"prompt": "make it green", "images": ["dataset/control_images/p0.png"]}


def run_of(lab: Any, changes: Changes) -> Any:
    return lab.fit({**SHORT, **changes})


def metrics(lab: Any, changes: Changes) -> list[dict[str, Any]]:
    return files.read_json_lines(run_of(lab, changes).path / "metrics.jsonl")


def weights(lab: Any, changes: Changes) -> str:
    """What was learned."""
    return files.document_digest(
        {name: t.tolist() for name, t in lab.adapter(run_of(lab, changes).path).items()}
    )


def dropping(lab: Any, changes: Changes) -> list[list[str]]:
    lab.cache({**SHORT, **changes})
    return [line["dropped"] for line in metrics(lab, changes)]


def samples(lab: Any, changes: Changes) -> list[list[str]]:
    return [line["samples"] for line in metrics(lab, changes)]


def steps(lab: Any, changes: Changes) -> int:
    return len(
        files.read_json_lines(lab.fit({"train.checkpointing_steps": 100, **changes}).path / "metrics.jsonl")
    )


def shape_of(lab: Any, changes: Changes) -> Any:
    """Names and shapes of the trained tensors."""
    parameters = lab.launch(changes).trained.adapter.named_parameters()
    return [(name, tuple(p.shape)) for name, p in parameters]


def first_values(lab: Any, changes: Changes) -> Any:
    return [p.flatten()[:3].tolist() for p in lab.launch(changes).trained.adapter.parameters()]


def scale(lab: Any, changes: Changes) -> Any:
    """Of what the adapter adds: the same weights, another answer."""
    session = lab.launch(changes)
    with torch.no_grad():
        for parameter in session.trained.adapter.parameters():
            parameter.fill_(0.05)
    return loop._probe(session, 0)["train_mean"]


def base_dtypes(lab: Any, changes: Changes) -> Any:
    return {str(p.dtype) for p in lab.launch(changes).denoiser.parameters()}


def forwards(lab: Any, changes: Changes) -> int:
    """Passes through a block, of three steps and two measurements: recomputing it doubles the steps' share."""
    session = lab.launch({**SHORT, **changes})
    count: list[int] = []
    block: Any = session.denoiser.transformer_blocks[0]
    block.attn.register_forward_hook(lambda *given: count.append(1))
    loop.fit(session, Progress(quiet=True))
    return len(count)


def optimizer(lab: Any, changes: Changes) -> Any:
    made = lab.launch(changes).trained.optimizer
    return type(made).__name__, made.param_groups[0]["lr"], made.param_groups[0].get("weight_decay")


def rates(lab: Any, changes: Changes) -> list[float]:
    return [line["lr"] for line in metrics(lab, {"lr_scheduler.scheduler_type": "cosine", **changes})]


def sigmas(lab: Any, changes: Changes) -> list[list[float]]:
    return [line["sigmas"] for line in metrics(lab, changes)]


def kept(lab: Any, changes: Changes) -> list[str]:
    run = lab.fit({"train.max_train_steps": 4, "train.checkpointing_steps": 2, **changes})
    return [path.name for path in checkpoints.plains(run.path)]


def asked(lab: Any, changes: Changes) -> int:
    return len(files.read_json_lines(run_of(lab, changes).path / "probe.jsonl")[0]["items"])


def clipped(lab: Any, changes: Changes) -> list[bool]:
    return [line["clipped"] for line in metrics(lab, changes)]


def place(lab: Any, changes: Changes) -> str:
    return str(run_of(lab, changes).path.relative_to(lab.root))


def cache_place(lab: Any, changes: Changes) -> list[str]:
    lab.cache(changes)
    return sorted(path.parent.name for path in lab.root.glob("*/manifest.json"))


def tensors(lab: Any, changes: Changes) -> Any:
    """Names and shapes of a training sample's entry."""
    job = lab.job(changes)
    encoders = encode.load(job.family, job.model, job.config)
    found = build.encode_entry(job, encoders, job.wants[0])
    return {name: tuple(tensor.shape) for name, tensor in found.items()}


def seen_large(lab: Any, changes: Changes) -> Any:
    return tensors(lab, {"data.processor.controls_size": [128, 128], **changes})


def refusal(lab: Any, changes: Changes) -> str:
    """The cache phase planned, or why it can't be."""
    try:
        return str(len(lab.job(changes).wants))
    except UserError as error:
        return error.message


def painted(lab: Any, changes: Changes) -> Any:
    """Digests of what the base paints of held-out samples and prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heldout, "DRAWS", 1)
        lab.scan(holdout=1)
        every = {**SHORT, "train.max_train_steps": 1, **changes}
        lab.cache(every)
        lab.fit(every)
        checkpoint = validate.find_checkpoint(lab.project, "last", lab.root)
        data = validate.validate(lab.workspace, lab.configure(every), checkpoint, Progress(quiet=True)).data
    return [sample["pictures"]["base"]["sha256"] for sample in data["samples"]]


def guided(lab: Any, changes: Changes) -> Any:
    return painted(lab, {"validation.guidance_scale": 4.0, **changes})


def origin(lab: Any, changes: Changes) -> Any:
    """What `finetune fit` without an option starts from."""
    from runtime.commands.fit import command

    with pytest.MonkeyPatch.context() as patch:
        original = loop._step

        def step(session: Any, cursor: Any, window: Any) -> Any:
            if cursor.step == 4:
                raise RuntimeError("stopped")
            return original(session, cursor, window)

        patch.setattr(loop, "_step", step)
        with pytest.raises(RuntimeError, match="stopped"):
            lab.fit()
    lab.configure(changes)
    result = CliRunner().invoke(command, ["--workspace", str(lab.root)], standalone_mode=False)
    assert result.exception is None, result.output
    newest = max(lab.project.iterdir(), key=lambda path: int(path.name[1:]))
    return (files.read_json(newest / "run.json")["resumed_from"] or {}).get("step")


@dataclass(frozen=True, slots=True)
class Case:
    one: Any
    other: Any
    observe: Observe


CASES = {
    "model.pretrained_model_name_or_path": Case("external:model", "dataset", refusal),
    "model.quantize": Case("none", "nf4", base_dtypes),
    "model.quantize_text_encoder": Case("none", "nf4", refusal),
    "model.lora.r": Case(2, 4, shape_of),
    "model.lora.lora_alpha": Case(4, 8, scale),
    "model.lora.lora_dropout": Case(0.0, 0.5, weights),
    "model.lora.init_lora_weights": Case("gaussian", True, first_values),
    "model.lora.target_modules": Case(["to_q"], ["to_q", "to_k"], shape_of),
    "data.batch_size": Case(1, 2, samples),
    "data.shuffle": Case(True, False, samples),
    "data.caption_dropout_rate": Case(0.0, 0.9, dropping),
    "data.processor.target_size": Case([64, 64], [32, 64], tensors),
    "data.processor.controls_size": Case(None, [32, 64], tensors),
    "data.processor.vl_pixels": Case(128 * 128, 56 * 56, seen_large),
    "cache.use_cache": Case(True, False, refusal),
    "cache.cache_dir": Case("cache", "elsewhere", cache_place),
    "cache.devices.text_encoder": Case("cpu", "xpu", refusal),
    "cache.devices.vae": Case("cpu", "xpu", refusal),
    "train.max_train_steps": Case(2, 3, steps),
    "train.num_epochs": Case(
        1, 2, lambda lab, changes: steps(lab, {"train.max_train_steps": None, **changes})
    ),
    "train.gradient_accumulation_steps": Case(1, 2, samples),
    "train.checkpointing_steps": Case(1, 2, kept),
    "train.checkpoints_total_limit": Case(None, 1, kept),
    "train.max_grad_norm": Case(0.0, 1e-6, clipped),
    "train.mixed_precision": Case(
        "no", "bf16", lambda lab, changes: (lab.cache(changes), base_dtypes(lab, changes))[1]
    ),
    "train.gradient_checkpointing": Case(True, False, forwards),
    "train.seed": Case(1, 2, sigmas),
    "train.probe_samples": Case(1, 2, asked),
    "train.probe_draws": Case(1, 2, asked),
    "optimizer.class_path": Case("torch.optim.AdamW", "torch.optim.SGD", optimizer),
    "optimizer.init_args.lr": Case(1e-3, 1e-2, weights),
    "optimizer.init_args.weight_decay": Case(0.0, 0.5, optimizer),
    "lr_scheduler.scheduler_type": Case("constant", "linear", rates),
    "lr_scheduler.warmup_steps": Case(0, 2, rates),
    "loss.sigma_sampling": Case("uniform", "sigmoid", sigmas),
    "logging.output_dir": Case("outputs", "runs", place),
    "logging.tracker_project_name": Case("a", "b", place),
    "validation.num_inference_steps": Case(2, 3, painted),
    "validation.guidance_scale": Case(1.0, 4.0, painted),
    "validation.negative_prompt": Case(" ", "a blue star on a white background", guided),
    "validation.seed": Case(1, 2, painted),
    "validation.samples": Case([], [PROMPT], painted),
    "validation.samples.prompt": Case([PROMPT], [{**PROMPT, "prompt": "paint the background blue"}], painted),
    "validation.samples.images": Case(
        [PROMPT], [{**PROMPT, "images": ["dataset/control_images/p1.png"]}], painted
    ),
    "hardware.device": Case("cpu", "xpu", refusal),
    "resume": Case(None, "latest", origin),
}
FREE = {"optimizer.init_args.weight_decay"}  # goes to the optimizer's class as it is


@pytest.mark.parametrize("key", CASES)
def test_key_has_an_effect(lab: Any, key: str) -> None:
    case = CASES[key]
    written = key if not key.startswith("validation.samples.") else "validation.samples"
    one = case.observe(lab, {written: case.one})
    other = case.observe(lab, {written: case.other})
    assert one != other


def test_every_key_is_in_the_table() -> None:
    keys = list(load.known_keys())
    leaves = {key for key in keys if not any(other.startswith(key + ".") for other in keys)}
    assert leaves == CASES.keys() - FREE - {"validation.samples"}


def test_extra_bounds_of_what_was_observed(lab: Any, tmp_path: Path) -> None:
    """The table shows that something differs; here is that it differs as it should."""
    assert tensors(lab, {"data.processor.target_size": [32, 64]})["target"] == (16, 4, 8)
    assert clipped(lab, {"train.max_grad_norm": 0.0}) == [False] * 3
    assert all(clipped(lab, {"train.max_grad_norm": 1e-6}))
    assert forwards(lab, {"train.gradient_checkpointing": True}) - forwards(
        lab, {"train.gradient_checkpointing": False}
    ) == len(range(3))
    one, two = (asked(lab, {"train.probe_draws": draws}) for draws in (1, 2))
    assert two == 2 * one
