"""What stands in a plan's way, and the mildest change of the config that mends it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from runtime.config.load import apply_overrides, parse
from runtime.config.model import Config
from runtime.data.manifest import Sample
from runtime.errors import UserError
from runtime.memory import estimate
from runtime.memory.architecture import Architecture
from runtime.memory.budget import Budget
from runtime.memory.choices import choose, largest_work, settings
from runtime.memory.estimate import Phase
from runtime.memory.made import Made

SPARE_DISK_GIB = 1.0


def find_problems(
    config: Config,
    samples: Sequence[Sample],
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
        *_size_problems(config, base),
        *_control_problems(samples, base),
        *_memory_problems(config, samples, base, found, phases, quantized),
        *_disk_problems(disk_needed_gib, disk_free_gib),
    )


def _size_problems(config: Config, base: Architecture) -> list[UserError]:
    processor = config.data.processor
    sizes = {"target_size": processor.target_size, "controls_size": processor.controls_size}
    step = base.size_multiple
    problems = []
    for name, size in sizes.items():
        if size is not None and any(side % step for side in size):
            rounded = [max(step, side // step * step) for side in size]
            message = f"data.processor.{name} is {list(size)}, expected multiples of {step}"
            problems.append(UserError(message, remedy=f"set data.processor.{name}: {rounded} in config.yaml"))
    return problems


def _control_problems(samples: Sequence[Sample], base: Architecture) -> list[UserError]:
    many = [sample for sample in samples if len(sample.controls) > base.family.max_controls]
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
    samples: Sequence[Sample],
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
    return [UserError(message, remedy=_mend(config, samples, base, found, quantized))]


def _mend(
    config: Config,
    samples: Sequence[Sample],
    base: Architecture,
    found: Budget,
    quantized: Mapping[str, Made] | None,
) -> str:
    """The mildest changes of the config after which everything fits."""

    def fits(changes: Mapping[str, Any]) -> bool:
        tried = parse(apply_overrides(document, changes))
        chosen = settings(tried, base, choose(tried, samples, base, found, quantized))
        phases = estimate.phases(base, chosen, largest_work(tried, samples, base))
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
