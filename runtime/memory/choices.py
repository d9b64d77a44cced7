"""Each `auto` of a config resolved, with the reason; and the numbers that its memory follows from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from runtime.config.model import Config
from runtime.data.manifest import Sample
from runtime.memory import architecture, estimate
from runtime.memory.architecture import Architecture
from runtime.memory.budget import Budget
from runtime.memory.estimate import Settings, Work
from runtime.memory.made import Made

TEMPLATE_TOKENS = 40  # of a prompt's template beside the caption and the pictures, after the dropped prefix
BYTES_PER_TOKEN = 3  # of a caption in UTF-8; a careful guess, English has 4 to 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    value: Any
    reason: str


def choose(
    config: Config,
    samples: Sequence[Sample],
    base: Architecture,
    found: Budget,
    quantized: Mapping[str, Made] | None = None,
) -> dict[str, Choice]:
    """Each `auto` and each null that stands for one, resolved; what was given is kept `as configured`.

    `quantized`: by component, what step 06 made.
    """
    quantized = quantized or {}
    processor, devices = config.data.processor, config.cache.devices
    choices = {
        "hardware.device": Choice(value=found.device, reason=found.reason),
        "train.mixed_precision": _given(config.train.mixed_precision)
        or _measured(found, "train.mixed_precision", _precision(found.device)),
        "optimizer.class_path": _given(config.optimizer.class_path)
        or _measured(found, "optimizer.class_path", _optimizer()),
        "cache.devices.vae": _given(devices.vae) or _same_device(found.device),
        "data.processor.controls_size": _given(processor.controls_size)
        or Choice(value=list(processor.target_size), reason="null: as data.processor.target_size"),
        "data.processor.vl_pixels": _given(processor.vl_pixels)
        or Choice(value=base.family.vl_pixels, reason=f"null: the published value of {base.family.name}"),
    }
    settled = found.measured or {}
    choices["model.quantize_text_encoder"] = (
        _given(config.model.quantize_text_encoder)
        or settled.get("model.quantize_text_encoder")
        or _quantize_text_encoder(quantized.get("text_encoder"))
    )
    choices["cache.devices.text_encoder"] = _given(devices.text_encoder) or _text_encoder_device(
        config, samples, base, found, choices
    )
    choices["model.quantize"] = (
        _given(config.model.quantize)
        or settled.get("model.quantize")
        or _quantize(config, samples, base, found, choices, quantized.get("transformer"))
    )
    return choices


def _given(value: Any) -> Choice | None:
    if value is None or value == "auto":
        return None
    return Choice(value=list(value) if isinstance(value, tuple) else value, reason="as configured")


def _measured(found: Budget, key: str, rule: Choice) -> Choice:
    """What step 05 settled, where it has measured this device; else `rule`, which says that it has not."""
    if found.measured is None:
        return replace(rule, reason=f"{rule.reason}; not measured here yet (finetune adapt)")
    return found.measured.get(key, rule)


def _precision(device: str) -> Choice:
    if device == "cpu":
        return Choice(value="no", reason="auto: on a CPU bf16 measured twice as slow as fp32 at small sizes")
    return Choice(
        value="bf16", reason=f"auto: {device} computes in bf16, the precision of the published weights"
    )


def _optimizer() -> Choice:
    return Choice(
        value="torch.optim.AdamW",
        reason="auto: 8-bit Adam aborts the process on some XPU drivers, and an adapter's state is small",
    )


def _quantize_text_encoder(made: Made | None) -> Choice:
    if made is None:
        return Choice(value="none", reason="auto: step 06 made no NF4 text encoder")
    return Choice(value="nf4" if made.usable else "none", reason=f"auto: {made.reason}")


def _same_device(device: str) -> Choice:
    return Choice(value=device, reason="auto: as hardware.device")


def _text_encoder_device(
    config: Config,
    samples: Sequence[Sample],
    base: Architecture,
    found: Budget,
    choices: Mapping[str, Choice],
) -> Choice:
    """The plan's device, unless the text encoder is too large for it: then the RAM, slowly, but once."""
    if found.device == "cpu":
        return _same_device(found.device)
    here = {
        **choices,
        "cache.devices.text_encoder": _same_device(found.device),
        "model.quantize": Choice(value="none", reason="no denoiser in the cache phase"),
    }
    cache = estimate.cache_phase(base, settings(config, base, here), largest_work(config, samples, base))
    if cache.peak_gib <= found.gib:
        return _same_device(found.device)
    reason = (
        f"auto: on {found.device} the cache phase would peak at {cache.peak_gib:.1f} GiB, {found.gib:.1f} fit"
    )
    return Choice(value="cpu", reason=reason)


def _quantize(
    config: Config,
    samples: Sequence[Sample],
    base: Architecture,
    found: Budget,
    choices: Mapping[str, Choice],
    made: Made | None,
) -> Choice:
    if made is not None and made.usable:
        return Choice(value="nf4", reason=f"auto: {made.reason}")
    unused = f"; {made.reason} and is not used" if made is not None else ""
    if found.device != "cpu":
        return Choice(
            value="nf4",
            reason=f"auto: on {found.device} NF4 leaves a quarter of the base's bf16 size{unused}",
        )
    plain = {**choices, "model.quantize": Choice(value="none", reason="tried")}
    fit = estimate.fit_phase(base, settings(config, base, plain), largest_work(config, samples, base))
    sizes = f"{fit.peak_gib:.1f} GiB with the plain base, {found.gib:.1f} GiB may be filled"
    if fit.peak_gib <= found.gib:
        return Choice(value="none", reason=f"auto: on this CPU the fit peaks at {sizes}{unused}")
    return Choice(value="nf4", reason=f"auto: on this CPU the fit would peak at {sizes}{unused}")


def settings(config: Config, base: Architecture, choices: Mapping[str, Choice]) -> Settings:
    lora = config.model.lora
    return Settings(
        device=choices["hardware.device"].value,
        quantize=choices["model.quantize"].value,
        precision=choices["train.mixed_precision"].value,
        checkpointing=config.train.gradient_checkpointing,
        adapter_parameters=architecture.adapter_parameters(base.denoiser, lora.r, lora.target_modules),
        optimizer=choices["optimizer.class_path"].value,
        text_encoder_device=choices["cache.devices.text_encoder"].value,
        vae_device=choices["cache.devices.vae"].value,
        text_encoder_quantize=choices["model.quantize_text_encoder"].value,
    )


def largest_work(config: Config, samples: Sequence[Sample], base: Architecture) -> Work:
    """The most that one sample asks for, held-out ones included."""
    processor = config.data.processor
    target, control = processor.target_size, processor.controls_size or processor.target_size
    controls = max(len(sample.controls) for sample in samples)
    seen = min(control[0] * control[1], processor.vl_pixels or base.family.vl_pixels)
    prompt = max(len(sample.prompt.encode("utf-8")) for sample in samples)
    return Work(
        target_pixels=target[0] * target[1],
        control_pixels=control[0] * control[1],
        text_tokens=TEMPLATE_TOKENS
        + ceil(prompt / BYTES_PER_TOKEN)
        + controls * ceil(seen / base.text_encoder.token_side**2),
        image_tokens=_tokens(target, base) + controls * _tokens(control, base),
        batch_size=config.data.batch_size,
    )


def _tokens(size: tuple[int, int], base: Architecture) -> int:
    return ceil(size[0] / base.size_multiple) * ceil(size[1] / base.size_multiple)
