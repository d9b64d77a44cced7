"""config.yaml for a base, a dataset and a device, with the reason of each value beside it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import median_low
from typing import Any

from runtime.data.manifest import Manifest
from runtime.data.sample import Sample
from runtime.errors import DataError
from runtime.planning.architecture import Architecture

PUBLISHED_PIXELS = 384 * 672  # the recipe that was validated on a 32 GiB AI PC
DATASET_FILE_SIZE = (544, 960)  # musubi-tuner's default for a dataset file without `resolution`
PASSES = 30  # the same recipe takes 1000 steps for 35 pairs
LEAST_STEPS, MOST_STEPS, ROUND_TO = 300, 2000, 50
CHECKPOINTS = 10
TINY_PARAMETERS = 100e6  # bases below this are demos and tests, and learn with a larger step


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """A key's value and why; `reason` becomes its comment."""

    key: str
    value: Any
    reason: str


def recommend(
    listed: Manifest,
    base: Architecture,
    *,
    model: str,
    device: str,
    steps: int | None = None,
    cache_dir: str | None = None,
    needed: Sequence[Value] = (),
) -> str:
    """The text of config.yaml; `model` and `device` as the target has them. DataError without samples.

    `needed`: what has to be as it is there for the machine's memory, in place of what would be written.
    """
    train = listed.of("train")
    if not train:
        raise DataError("the dataset has no training sample", remedy="finetune dataset")
    values = [
        Value(key="model.pretrained_model_name_or_path", value=model, reason="from finetune init"),
        *_model(base),
        *_data(listed, base),
        Value(key="cache.use_cache", value=True, reason="mandatory: the fit then holds the denoiser only"),
        Value(
            key="cache.cache_dir",
            value=cache_dir or "cache",
            reason="the dataset file's cache_directory" if cache_dir else "one folder per sample",
        ),
        *_train(train, steps),
        *_optimizer(base, steps or recommended_steps(len(train))),
        Value(
            key="loss.sigma_sampling", value="sigmoid", reason="most weight on middle noise, where edits form"
        ),
        Value(key="logging.output_dir", value="outputs", reason="runs are outputs/<project>/v0, v1, ..."),
        Value(key="logging.tracker_project_name", value="edit-lora", reason="the project's folder"),
        Value(key="validation.num_inference_steps", value=20, reason="steps per compared image"),
        Value(key="validation.guidance_scale", value=1.0, reason="off; above 1 each step runs twice"),
        Value(key="hardware.device", value=device, reason="from finetune init"),
    ]
    head = (
        f"# Written by `finetune recommend` for {len(train)} training samples and a base of family "
        f"{base.family.name}.\n# Yours to edit; then `finetune plan`. Every key: schemas/config.schema.json\n"
    )
    return head + render(_with(values, needed))


def _with(values: Sequence[Value], needed: Sequence[Value]) -> list[Value]:
    """Those of the same key replaced; others behind the last of their section."""
    made = list(values)
    for value in needed:
        places = [index for index, other in enumerate(made) if other.key == value.key]
        if places:
            made[places[0]] = value
            continue
        section = value.key.rpartition(".")[0]
        beside = [index for index, other in enumerate(made) if other.key.rpartition(".")[0] == section]
        made.insert(beside[-1] + 1 if beside else len(made), value)
    return made


def _model(base: Architecture) -> list[Value]:
    layers = base.denoiser.layers
    return [
        Value(key="model.quantize", value="auto", reason="NF4 on an accelerator; on CPU only if it must be"),
        Value(key="model.quantize_text_encoder", value="auto", reason="NF4 where finetune quantize made it"),
        Value(
            key="model.lora.r", value=16, reason="the published rank; 8 to 32 cost the same memory within 1 %"
        ),
        Value(key="model.lora.lora_alpha", value=16, reason="scale alpha / r = 1"),
        Value(
            key="model.lora.target_modules",
            value=["to_q", "to_k", "to_v", "to_out.0"],
            reason=f"attention of the image stream in all {layers} blocks, as published",
        ),
    ]


def _data(listed: Manifest, base: Architecture) -> list[Value]:
    train = listed.of("train")
    size, reason = target_size(train, base.size_multiple)
    if listed.layout == "toml":
        size, reason = _of_dataset_file(listed, size, reason)
    batch = _stated(listed, "batch_size")
    return [
        Value(
            key="data.batch_size",
            value=batch or 1,
            reason="as the dataset file says" if batch else "least memory; accumulate for larger batches",
        ),
        Value(key="data.shuffle", value=True, reason="a new order each epoch"),
        Value(
            key="data.caption_dropout_rate",
            value=0.0,
            reason="only guidance above 1 gains by it; the published 0.05 never took effect there",
        ),
        Value(key="data.processor.target_size", value=list(size), reason=reason),
    ]


