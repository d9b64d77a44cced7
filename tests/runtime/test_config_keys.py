"""Every key of config.yaml changes something.

The framework that this recipe grew from accepts ten keys that do nothing. Here each key has
two values and something that differs between them; a key without a case fails
`test_every_key_is_in_the_table`, by name, and so does CI, which runs all tests (`.ci/run`).
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from runtime import device, files
from runtime.cache import encode
from runtime.config import load
from runtime.errors import UserError
from runtime.inference import heldout, validate
from runtime.planning import budget, plan
from runtime.progress import Progress
from runtime.training import checkpoints, loop, trainables
from runtime.training.batches import Batches

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


def started(lab: Any, changes: Changes) -> Any:
    """Beside an adapter in kohya's naming that lies in the workspace."""
    from safetensors.torch import save_file

    names = [
        f"lora_unet_transformer_blocks_{block}_attn_{name}.lora_{half}.weight"
        for block in (0, 1)
        for name in ("to_q", "to_k")
        for half in ("down", "up")
    ]
    shapes = {"down": (2, 128), "up": (128, 2)}
    tensors = {name: torch.ones(next(shapes[half] for half in shapes if half in name)) for name in names}
    save_file(tensors, lab.root / "start.safetensors")
    return first_values(lab, changes)


def replaced(lab: Any, changes: Changes) -> Any:
    """Beside other weights of the denoiser that lie in the workspace."""
    from safetensors.torch import load_file, save_file

    own = Path(lab.workspace.externals()["model"]) / "transformer" / "diffusion_pytorch_model.safetensors"
    save_file({name: tensor * 2 for name, tensor in load_file(own).items()}, lab.root / "dit.safetensors")
    return lab.launch(changes).denoiser.proj_out.weight.flatten()[:3].tolist()


def scale(lab: Any, changes: Changes) -> Any:
    """Of what the adapter adds: the same weights, another answer."""
    session = lab.launch(changes)
    with torch.no_grad():
        for parameter in session.trained.adapter.parameters():
            parameter.fill_(0.05)
    return loop._probe(session, 0)["train_mean"]


def offered(lab: Any, changes: Changes) -> str:
    """What the last checkpoint holds for use."""
    path = checkpoints.plains(run_of(lab, changes).path)[-1] / trainables.WEIGHTS
    return files.file_digest(path)


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


def base_size(lab: Any, changes: Changes) -> Any:
    """GiB of the base that are loaded."""
    return lab.launch(changes).run.document["trainable"]["base_gib"]


def plain_linears(lab: Any, changes: Changes) -> int:
    """Of the blocks, where NF4 is made while loading."""
    blocks = lab.launch({"model.quantize": "nf4", **changes}).denoiser.transformer_blocks
    return sum(type(module) is torch.nn.Linear for module in blocks.modules())


def hooks(lab: Any, changes: Changes) -> int:
    """Of the blocks: a streamed one brings its weights before it runs."""
    return sum(len(block._forward_pre_hooks) for block in lab.launch(changes).denoiser.transformer_blocks)


def compiled(lab: Any, changes: Changes) -> int:
    """Functions that were given to the compiler."""
    given: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda function: given.append(function) or function)
        lab.launch(changes)
    return len(given)


def recording(lab: Any, changes: Changes) -> bool:
    return lab.launch(changes).gradients.keeps_gradients


def optimizer(lab: Any, changes: Changes) -> Any:
    made = lab.launch(changes).trained.optimizer
    return type(made).__name__, made.param_groups[0]["lr"], made.param_groups[0].get("weight_decay")


def rates(lab: Any, changes: Changes) -> list[float]:
    return [line["lr"] for line in metrics(lab, {"lr_scheduler.scheduler_type": "cosine", **changes})]


def restarting(lab: Any, changes: Changes) -> list[float]:
    return rates(lab, {"lr_scheduler.scheduler_type": "cosine_with_restarts", **changes})


def polynomial(lab: Any, changes: Changes) -> list[float]:
    return rates(lab, {"lr_scheduler.scheduler_type": "polynomial", **changes})


def sigmas(lab: Any, changes: Changes) -> list[list[float]]:
    return [line["sigmas"] for line in metrics(lab, changes)]


