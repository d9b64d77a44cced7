"""What stands in a plan's way, and the mildest change of the config that mends it."""

from collections.abc import Mapping

from runtime.config.load import apply_overrides, parse
from runtime.config.model import Config
from runtime.data.manifest import Manifest
from runtime.data.sample import Size
from runtime.errors import UserError
from runtime.planning import ladder, techniques
from runtime.planning.architecture import Architecture
from runtime.planning.choice import Case
from runtime.planning.estimate import Phase
from runtime.quantize.made import Made

SPARE_DISK_GIB = 1.0


def find_problems(
    config: Config,
    listed: Manifest,
    case: Case,
    phases: Mapping[str, Phase],
    quantized: Mapping[str, Made],
    *,
    disk_needed_gib: float,
    disk_free_gib: float,
) -> tuple[UserError, ...]:
    """Why the run would fail as configured; empty when nothing is known to be in its way.

    `case` is that of `config` with sizes that the base can be asked for.
    """
    return (
        *overruled(config, listed),
        *_size_problems(config, case.base),
        *_control_problems(listed, case.base),
        *_technique_problems(case),
        *_memory_problems(case, listed, phases, quantized),
        *_disk_problems(disk_needed_gib, disk_free_gib),
    )


def _technique_problems(case: Case) -> list[UserError]:
    refused = techniques.refused(case)
    return [] if refused is None else [UserError(refused[0], remedy=refused[1])]


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
    case: Case, listed: Manifest, phases: Mapping[str, Phase], quantized: Mapping[str, Made]
) -> list[UserError]:
    spare = {name: case.found.spare_gib(phase) for name, phase in phases.items()}
    over = [name for name in spare if spare[name] < 0]
    if not over:
        return []
    worst = min(over, key=spare.__getitem__)
    phase = phases[worst]
    message = (
        f"{' and '.join(over)} would not fit: {worst} {_needs(case, phase)}; the largest part is {phase.largest} "
        f"with {phase.components_gib[phase.largest]:.1f} GiB"
    )
    return [UserError(message, remedy=_remedy(case, listed, quantized))]


def _needs(case: Case, phase: Phase) -> str:
    """Against the limit that it breaks."""
    found = case.found
    if phase.needed_gib > found.gib:
        reserve = f" and reserves {phase.reserve_gib:.1f}" if phase.reserve_gib else ""
        return (
            f"peaks at {phase.peak_gib:.1f} GiB{reserve}, {found.gib:.1f} GiB may be filled ({found.source})"
        )
    beside = f"takes {phase.host_peak_gib:.1f} GiB of the host's RAM"
    if found.unified:
        beside += f" beside {phase.needed_gib:.1f} GiB on the device, which are the same memory"
    return f"{beside}, {found.host_gib:.1f} GiB of it may be filled"


def _remedy(case: Case, listed: Manifest, quantized: Mapping[str, Made]) -> str:
    rungs = ladder.mend(case.config, listed, case.base, case.found, quantized)
    if rungs is None:
        return f"no setting makes it fit into {case.found.gib:.1f} GiB: train on a machine with more memory"
    return "set " + ", ".join(f"{rung.key}: {str(rung.value).lower()}" for rung in rungs) + " in config.yaml"