def _of_dataset_file(listed: Manifest, size: tuple[int, int], reason: str) -> tuple[tuple[int, int], str]:
    """What the file says for all sources wins there in any case; here it stands so that nobody is misled."""
    stated = _stated(listed, "resolution")
    if stated is not None:
        return stated, "height, width: as the dataset file says"
    if all(source.settings.resolution is None for source in listed.sources):
        return DATASET_FILE_SIZE, "height, width: the default of dataset files that say none"
    return size, reason + "; where the dataset file says none"


def _stated(listed: Manifest, name: str) -> Any:
    """The value that every source states, or None."""
    values = {getattr(source.settings, name) for source in listed.sources}
    return values.pop() if len(values) == 1 else None


def target_size(train: Sequence[Sample], multiple: int) -> tuple[tuple[int, int], str]:
    """Height and width: the median of the targets, at most the published area, in multiples of `multiple`."""
    height = median_low([sample.target.height for sample in train])
    width = median_low([sample.target.width for sample in train])
    scale = min(1.0, sqrt(PUBLISHED_PIXELS / (height * width)))
    size = (_floor(height * scale, multiple), _floor(width * scale, multiple))
    limit = "within the published 384 x 672 pixels" if scale < 1 else "as they are"
    return size, f"height, width: targets' median {height} x {width}, {limit}, multiples of {multiple}"


def _floor(side: float, multiple: int) -> int:
    # A hair more, so that 672.0 computed as 671.9999 stays 672.
    return max(multiple, int((side + 1e-6) // multiple) * multiple)


def recommended_steps(samples: int) -> int:
    steps = round(PASSES * samples / ROUND_TO) * ROUND_TO
    return min(MOST_STEPS, max(LEAST_STEPS, steps))


def _train(train: Sequence[Sample], steps: int | None) -> list[Value]:
    count = steps or recommended_steps(len(train))
    why = (
        "as asked"
        if steps
        else f"{PASSES} passes over {len(train)} samples, at least {LEAST_STEPS}, at most {MOST_STEPS}"
    )
    interval = max(1, count // CHECKPOINTS)
    return [
        Value(key="train.max_train_steps", value=count, reason=why),
        Value(key="train.gradient_accumulation_steps", value=1, reason="micro-batches per step"),
        Value(
            key="train.checkpointing_steps",
            value=interval,
            reason=f"{CHECKPOINTS} times a run; a kill costs at most so much",
        ),
        Value(key="train.max_grad_norm", value=1.0, reason="clips the rare outlier"),
        Value(key="train.mixed_precision", value="auto", reason="bf16 on an accelerator, fp32 on CPU"),
        Value(
            key="train.gradient_checkpointing",
            value="auto",
            reason="the fastest that fits; true takes a third more time and a tenth of the activations",
        ),
        Value(
            key="train.cached_modulation",
            value="auto",
            reason="a third of the weights becomes a table, on an accelerator",
        ),
        Value(key="train.streamed_blocks", value="auto", reason="none where all fit; else the fewest"),
        Value(key="train.seed", value=42, reason="order, noise and dropout are functions of it"),
    ]


def _optimizer(base: Architecture, steps: int) -> list[Value]:
    tiny = base.denoiser.parameters < TINY_PARAMETERS
    rate = 1e-3 if tiny else 1e-4
    why = f"a base of {base.denoiser.parameters / 1e6:.1f} M parameters takes ten times the published rate"
    return [
        Value(
            key="optimizer.class_path",
            value="auto",
            reason="torch.optim.AdamW; 8-bit Adam dies on some XPU drivers",
        ),
        Value(key="optimizer.init_args.lr", value=rate, reason=why if tiny else "the published rate"),
        Value(key="lr_scheduler.scheduler_type", value="cosine", reason="falls to zero at the last step"),
        Value(
            key="lr_scheduler.warmup_steps",
            value=min(50, steps // 10),
            reason="a tenth of the run, at most 50",
        ),
    ]


def render(values: Sequence[Value]) -> str:
    """YAML in the order given, sections nested, each value followed by its reason."""
    lines: list[str] = []
    open_path: list[str] = []
    for value in values:
        *parents, leaf = value.key.split(".")
        shared = _shared(open_path, parents)
        if not shared:
            lines.append("")
        for depth in range(shared, len(parents)):
            lines.append("  " * depth + parents[depth] + ":")
        open_path = parents
        lines.append(f"{'  ' * len(parents)}{leaf}: {_yaml(value.value)}  # {value.reason}")
    return "\n".join(lines) + "\n"


def _shared(left: Sequence[str], right: Sequence[str]) -> int:
    count = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        count += 1
    return count


def _yaml(value: Any) -> str:
    """JSON is YAML, but for a float's exponent, which needs a dot before it."""
    if isinstance(value, float) and value and abs(value) < 1e-2:
        mantissa, exponent = f"{value:e}".split("e")
        digits = mantissa.rstrip("0")
        return f"{digits}{'0' if digits.endswith('.') else ''}e{int(exponent)}"
    return json.dumps(value, ensure_ascii=False)