def drawn(lab: Any, changes: Changes) -> list[float]:
    """Sigmas of the first steps, without training."""
    session = lab.launch(changes)
    windows = session.batches.windows(1, 3, 1)
    return [
        sigma
        for step, window in enumerate(windows, 1)
        for sigma in session.objective.draw(window[0], step, 0).sigmas.tolist()
    ]


def logit_normal(lab: Any, changes: Changes) -> list[float]:
    return drawn(lab, {"loss.sigma_sampling": "logit_normal", **changes})


def shifted(lab: Any, changes: Changes) -> list[float]:
    return drawn(lab, {"loss.sigma_sampling": "shift", **changes})


def first_loss(lab: Any, changes: Changes) -> float:
    """Of the first step, whose adapter adds nothing yet: what differs is how it is weighed."""
    session = lab.launch(changes)
    losses, _ = loop._gradients(session, 1, next(session.batches.windows(1, 1, 1)))
    return float(losses.mean())


def masked(lab: Any, changes: Changes) -> float:
    """Every sample has a mask, white on its left half."""
    mask = Image.new("L", (64, 64))
    mask.paste(255, (0, 0, 32, 64))
    for index in range(11):
        mask.save(lab.root / "dataset" / "control_images" / f"p{index}_mask.png")
    sets_of(lab, "")
    return first_loss(lab, changes)


def held(lab: Any, changes: Changes) -> float:
    """All samples are to stay as the base paints them, by an adapter that paints something else."""
    sets_of(lab, "regularisation = true")
    session = lab.launch(changes)
    with torch.no_grad():
        for parameter in session.trained.adapter.parameters():
            parameter.fill_(0.05)
    losses, _ = loop._gradients(session, 1, next(session.batches.windows(1, 1, 1)))
    return float(losses.mean())


def sets_of(lab: Any, line: str) -> None:
    """The lab's pairs by a dataset file, and their cache anew."""
    from runtime.commands.init import write_target
    from runtime.data import reading

    (lab.root / "sets.toml").write_text(f'[[datasets]]\nfolder = "dataset"\n{line}\n', encoding="utf-8")
    write_target(lab.workspace, model=None, dataset=str(lab.root / "sets.toml"), device=None)
    found = reading.build(lab.workspace, "sets.toml", 3)
    lab.workspace.begin_evidence("02-dataset", "test").write(inputs={}, data=found.to_json())
    lab.cache()


def kernels(lab: Any, changes: Changes) -> bool:
    """Whether torch is held to kernels that give the same bits each time."""
    try:
        lab.launch(changes)
        return torch.are_deterministic_algorithms_enabled()
    finally:
        device.deterministic(False)


def endured(lab: Any, changes: Changes) -> int:
    """Steps whose loss was no number, until the run stopped."""
    session = lab.launch(changes)
    kind = type(session.objective)
    with pytest.MonkeyPatch.context() as patch:
        original = kind.step_losses
        patch.setattr(kind, "step_losses", lambda *given: original(*given) * float("nan"))
        with pytest.raises(loop.NonFiniteError):
            loop.fit(session, Progress(quiet=True))
    return len(files.read_json_lines(session.run.path / "metrics.jsonl"))


def measured(lab: Any, changes: Changes) -> list[int]:
    return [line["step"] for line in files.read_json_lines(run_of(lab, changes).path / "probe.jsonl")]


def kept(lab: Any, changes: Changes) -> list[str]:
    run = lab.fit({"train.max_train_steps": 4, "train.checkpointing_steps": 2, **changes})
    return [path.name for path in checkpoints.plains(run.path)]


def asked(lab: Any, changes: Changes) -> int:
    return len(files.read_json_lines(run_of(lab, changes).path / "probe.jsonl")[0]["items"])


def clipped(lab: Any, changes: Changes) -> list[bool]:
    return [line["clipped"] for line in metrics(lab, changes)]


def clipped_by_value(lab: Any, changes: Changes) -> list[bool]:
    return clipped(lab, {"train.max_grad_norm": 0.0, **changes})


def place(lab: Any, changes: Changes) -> str:
    return str(run_of(lab, changes).path.relative_to(lab.root))


def tracked(lab: Any, changes: Changes) -> bool:
    """Whether a run has TensorBoard's files."""
    return any((run_of(lab, changes).path / "tensorboard").glob("events.*"))


