"""What stands in a plan's way, and the mildest change of the config that mends it."""

from collections.abc import Callable, Mapping
from typing import Any

from runtime.config.load import apply_overrides, parse
from runtime.config.model import Config
from runtime.data.manifest import Manifest
from runtime.data.sample import Size
from runtime.errors import UserError
from runtime.memory import estimate, work
from runtime.memory.architecture import Architecture
from runtime.memory.budget import Budget
from runtime.memory.choices import choose, settings
from runtime.memory.estimate import Phase
from runtime.memory.made import Made

SPARE_DISK_GIB = 1.0


def find_problems(
    config: Config,
    listed: Manifest,
    base: Architecture,
    found: Budget,
    phases: Mapping[str, Phase],
    *,
    disk_needed_gib: float,
    disk_free_gib: float,
    quantized: Mapping[str, Made] | None = None,
) -> tuple[UserError, ...]:
    """Why the run would fail as configured; empty when nothing is known to be in its way."""
    return (
        *overruled(config, listed),
        *_size_problems(config, base),
        *_control_problems(listed, base),
        *_memory_problems(rounded(config, base), listed, base, found, phases, quantized),
        *_disk_problems(disk_needed_gib, disk_free_gib),
    )


def _size_problems(config: Config, base: Architecture) -> list[UserError]:
    return [
        UserError(
            f"data.processor.{name} is {list(size)}, expected multiples of {base.size_multiple}",
            remedy=f"set data.processor.{name}: {list(mended)} in config.yaml",
        )
        for name, (size, mended) in _uneven(config, base).items()
    ]


def rounded(config: Config, base: Architecture) -> Config:
    """`config` with sizes that the base can be asked for, so that the rest of a plan can be made."""
    changes = {f"data.processor.{name}": list(mended) for name, (_, mended) in _uneven(config, base).items()}
    return parse(apply_overrides(config.model_dump(mode="json"), changes)) if changes else config


def _uneven(config: Config, base: Architecture) -> dict[str, tuple[Size, Size]]:
    """Sizes that are no multiples of the base's step, by key, and those next below."""
    processor, step = config.data.processor, base.size_multiple
    exact = {
        "target_size": not processor.enable_bucket,
        "controls_size": processor.controls_resize == "cover",
    }
    sizes = {name: getattr(processor, name) for name, counts in exact.items() if counts}
    return {
        name: (size, (max(step, size[0] // step * step), max(step, size[1] // step * step)))
        for name, size in sizes.items()
        if size is not None and any(side % step for side in size)
    }


def overruled(config: Config, listed: Manifest) -> list[UserError]:
    """Keys of config.yaml that can change nothing, since the dataset file says another value for every source."""
    keys = (
        ("data.processor", config.data.processor, "target_size", "resolution"),
        ("data.processor", config.data.processor, "enable_bucket", "enable_bucket"),
        ("data.processor", config.data.processor, "bucket_no_upscale", "bucket_no_upscale"),
        ("data", config.data, "batch_size", "batch_size"),
    )
    problems = []
    for section, values, name, stated in keys:
        said = {getattr(source.settings, stated) for source in listed.sources}
        mine = getattr(values, name)
        if name in values.model_fields_set and None not in said and said != {mine}:
            told = ", ".join(str(list(v) if isinstance(v, tuple) else v) for v in sorted(said, key=str))
            problems.append(
                UserError(
                    f"{section}.{name} is {list(mine) if isinstance(mine, tuple) else mine} in config.yaml, but "
                    f"the dataset file says {told} for every dataset, and its word counts",
                    remedy=f"take {section}.{name} out of config.yaml, or {stated} out of the dataset file",
                )
            )
    return problems


def _control_problems(listed: Manifest, base: Architecture) -> list[UserError]:
    many = [sample for sample in listed.samples if len(sample.controls) > base.family.max_controls]
    if not many:
        return []
    return [
        UserError(
            f"{len(many)} samples have more controls than {base.family.name} takes "
            f"({base.family.max_controls}), first {many[0].id} with {len(many[0].controls)}",
            remedy="remove the surplus controls, or choose an Edit-Plus base (2509, 2511)",
        )
    ]


def _disk_problems(needed: float, free: float) -> list[UserError]:
    if needed + SPARE_DISK_GIB <= free:
        return []
    message = (
        f"{needed:.1f} GiB of disk are needed and {SPARE_DISK_GIB:.0f} GiB to spare, {free:.1f} GiB are free"
    )
    return [UserError(message, remedy="free disk space, or set train.checkpoints_total_limit")]


def _memory_problems(
    config: Config,
    listed: Manifest,
    base: Architecture,
    found: Budget,
    phases: Mapping[str, Phase],
    quantized: Mapping[str, Made] | None,
) -> list[UserError]:
    over = [name for name, phase in phases.items() if phase.peak_gib > found.gib]
    if not over:
        return []
    worst = max(over, key=lambda name: phases[name].peak_gib)
    phase = phases[worst]
    message = (
        f"{' and '.join(over)} would not fit: {worst} peaks at {phase.peak_gib:.1f} GiB, "
        f"{found.gib:.1f} GiB may be filled ({found.source}); the largest part is {phase.largest} with "
        f"{phase.components_gib[phase.largest]:.1f} GiB"
    )
    return [UserError(message, remedy=_mend(config, listed, base, found, quantized))]


def _mend(
    config: Config,
    listed: Manifest,
    base: Architecture,
    found: Budget,
    quantized: Mapping[str, Made] | None,
) -> str:
    """The mildest changes of the config after which everything fits."""

    def fits(changes: Mapping[str, Any]) -> bool:
        tried = parse(apply_overrides(document, changes))
        chosen = settings(tried, base, choose(tried, listed, base, found, quantized))
        phases = estimate.phases(base, chosen, work.largest(tried, listed, base))
        return all(phase.peak_gib <= found.gib for phase in phases.values())

    step, size = base.size_multiple, config.data.processor.target_size
    smaller = [max(step, round(side * 2 / 3) // step * step) for side in size]
    ladder: list[tuple[str, Any]] = [
        ("train.gradient_checkpointing", True),
        ("data.batch_size", 1),
        ("model.quantize", "nf4"),
        ("train.mixed_precision", "bf16"),
        ("cache.devices.text_encoder", "cpu"),
        ("model.quantize_text_encoder", "nf4"),
        ("data.processor.target_size", smaller),
    ]
    document = config.model_dump(mode="json")
    changes: dict[str, Any] = {}
    for key, value in ladder:
        if _at(document, key) == value:
            continue
        changes[key] = value
        if fits(changes):
            needed = _needed(changes, fits)
            return (
                "set "
                + ", ".join(f"{name}: {str(v).lower()}" for name, v in needed.items())
                + " in config.yaml"
            )
    return f"no setting makes it fit into {found.gib:.1f} GiB: train on a machine with more memory"


def _needed(changes: Mapping[str, Any], fits: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any]:
    """`changes` without those that the fit doesn't depend on."""
    needed = dict(changes)
    for key in changes:
        fewer = {name: value for name, value in needed.items() if name != key}
        if fits(fewer):
            needed = fewer
    return needed


def _at(document: Mapping[str, Any], dotted: str) -> Any:
    value: Any = document
    for name in dotted.split("."):
        value = value[name]
    return value
