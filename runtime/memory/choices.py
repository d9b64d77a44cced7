"""Each `auto` of a config resolved, with the reason; and the numbers that its memory follows from."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from runtime.config.model import Config
from runtime.data.manifest import Manifest
from runtime.files import GIB
from runtime.memory import architecture, budget, estimate, work
from runtime.memory.architecture import Architecture
from runtime.memory.budget import Budget
from runtime.memory.estimate import DTYPE_BYTES, Settings
from runtime.memory.made import Made


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    value: Any
    reason: str


def choose(
    config: Config,
    listed: Manifest,
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
        config, listed, base, found, choices
    )
    where = {name: choices[f"cache.devices.{name}"].value for name in ("text_encoder", "vae")}
    choices |= _encoder_dtypes(config, base, where)
    choices["model.quantize"] = (
        _given(config.model.quantize)
        or settled.get("model.quantize")
        or _quantize(config, listed, base, found, choices, quantized.get("transformer"))
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


def _encoder_dtypes(config: Config, base: Architecture, devices: Mapping[str, str]) -> dict[str, Choice]:
    return {
        f"cache.dtypes.{name}": _given(getattr(config.cache.dtypes, name))
        or _encoder_dtype(base, name, device)
        for name, device in devices.items()
    }


def _encoder_dtype(base: Architecture, name: str, device: str) -> Choice:
    if device != "cpu":
        return Choice(value="bf16", reason=f"auto: {device} computes in bf16")
    parameters = base.text_encoder.parameters if name == "text_encoder" else base.vae.parameters
    needed, ram = parameters * DTYPE_BYTES["no"] / GIB, budget.ram_gib()
    if needed > ram * budget.RAM_SHARE:
        return Choice(
            value="bf16", reason=f"auto: in fp32 it takes {needed:.1f} GiB, this machine has {ram:.1f} GiB"
        )
    return Choice(value="fp32", reason="auto: on a CPU, exact and as fast as bf16 at small sizes")


def _text_encoder_device(
    config: Config,
    listed: Manifest,
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
        **_encoder_dtypes(config, base, {"text_encoder": found.device, "vae": found.device}),
    }
    cache = estimate.cache_phase(base, settings(config, base, here), work.largest(config, listed, base))
    if cache.peak_gib <= found.gib:
        return _same_device(found.device)
    reason = (
        f"auto: on {found.device} the cache phase would peak at {cache.peak_gib:.1f} GiB, {found.gib:.1f} fit"
    )
    return Choice(value="cpu", reason=reason)


def _quantize(
    config: Config,
    listed: Manifest,
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
    fit = estimate.fit_phase(base, settings(config, base, plain), work.largest(config, listed, base))
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
        adapter_parameters=architecture.adapter_parameters(
            base.denoiser, lora.r, lora.target_modules, dora=lora.use_dora
        ),
        optimizer=choices["optimizer.class_path"].value,
        ema=config.train.ema_decay is not None,
        text_encoder_device=choices["cache.devices.text_encoder"].value,
        vae_device=choices["cache.devices.vae"].value,
        text_encoder_quantize=choices["model.quantize_text_encoder"].value,
        text_encoder_dtype=choices["cache.dtypes.text_encoder"].value,
        vae_dtype=choices["cache.dtypes.vae"].value,
        samples=config.validation.sample_steps is not None,
    )