def cache_place(lab: Any, changes: Changes) -> list[str]:
    lab.cache(changes)
    return sorted(path.parent.name for path in lab.root.glob("*/manifest.json"))


def encoded(lab: Any, changes: Changes) -> dict[str, torch.Tensor]:
    """Tensors of p0's entry, without cache."""
    job = lab.job(changes)
    encoders = encode.load(job.family, job.model, job.config)
    wants = [want for want in job.wants if want.id == "p0"]
    return encode.encode(job.family, encoders, job.config, wants)[0].tensors


def convolutions(lab: Any, changes: Changes) -> Any:
    """Kinds of them in the VAE."""
    job = lab.job(changes)
    vae = encode.load(job.family, job.model, job.config, only="vae").pipeline.vae
    return {type(module) for module in vae.modules() if "Conv" in type(module).__name__}


def tensors(lab: Any, changes: Changes) -> Any:
    """Names and shapes of a sample's entry."""
    return {name: tuple(tensor.shape) for name, tensor in encoded(lab, changes).items()}


def dtypes(lab: Any, changes: Changes) -> Any:
    return {name: tensor.dtype for name, tensor in encoded(lab, changes).items()}


def seen_large(lab: Any, changes: Changes) -> Any:
    return tensors(lab, {"data.processor.controls_size": [128, 128], **changes})


def redraw(lab: Any, picture: Image.Image, *folders: str) -> None:
    """p0 anew."""
    for folder in folders:
        picture.save(lab.root / "dataset" / folder / "p0.png")
    lab.scan()


def wide(lab: Any, changes: Changes) -> Any:
    redraw(lab, Image.new("RGB", (128, 32)), "training_images", "control_images")
    return tensors(lab, changes)


def small(lab: Any, changes: Changes) -> Any:
    """Of 64 x 64 pictures where the area is larger."""
    large = {"data.processor.enable_bucket": True, "data.processor.target_size": [96, 96]}
    return tensors(lab, {**large, **changes})


def odd_control(lab: Any, changes: Changes) -> Any:
    redraw(lab, Image.new("RGB", (80, 48)), "control_images")
    return tensors(lab, changes)


def transparent(lab: Any, changes: Changes) -> float:
    redraw(lab, Image.new("RGBA", (64, 64), (0, 0, 0, 0)), "training_images")
    return float(encoded(lab, changes)["target"].sum())


def cut_off(lab: Any, changes: Changes) -> list[str]:
    return list(lab.cache(changes).notes)


def at_once(lab: Any, changes: Changes) -> list[int]:
    """Samples of each call of the encoders, of eleven."""
    sizes: list[int] = []
    original = encode.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "encode", lambda *given: (sizes.append(len(given[3])), original(*given))[1])
        lab.cache({"data.processor.target_size": [32, 32], **changes})
    return sizes


def reading_threads(lab: Any, changes: Changes) -> set[str]:
    """Who reads the cache in a fit."""
    names: set[str] = set()
    original = Batches._read

    def read(*given: Any) -> Any:
        names.add(threading.current_thread().name.partition("-")[0])
        return original(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "_read", read)
        run_of(lab, changes)
    return names


def refusal(lab: Any, changes: Changes) -> str:
    """The cache phase planned, or why it can't be."""
    try:
        return str(len(lab.job(changes).wants))
    except UserError as error:
        return error.message


def loading(lab: Any, changes: Changes) -> str:
    """The encoders loaded, or why they can't be."""
    job = lab.job(changes)
    try:
        loaded = encode.load(job.family, job.model, job.config)
    except UserError as error:
        return error.message
    return f"{loaded.text_device} {loaded.vae_device}"


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


def listed(lab: Any, changes: Changes) -> Any:
    """Beside a file of prompts."""
    text = "make it green --ci control_images/p0.png\n"
    (lab.root / "dataset" / "prompts.txt").write_text(text, encoding="utf-8")
    return painted(lab, changes)


def moments(lab: Any, changes: Changes) -> list[int]:
    """Steps of a run that pictures were painted at."""
    painted = run_of(lab, changes).document.get("samples", {"painted": []})["painted"]
    return [line["step"] for line in painted]


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


