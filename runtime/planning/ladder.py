"""The mildest changes of a config after which it fits: tried in the order of what each costs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from runtime.config.learning import Checkpointing
from runtime.config.load import apply_overrides, parse
from runtime.config.model import Config
from runtime.data.manifest import Manifest
from runtime.planning import techniques
from runtime.planning.activations import step_units
from runtime.planning.architecture import Architecture
from runtime.planning.budget import Budget
from runtime.planning.choice import Case
from runtime.planning.choices import choose_for
from runtime.quantize.made import Made

Changes = dict[str, Any]
"""By dotted key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    key: str
    value: Any
    cost: str
    free: bool = False
    """Of time worth speaking of."""


def mend(
    config: Config,
    listed: Manifest,
    base: Architecture,
    found: Budget,
    quantized: Mapping[str, Made],
    *,
    free: bool = False,
) -> list[Rung] | None:
    """What has to be set, nothing where it fits as it is, None where no setting makes it fit.

    `free`: only what costs no time worth speaking of, and no block may be streamed.
    """
    document = apply_overrides(config.model_dump(mode="json"), {"train.streamed_blocks": 0} if free else {})

    def fits(changes: Changes) -> bool:
        case = Case.of(parse(apply_overrides(document, changes)), listed, base, found, quantized)
        return case.spare_gib(choose_for(case, quantized)) >= 0

    taken: list[Rung] = []
    if fits({}):
        return []
    for rung in rungs(config, listed, base, found):
        if at(document, rung.key) == rung.value or (free and not rung.free):
            continue
        taken.append(rung)
        if fits(_changes(taken)):
            return _needed(taken, fits)
    return None


def _changes(taken: Sequence[Rung]) -> Changes:
    """Of several rungs with one key the last counts."""
    return {rung.key: rung.value for rung in taken}


def recommended(
    config: Config, listed: Manifest, base: Architecture, found: Budget, quantized: Mapping[str, Made]
) -> list[Rung] | None:
    """As `mend`, but blocks are streamed only where nothing cheaper helps."""
    cheap = mend(config, listed, base, found, quantized, free=True)
    return cheap if cheap is not None else mend(config, listed, base, found, quantized)


def _needed(taken: Sequence[Rung], fits: Callable[[Changes], bool]) -> list[Rung]:
    """Without keys that the fit doesn't depend on, and of each other key the mildest rung that still does."""
    needed = {rung.key: rung for rung in taken}
    for key in dict.fromkeys(rung.key for rung in taken):
        others = [rung for name, rung in needed.items() if name != key]
        if fits(_changes(others)):
            del needed[key]
            continue
        needed[key] = next(rung for rung in taken if rung.key == key and fits(_changes([*others, rung])))
    return list(needed.values())


def rungs(config: Config, listed: Manifest, base: Architecture, found: Budget) -> list[Rung]:
    """From what costs nothing to what costs quality. What is `auto` already is not asked to be."""
    case = Case.of(config, listed, base, found)
    steps: list[Rung] = []
    if not case.touched():
        steps.append(Rung(key="train.cached_modulation", value=True, cost="a table on disk", free=True))
    steps += [
        Rung(key="model.quantize", value="nf4", cost="weights in NF4", free=True),
        *_checkpointing(case),
        Rung(key="train.mixed_precision", value="bf16", cost="bf16 activations"),
        Rung(key="model.quantize_text_encoder", value="nf4", cost="after finetune quantize", free=True),
        Rung(key="cache.devices.text_encoder", value="cpu", cost="a slow cache phase"),
        Rung(key="cache.vae", value="folded", cost="equal to rounding", free=True),
    ]
    if config.train.streamed_blocks != "auto":
        steps.append(Rung(key="train.streamed_blocks", value="auto", cost="each step copies blocks"))
    size, least = config.data.processor.target_size, base.size_multiple
    steps.append(Rung(key="data.batch_size", value=1, cost="accumulate for larger batches"))
    smaller = [max(least, round(side * 2 / 3) // least * least) for side in size]
    steps.append(Rung(key="data.processor.target_size", value=smaller, cost="less detail"))
    return steps


def _checkpointing(case: Case) -> list[Rung]:
    """The modes that take less than the configured one, the fastest first; of groups, the size that takes least."""
    layers, made = case.base.denoiser.layers, case.settings({})

    def units(mode: Checkpointing) -> float:
        return step_units(layers, replace(made, checkpointing=mode), case.largest.batch_size)

    told: dict[Checkpointing, str] = {
        "selective": "blocks are made again, but for their attention",
        True: "blocks are made again",
        min(range(2, max(3, layers + 1)), key=units): "blocks are made again, several at once",
    }
    if techniques.keeps_no_attention(case):
        del told["selective"]
    now = units(case.least_checkpointing())
    return [
        Rung(
            key="train.gradient_checkpointing",
            value=mode,
            cost=cost,
            free=mode is not True and mode != "selective",
        )
        for mode, cost in told.items()
        if units(mode) < now
    ]


def at(document: Mapping[str, Any], dotted: str) -> Any:
    value: Any = document
    for name in dotted.split("."):
        value = value[name]
    return value
