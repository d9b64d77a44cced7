"""Each `auto` of a config resolved, with the reason; and the numbers that its memory follows from."""

from collections.abc import Mapping
from dataclasses import replace

from runtime.config.model import Config
from runtime.data.manifest import Manifest
from runtime.files import GIB
from runtime.planning import techniques
from runtime.planning.architecture import Architecture
from runtime.planning.budget import Budget
from runtime.planning.choice import Case, given
from runtime.planning.choice import Choice as Choice
from runtime.planning.estimate import DTYPE_BYTES
from runtime.quantize.made import Made

Choices = dict[str, Choice]


def choose(
    config: Config,
    listed: Manifest,
    base: Architecture,
    found: Budget,
    quantized: Mapping[str, Made] | None = None,
) -> Choices:
    """Each `auto` and each null that stands for one, resolved; what was given is kept `as configured`.

    `quantized`: by component, what step 06 made.
    """
    return choose_for(Case.of(config, listed, base, found, quantized), quantized or {})


def choose_for(case: Case, quantized: Mapping[str, Made]) -> Choices:
    config, found = case.config, case.found
    processor, devices = config.data.processor, config.cache.devices
    choices = {
        "hardware.device": Choice(value=found.device, reason=found.reason),
        "hardware.unified_memory": given(config.hardware.unified_memory) or _unified(found),
        "train.mixed_precision": given(config.train.mixed_precision)
        or _measured(found, "train.mixed_precision", _precision(found.device)),
        "optimizer.class_path": given(config.optimizer.class_path)
        or _measured(found, "optimizer.class_path", _optimizer()),
        "cache.devices.vae": given(devices.vae) or _same_device(found.device),
        "data.processor.vl_pixels": given(processor.vl_pixels) or _published_view(case),
    }
    settled = found.measured or {}
    choices["model.quantize_text_encoder"] = (
        given(config.model.quantize_text_encoder)
        or settled.get("model.quantize_text_encoder")
        or _quantize_text_encoder(quantized.get("text_encoder"))
    )
    choices["cache.devices.text_encoder"] = given(devices.text_encoder) or _text_encoder_device(case, choices)
    where = {name: choices[f"cache.devices.{name}"].value for name in ("text_encoder", "vae")}
    choices |= _encoder_dtypes(case, where)
    choices["cache.batch_size"] = given(config.cache.batch_size) or techniques.encoded_at_once(case, choices)
    choices["model.quantize"] = (
        given(config.model.quantize)
        or settled.get("model.quantize")
        or _quantize(case, choices, quantized.get("transformer"))
    )
    return choices | techniques.choose(case, choices)


def _unified(found: Budget) -> Choice:
    told = "shares" if found.unified else "has its own memory beside"
    return Choice(value=found.unified, reason=f"auto: {found.device} {told} the host's")


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


def _published_view(case: Case) -> Choice:
    family = case.base.family
    return Choice(value=family.vl_pixels, reason=f"null: the published value of {family.name}")


def _same_device(device: str) -> Choice:
    return Choice(value=device, reason="auto: as hardware.device")


def _encoder_dtypes(case: Case, devices: Mapping[str, str]) -> Choices:
    return {
        f"cache.dtypes.{name}": given(getattr(case.config.cache.dtypes, name))
        or _encoder_dtype(case, name, device)
        for name, device in devices.items()
    }


def _encoder_dtype(case: Case, name: str, device: str) -> Choice:
    if device != "cpu":
        return Choice(value="bf16", reason=f"auto: {device} computes in bf16")
    base, room = case.base, case.found.host_gib
    parameters = base.text_encoder.parameters if name == "text_encoder" else base.vae.parameters
    needed = parameters * DTYPE_BYTES["no"] / GIB
    if needed > room:
        return Choice(
            value="bf16",
            reason=f"auto: in fp32 it takes {needed:.1f} GiB, {room:.1f} GiB of RAM may be filled",
        )
    return Choice(value="fp32", reason="auto: on a CPU, exact and as fast as bf16 at small sizes")


def _text_encoder_device(case: Case, choices: Mapping[str, Choice]) -> Choice:
    """The plan's device, unless the text encoder is too large for it: then the RAM, slowly, but once."""
    found = case.found
    if found.device == "cpu":
        return _same_device(found.device)
    here = {
        **choices,
        "cache.devices.text_encoder": _same_device(found.device),
        **_encoder_dtypes(case, {"text_encoder": found.device, "vae": found.device}),
    }
    if case.spare_gib(here, "cache") >= 0:
        return _same_device(found.device)
    needed = case.phases(here)["cache"].needed_gib
    reason = f"auto: on {found.device} the cache phase would take {needed:.1f} GiB, {found.gib:.1f} fit"
    return Choice(value="cpu", reason=reason)


def _quantize(case: Case, choices: Mapping[str, Choice], made: Made | None) -> Choice:
    if made is not None and made.usable:
        return Choice(value="nf4", reason=f"auto: {made.reason}")
    unused = f"; {made.reason} and is not used" if made is not None else ""
    found = case.found
    if found.device != "cpu":
        return Choice(
            value="nf4",
            reason=f"auto: on {found.device} NF4 leaves a quarter of the base's bf16 size{unused}",
        )
    fit = case.phases({**choices, "model.quantize": Choice(value="none", reason="tried")})["fit"]
    sizes = f"{fit.peak_gib:.1f} GiB with the plain base, {found.gib:.1f} GiB may be filled"
    if found.spare_gib(fit) >= 0:
        return Choice(value="none", reason=f"auto: on this CPU the fit peaks at {sizes}{unused}")
    return Choice(value="nf4", reason=f"auto: on this CPU the fit would peak at {sizes}{unused}")