def room(lab: Any, changes: Changes) -> float:
    """What a plan may fill."""
    return plan.make_plan(lab.workspace, lab.configure(changes)).budget_gib


def shared(lab: Any, changes: Changes) -> bool:
    """Whether a plan for a pretended card adds up what is on it and in the host's memory."""
    hardware = lab.configure({**changes, "hardware.device": "xpu"}).config.hardware
    card = device.Device(type="xpu", name="Arc", total_gib=16.0, reason="x")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(device, "pick", lambda requested: card)
        patched.setattr(device, "is_integrated", lambda: None)
        return budget.find(hardware).unified


@dataclass(frozen=True, slots=True)
class Case:
    one: Any
    other: Any
    observe: Observe


CASES = {
    "model.pretrained_model_name_or_path": Case("external:model", "dataset", refusal),
    "model.transformer_weight": Case(None, "dit.safetensors", replaced),
    "model.quantize": Case("none", "nf4", base_dtypes),
    "model.nf4_keep": Case([], ["*.img_mod.1"], plain_linears),
    "model.quantize_text_encoder": Case("none", "nf4", refusal),
    "model.lora.r": Case(2, 4, shape_of),
    "model.lora.lora_alpha": Case(4, 8, scale),
    "model.lora.lora_dropout": Case(0.0, 0.5, weights),
    "model.lora.init_lora_weights": Case("gaussian", True, first_values),
    "model.lora.pretrained_weight": Case(None, "start.safetensors", started),
    "model.lora.target_modules": Case(["to_q"], ["to_q", "to_k"], shape_of),
    "model.lora.use_dora": Case(False, True, shape_of),
    "model.lora.use_rslora": Case(False, True, scale),
    "data.batch_size": Case(1, 2, samples),
    "data.shuffle": Case(True, False, samples),
    "data.caption_dropout_rate": Case(0.0, 0.9, dropping),
    "data.num_workers": Case(0, 1, reading_threads),
    "data.max_prompt_tokens": Case(8, 1024, cut_off),
    "data.processor.target_size": Case([64, 64], [32, 64], tensors),
    "data.processor.controls_size": Case(None, [32, 64], tensors),
    "data.processor.vl_pixels": Case(128 * 128, 56 * 56, seen_large),
    "data.processor.enable_bucket": Case(False, True, wide),
    "data.processor.bucket_no_upscale": Case(False, True, small),
    "data.processor.controls_resize": Case("cover", "keep", odd_control),
    "data.processor.background": Case([255, 255, 255], [0, 0, 0], transparent),
    "cache.use_cache": Case(True, False, refusal),
    "cache.cache_dir": Case("cache", "elsewhere", cache_place),
    "cache.devices.text_encoder": Case("cpu", "xpu", loading),
    "cache.devices.vae": Case("cpu", "xpu", loading),
    "cache.batch_size": Case(1, 4, at_once),
    "cache.vae": Case("exact", "folded", convolutions),
    "cache.dtypes.text_encoder": Case("fp32", "bf16", dtypes),
    "cache.dtypes.vae": Case("fp32", "bf16", dtypes),
    "train.max_train_steps": Case(2, 3, steps),
    "train.num_epochs": Case(
        1, 2, lambda lab, changes: steps(lab, {"train.max_train_steps": None, **changes})
    ),
    "train.gradient_accumulation_steps": Case(1, 2, samples),
    "train.checkpointing_steps": Case(1, 2, kept),
    "train.checkpoints_total_limit": Case(None, 1, kept),
    "train.max_grad_norm": Case(0.0, 1e-6, clipped),
    "train.clip_grad_value": Case(None, 1e-9, clipped_by_value),
    "train.ema_decay": Case(None, 0.5, offered),
    "train.mixed_precision": Case(
        "no", "bf16", lambda lab, changes: (lab.cache(changes), base_dtypes(lab, changes))[1]
    ),
    "train.gradient_checkpointing": Case(True, False, forwards),
    "train.cached_modulation": Case(False, True, base_size),
    "train.streamed_blocks": Case(0, 1, hooks),
    "train.compile": Case(False, True, compiled),
    "train.graphs": Case(False, True, recording),
    "train.deterministic": Case(False, True, kernels),
    "train.nonfinite_limit": Case(1, 2, endured),
    "train.seed": Case(1, 2, sigmas),
    "train.probe_samples": Case(1, 2, asked),
    "train.probe_draws": Case(1, 2, asked),
    "train.probe_steps": Case(None, 1, measured),
    "optimizer.class_path": Case("torch.optim.AdamW", "torch.optim.SGD", optimizer),
    "optimizer.init_args.lr": Case(1e-3, 1e-2, weights),
    "optimizer.init_args.weight_decay": Case(0.0, 0.5, optimizer),
    "lr_scheduler.scheduler_type": Case("constant", "linear", rates),
    "lr_scheduler.warmup_steps": Case(0, 2, rates),
    "lr_scheduler.num_cycles": Case(1, 2, restarting),
    "lr_scheduler.power": Case(1.0, 2.0, polynomial),
    "loss.sigma_sampling": Case("uniform", "sigmoid", sigmas),
    "loss.logit_mean": Case(None, 1.0, logit_normal),
    "loss.logit_std": Case(None, 0.5, logit_normal),
    "loss.shift": Case(1.0, 3.0, shifted),
    "loss.sigma_min": Case(0.0, 0.5, drawn),
    "loss.sigma_max": Case(1.0, 0.5, drawn),
    "loss.sigma_strata": Case(None, 4, drawn),
    "loss.weighting": Case("none", "cosmap", first_loss),
    "loss.mask_floor": Case(0.0, 0.5, masked),
    "loss.prior_weight": Case(1.0, 0.5, held),
    "logging.output_dir": Case("outputs", "runs", place),
    "logging.tracker_project_name": Case("a", "b", place),
    "logging.report_to": Case(["tensorboard"], [], tracked),
    "validation.num_inference_steps": Case(2, 3, painted),
    "validation.guidance_scale": Case(1.0, 4.0, painted),
    "validation.negative_prompt": Case(" ", "a blue star on a white background", guided),
    "validation.seed": Case(1, 2, painted),
    "validation.samples": Case([], [PROMPT], painted),
    "validation.samples.prompt": Case([PROMPT], [{**PROMPT, "prompt": "paint the background blue"}], painted),
    "validation.samples.images": Case(
        [PROMPT], [{**PROMPT, "images": ["dataset/control_images/p1.png"]}], painted
    ),
    "validation.samples.size": Case([PROMPT], [{**PROMPT, "size": [32, 64]}], painted),
    "validation.samples.seed": Case([PROMPT], [{**PROMPT, "seed": 7}], painted),
    "validation.samples.num_inference_steps": Case([PROMPT], [{**PROMPT, "num_inference_steps": 3}], painted),
    "validation.samples.negative_prompt": Case(
        [PROMPT], [{**PROMPT, "negative_prompt": "a blue star on a white background"}], guided
    ),
    "validation.prompt_file": Case(None, "dataset/prompts.txt", listed),
    "validation.sample_steps": Case(None, 1, moments),
    "hardware.device": Case("cpu", "xpu", refusal),
    "hardware.memory_limit_gib": Case(None, 0.5, room),
    "hardware.unified_memory": Case(True, False, shared),
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


def untested(keys: list[str]) -> list[str]:
    """Keys whose effect no case shows; a key with keys below it has its cases there."""
    return sorted(
        key for key in keys if key not in CASES and not any(other.startswith(key + ".") for other in keys)
    )


def test_every_key_is_in_the_table() -> None:
    keys = list(load.known_keys())
    missing, strange = untested(keys), sorted(CASES.keys() - FREE - set(keys))
    assert not missing, f"keys of config.yaml without a case in CASES: {', '.join(missing)}"
    assert not strange, f"cases of keys that config.yaml does not have: {', '.join(strange)}"


def test_a_key_without_a_case_is_named() -> None:
    assert untested([*load.known_keys(), "train.new", "extra", "extra.one"]) == ["extra.one", "train.new"]


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
    full, half = (held(lab, {"loss.prior_weight": weight}) for weight in (1.0, 0.5))
    assert half == pytest.approx(0.5 * full, rel=1e-6)
    assert [endured(lab, {"train.nonfinite_limit": limit}) for limit in (1, 2)] == [1, 2]
