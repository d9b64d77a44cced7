"""Which of the techniques that save memory or time an `auto` takes, and why.

In the order of their cost: a table of modulations costs nothing, blocks are streamed only where it has to be, and
what makes a step faster is taken where memory is left for it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from runtime.planning import activations
from runtime.planning.choice import Case, Choice, given

GRAPHS_MAX_TOKENS = (
    4096  # up to there launching kernels takes most of a step's time (H200); beyond, computing
)
COMPILED_FROM = 1e9  # parameters; compiling takes 30 to 60 s on an H200 whatever the size
MOST_AT_ONCE = 8  # samples that an encoder takes


def choose(case: Case, choices: Mapping[str, Choice]) -> dict[str, Choice]:
    """`choices` are those that the rest of a plan has made already."""
    made = dict(choices)
    rules = {
        "cached_modulation": cached_modulation,
        "streamed_blocks": streamed_blocks,
        "compile": compiled,
        "graphs": graphs,
        "gradient_checkpointing": gradient_checkpointing,
    }
    for name, rule in rules.items():
        configured = given(getattr(case.config.train, name))
        made[f"train.{name}"] = _within(case, name, configured) or rule(case, made)
    return {f"train.{name}": made[f"train.{name}"] for name in rules}


def _within(case: Case, name: str, configured: Choice | None) -> Choice | None:
    """No more blocks are streamed than there are."""
    layers = case.base.denoiser.layers
    if name != "streamed_blocks" or configured is None or configured.value <= layers:
        return configured
    return Choice(value=layers, reason=f"as configured, {configured.value}; there are {layers}")


def cached_modulation(case: Case, choices: Mapping[str, Choice]) -> Choice:
    touched = case.touched()
    if touched:
        return _off(f"the adapter touches {touched[0]}, so it can't be known ahead")
    saved = _saved_gib(case, choices)
    if case.found.device != "cpu":
        return Choice(value=True, reason=f"auto: {saved:.2f} GiB of weights need not be resident")
    if case.spare_gib(choices, "fit", cached_modulation=False) >= 0:
        return _off("on a CPU, where the fit fits without")
    return Choice(
        value=True, reason=f"auto: the fit would not fit; {saved:.2f} GiB of weights need not be resident"
    )


def _saved_gib(case: Case, choices: Mapping[str, Choice]) -> float:
    sizes = [
        case.phases(choices, cached_modulation=on)["fit"].components_gib["denoiser"] for on in (False, True)
    ]
    return sizes[0] - sizes[1]


def streamed_blocks(case: Case, choices: Mapping[str, Choice]) -> Choice:
    """The fewest with which fit and validation fit."""
    none = Choice(value=0, reason="auto: all blocks fit")
    if case.found.device == "cpu":
        return Choice(value=0, reason="auto: a CPU has no other memory to keep them in")

    faster = [name for name in ("compile", "graphs") if getattr(case.config.train, name) is True]
    if faster:
        return Choice(value=0, reason=f"auto: train.{faster[0]} is true, and streamed blocks run eagerly")

    def spare(count: int) -> float:
        return case.spare_gib(choices, "fit", "validate", streamed_blocks=count)

    if spare(0) >= 0:
        return none
    layers = case.base.denoiser.layers
    count = next((count for count in range(2, layers + 1) if spare(count) >= 0), None)
    if count is None:
        return Choice(value=0, reason=f"auto: not even with all {layers} blocks streamed it would fit")
    return Choice(value=count, reason=f"auto: {-spare(0):.1f} GiB too much without; each step copies them")


def compiled(case: Case, choices: Mapping[str, Choice]) -> Choice:
    if case.found.device == "cpu":
        return _off("on a CPU compiling takes longer than it saves")
    if case.config.train.deterministic:
        return _off("train.deterministic asks for the same bits each time")
    if choices["train.streamed_blocks"].value:
        return _off("blocks are streamed")
    if case.base.denoiser.parameters < COMPILED_FROM:
        return _off("so small a base has trained before it is compiled")
    probe = (case.found.probes or {}).get("compile")
    if probe is None:
        return _off("not known to work on this device (finetune adapt)")
    if probe["status"] != "ok":
        return _off(f"step 05: probe compile {probe['status']}: {probe['reason']}")
    return Choice(value=True, reason="auto: step 05: the compiler works here")


def graphs(case: Case, choices: Mapping[str, Choice]) -> Choice:
    refusals = {
        f"{case.found.device} has no recorded steps": not case.found.graphs,
        "train.deterministic asks for the same bits each time": case.config.train.deterministic,
        "model.lora.lora_dropout draws anew at each step": case.config.model.lora.lora_dropout > 0,
        "blocks are streamed": choices["train.streamed_blocks"].value > 0,
        "the base makes a list of its control tokens in each forward": case.base.denoiser.control_rows,
        f"with {case.largest.tokens} tokens a step computes longer than it launches": case.largest.tokens
        > GRAPHS_MAX_TOKENS,
    }
    for reason in (reason for reason, applies in refusals.items() if applies):
        return _off(reason)
    spare = case.spare_gib(choices, "fit", graphs=True)
    if spare < 0:
        return _off(f"its own memory would be {-spare:.1f} GiB too much")
    return Choice(value=True, reason="auto: small steps, whose kernels take longer to launch than to run")


def gradient_checkpointing(case: Case, choices: Mapping[str, Choice]) -> Choice:
    """The fastest that fits. Compiled blocks are counted as eager ones, of which they keep four fifths."""
    every = Choice(value=True, reason="auto: least memory for a third more computing")
    if choices["train.streamed_blocks"].value:
        return replace(every, reason="auto: blocks are streamed, and go when they have computed")
    modes: dict[Literal["selective"] | bool, str] = {False: "nothing is computed twice"}
    if choices["train.compile"].value and not keeps_no_attention(case):
        modes["selective"] = "all but attention is computed twice"  # eager it gains nothing
    for mode, told in modes.items():
        spare = case.spare_gib(choices, "fit", checkpointing=mode)
        if spare >= 0:
            return Choice(value=mode, reason=f"auto: {told}, and {spare:.1f} GiB stay free")
    written = str(mode).lower()
    return replace(every, reason=f"auto: with {written} the fit would take {-spare:.1f} GiB too much")


def encoded_at_once(case: Case, choices: Mapping[str, Choice]) -> Choice:
    """As many samples as fit, doubled up to MOST_AT_ONCE: more fill no device better, and cost more by a kill."""
    if case.found.device == "cpu":
        return Choice(value=1, reason="auto: a CPU gains nothing by more")
    best = 1
    while best < MOST_AT_ONCE and case.spare_gib(choices, "cache", encoded_at_once=2 * best) >= 0:
        best *= 2
    if best == 1:
        return Choice(value=1, reason=f"auto: two at once would not fit into {case.found.gib:.1f} GiB")
    peak = case.phases(choices, encoded_at_once=best)["cache"].needed_gib
    return Choice(value=best, reason=f"auto: the cache phase takes {peak:.1f} of {case.found.gib:.1f} GiB")


def _off(why: str) -> Choice:
    return Choice(value=False, reason=f"auto: {why}")


def keeps_no_attention(case: Case) -> bool:
    """Whether `selective` has no operator of attention whose outputs it could keep."""
    return activations.is_plain(case.settings({}), case.largest.batch_size)


def notes(case: Case) -> tuple[str, ...]:
    """What config.yaml asks for and does not get here, a line each."""
    if case.config.train.gradient_checkpointing != "selective" or not keeps_no_attention(case):
        return ()
    why = "step 05 found plain attention only"
    if case.attention() == "unmasked":
        cause = "train.deterministic leaves" if case.config.train.deterministic else "step 05 found"
        why = f"{cause} plain attention only for the mask of a batch"
    return (
        f"train.gradient_checkpointing: selective keeps no more than true: {why}, which is no operator of its own",
    )


def refused(case: Case) -> tuple[str, str] | None:
    """Message and remedy where config.yaml asks for techniques that can't do what they are there for."""
    touched: list[Any] = case.touched()
    train = case.config.train
    if train.cached_modulation is True and touched:
        return (
            f"train.cached_modulation is true, but {len(touched)} modulations have an adapter, first {touched[0]}: "
            "what they say changes as it learns",
            "set train.cached_modulation: auto, or leave modulation out of model.lora.target_modules",
        )
    if train.streamed_blocks not in ("auto", 0) and train.gradient_checkpointing is False:
        return (
            f"train.streamed_blocks is {train.streamed_blocks}, but without train.gradient_checkpointing each copy "
            "stays until the backward pass, and nothing is saved",
            "set train.gradient_checkpointing: true in config.yaml",
        )
    return None
