"""What each `auto` of section train becomes, and what a recommended config has to say."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime.config.load import apply_overrides, parse
from runtime.planning import architecture, ladder, techniques
from runtime.planning.architecture import Architecture
from runtime.planning.budget import Budget
from runtime.planning.choice import Case, Choice
from runtime.planning.choices import choose_for
from runtime.planning.machines import MACHINES

RAW = {
    "model": {"pretrained_model_name_or_path": "base"},
    "train": {"max_train_steps": 10},
    "data": {"processor": {"target_size": [384, 672]}},
}
WORKS = {"status": "ok", "reason": "", "facts": {}}
BROKEN = {"status": "failed", "reason": "no compiler", "facts": {}}
EVERYWHERE = {"flash_attention": True, "efficient_attention": True, "math": True}


def budget(gib: float = 100.0, device: str = "cuda", **given: Any) -> Budget:
    return Budget(device=device, reason="x", gib=gib, source="a test", **{"host_gib": 500.0, **given})


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Config changes and a budget to a case of the published base, and to one with two blocks."""
    import sys

    scripts = str(Path(__file__).parents[3] / "benchmarks")
    if scripts not in sys.path:
        sys.path.append(scripts)
    from what_fits import prepare

    from runtime.data import manifest

    root = tmp_path_factory.mktemp("published")
    listed = manifest.load(prepare(root, (384, 672), 1, {}))
    base = architecture.read(root / "base")
    few = replace(base, denoiser=replace(base.denoiser, layers=2))

    def case(changes: dict[str, Any], found: Budget, base: Architecture = base) -> Case:
        return Case.of(parse(apply_overrides(RAW, changes)), listed, base, found)

    case.__dict__.update(few=few, listed=listed, base=base)
    return case


def chosen(case: Case) -> dict[str, Choice]:
    return {key.removeprefix("train."): choice for key, choice in choose_for(case, {}).items()}


CACHED = [
    ({}, budget(), True, "need not be resident"),
    ({}, budget(device="xpu"), True, "3.32 GiB"),
    ({}, budget(device="cpu"), False, "fits without"),
    ({"model.quantize": "none"}, budget(100.0, "cpu"), False, "fits without"),
    ({"model.quantize": "none"}, budget(70.0, "cpu"), True, "would not fit"),
    ({"model.lora.target_modules": "all-linear"}, budget(), False, "transformer_blocks.0.img_mod.1"),
    ({"model.lora.target_modules": ["to_q", "norm_out.linear"]}, budget(), False, "norm_out.linear"),
    (
        {"model.lora.target_modules": ["to_q", "time_text_embed.timestep_embedder.linear_1"]},
        budget(),
        False,
        "time_text_embed",
    ),
    ({"model.lora.target_modules": "attention+mlp"}, budget(), True, "need not"),
    ({"train.cached_modulation": False}, budget(), False, "as configured"),
]


@pytest.mark.parametrize(("changes", "found", "value", "reason"), CACHED)
def test_cached_modulation(
    published: Any, changes: dict[str, Any], found: Budget, value: bool, reason: str
) -> None:
    choice = chosen(published(changes, found))["cached_modulation"]
    assert choice.value is value and reason in choice.reason


@pytest.mark.parametrize(("gib", "least"), [(12.0, 0), (9.5, 1), (8.0, 1), (2.0, 0)])
def test_as_few_blocks_are_streamed_as_fit(published: Any, gib: float, least: int) -> None:
    case = published({}, budget(gib))
    choices = choose_for(case, {})
    count = choices["train.streamed_blocks"].value
    assert (count > 0) is bool(least)
    if count:
        assert case.spare_gib(choices, "fit", "validate") >= 0
        assert case.spare_gib(choices, "fit", "validate", streamed_blocks=count - 1) < 0
    if gib == 2.0:
        assert "not even with all 60" in choices["train.streamed_blocks"].reason


def test_a_cpu_streams_nothing(published: Any) -> None:
    assert chosen(published({}, budget(4.0, "cpu")))["streamed_blocks"].value == 0


def test_streaming_helps_no_memory_that_is_shared(published: Any) -> None:
    """What leaves the device is then in the same RAM."""
    room = chosen(published({}, budget(8.5, host_gib=500.0, unified=True)))["streamed_blocks"]
    none = chosen(published({}, budget(8.5, host_gib=9.0, unified=True)))["streamed_blocks"]
    assert room.value > 0 and none.value == 0


COMPILED = [
    ({}, budget(probes={"compile": WORKS}), True, "compiler works"),
    ({}, budget(probes={"compile": BROKEN}), False, "failed: no compiler"),
    ({}, budget(), False, "finetune adapt"),
    ({"train.deterministic": True}, budget(probes={"compile": WORKS}), False, "deterministic"),
    ({"train.streamed_blocks": 4}, budget(probes={"compile": WORKS}), False, "streamed"),
    ({}, budget(device="cpu", probes={"compile": WORKS}), False, "CPU"),
    ({"train.compile": True}, budget(), True, "as configured"),
]


@pytest.mark.parametrize(("changes", "found", "value", "reason"), COMPILED)
def test_compile(published: Any, changes: dict[str, Any], found: Budget, value: bool, reason: str) -> None:
    choice = chosen(published(changes, found))["compile"]
    assert choice.value is value and reason in choice.reason


RECORDED = [
    ({}, budget(graphs=True), True, "launch"),
    ({}, budget(), False, "no recorded steps"),
    ({"train.deterministic": True}, budget(graphs=True), False, "deterministic"),
    ({"model.lora.lora_dropout": 0.1}, budget(graphs=True), False, "dropout"),
    ({"train.streamed_blocks": 4}, budget(graphs=True), False, "streamed"),
    ({"data.processor.target_size": [1024, 1024]}, budget(graphs=True), False, "tokens"),
    ({"data.batch_size": 2}, budget(graphs=True), False, "tokens"),
    ({}, budget(10.6, graphs=True), False, "too much"),
]


@pytest.mark.parametrize(("changes", "found", "value", "reason"), RECORDED)
def test_graphs(published: Any, changes: dict[str, Any], found: Budget, value: bool, reason: str) -> None:
    choice = chosen(published(changes, found))["graphs"]
    assert choice.value is value and reason in choice.reason


@pytest.mark.parametrize(
    ("device", "facts", "changes", "attention"),
    [
        ("cuda", None, {}, "fused"),
        ("cuda", {}, {}, "fused"),
        ("cuda", EVERYWHERE, {}, "fused"),
        ("cuda", EVERYWHERE, {"train.deterministic": True}, "unmasked"),
        ("xpu", {"overrideable": True, "math": True}, {}, "fused"),
        ("xpu", {"overrideable": False, "math": True}, {}, "math"),
        ("cuda", {"flash_attention": True, "math": True}, {}, "unmasked"),
        ("cpu", {"flash_attention": True, "math": True}, {}, "fused"),
        ("cpu", {"flash_attention": False, "math": True}, {}, "math"),
    ],
)
def test_what_step_05_says_of_attention_counts(
    published: Any, device: str, facts: Any, changes: dict[str, Any], attention: str
) -> None:
    probes = None if facts is None else {"attention-backends": {**WORKS, "facts": facts}}
    case = published(changes, budget(device=device, probes=probes))
    assert case.settings({}).attention == attention
    fused = published(changes, budget(device=device)).phases({}, attention="fused")["fit"].peak_gib
    counted = case.phases({})["fit"].peak_gib - fused
    assert counted == pytest.approx(
        2.5 * 24 * case.largest.tokens**2 * 4 / 2**30 if attention == "math" else 0
    )


MATH = {"attention-backends": {**WORKS, "facts": {"math": True, "flash_attention": False}}}
NO_MASK = {"attention-backends": {**WORKS, "facts": {"math": True, "flash_attention": True}}}
SELECTIVE = {"train.gradient_checkpointing": "selective"}


@pytest.mark.parametrize(
    ("changes", "probes", "told"),
    [
        (SELECTIVE, None, ""),
        (SELECTIVE, MATH, "true: step 05 found plain attention only, which"),
        (SELECTIVE, NO_MASK, ""),
        ({**SELECTIVE, "data.batch_size": 2}, NO_MASK, "step 05 found plain attention only for the mask"),
        ({**SELECTIVE, "data.batch_size": 2, "train.deterministic": True}, None, "true: train.deterministic"),
        ({"train.gradient_checkpointing": True}, MATH, ""),
    ],
)
def test_selective_that_keeps_no_attention_is_told(
    published: Any, changes: dict[str, Any], probes: Any, told: str
) -> None:
    lines = techniques.notes(published(changes, budget(probes=probes)))
    assert len(lines) == bool(told) and all(told in line for line in lines)


@pytest.mark.parametrize(("probes", "mode"), [(None, "selective"), (MATH, True)])
def test_selective_is_proposed_only_where_it_keeps_something(published: Any, probes: Any, mode: Any) -> None:
    config = published({"train.gradient_checkpointing": False}, budget()).config
    rungs = ladder.rungs(config, published.listed, published.base, budget(probes=probes))
    values = [rung.value for rung in rungs if rung.key == "train.gradient_checkpointing"]
    assert values[0] == mode and len(values) == (2 if mode is True else 3)


COMPILES = {"compile": WORKS}


@pytest.mark.parametrize(
    ("changes", "found", "mode", "reason"),
    [
        ({}, budget(), False, "nothing is computed twice"),
        ({}, budget(device="cpu"), False, "stay free"),
        ({}, budget(30.0, "cpu"), True, "GiB too much"),
        ({}, budget(20.0), True, "with false the fit would take"),
        ({}, budget(8.0), True, "blocks are streamed"),
        ({"train.streamed_blocks": 2}, budget(), True, "blocks are streamed"),
        ({}, budget(probes=COMPILES), False, "nothing is computed twice"),
        ({}, budget(16.0, probes=COMPILES), "selective", "all but attention"),
        ({}, budget(10.5, probes=COMPILES), True, "with selective the fit would take"),
        ({}, budget(16.0, probes=COMPILES | MATH), True, "with false the fit would take"),
        ({"train.compile": False}, budget(probes=COMPILES), False, "nothing is computed twice"),
        (SELECTIVE, budget(), "selective", "as configured"),
        ({"train.gradient_checkpointing": 4}, budget(), 4, "as configured"),
    ],
)
def test_the_fastest_checkpointing_that_fits(
    published: Any, changes: dict[str, Any], found: Budget, mode: Any, reason: str
) -> None:
    case = published({"train.gradient_checkpointing": "auto", **changes}, found)
    choices = choose_for(case, {})
    choice = choices["train.gradient_checkpointing"]
    assert (choice.value, type(choice.value)) == (mode, type(mode)) and reason in choice.reason
    if mode is not True:
        assert case.spare_gib(choices, "fit") >= 0


@pytest.mark.parametrize("value", [1, 2, 4, 8])
def test_as_many_samples_are_encoded_at_once_as_fit(published: Any, value: int) -> None:
    asked = {"cache.devices.text_encoder": "cuda"}
    needed = published(asked, budget()).phases({}, encoded_at_once=value)["cache"].needed_gib
    case = published(asked, budget(needed + 1e-6))
    choices = choose_for(case, {})
    assert choices["cache.batch_size"].value == value
    assert case.phases(choices)["cache"].needed_gib == pytest.approx(needed)


def test_a_table_that_the_adapter_would_make_wrong_is_refused(published: Any) -> None:
    asked = {"train.cached_modulation": True, "model.lora.target_modules": "all-linear"}
    refused = techniques.refused(published(asked, budget()))
    assert refused is not None and "120 modulations have an adapter" in refused[0]
    assert techniques.refused(published({"train.cached_modulation": True}, budget())) is None


@pytest.mark.parametrize(
    ("machine", "changes", "needed"),
    [
        ("pc96-raised", {}, {}),
        ("pc16-raised", {}, {"model.quantize_text_encoder": "nf4"}),
        ("card24", {"train.gradient_checkpointing": False}, {"train.gradient_checkpointing": 2}),
    ],
)
def test_what_is_recommended_for_a_machine(
    published: Any, machine: str, changes: dict[str, Any], needed: dict[str, Any]
) -> None:
    config = published(changes, budget()).config
    found = MACHINES[machine].budget()
    rungs = ladder.recommended(config, published.listed, published.base, found, {})
    assert rungs is not None and {rung.key: rung.value for rung in rungs} == needed


def test_a_larger_group_is_preferred_to_streaming(published: Any) -> None:
    """It costs no time: blocks are made again once in either case."""
    large = {"data.processor.controls_size": [1024, 1024], "cache.devices.text_encoder": "cpu"}
    case = published(large, budget())
    needed = {
        mode: case.phases(choose_for(case, {}), checkpointing=mode)["fit"].needed_gib for mode in (True, 2)
    }
    assert needed[True] - needed[2] > 0.1
    found = budget(needed[2] + 1e-6)
    assert choose_for(published(large, found), {})["train.streamed_blocks"].value > 0
    rungs = ladder.recommended(case.config, published.listed, published.base, found, {})
    assert rungs is not None and {rung.key: rung.value for rung in rungs} == {
        "train.gradient_checkpointing": 2
    }
    assert ladder.recommended(case.config, published.listed, published.base, budget(1.0), {}) is None


def test_streaming_without_checkpoints_is_refused_for_it_saves_nothing(published: Any) -> None:
    asked = {"train.streamed_blocks": 8, "train.gradient_checkpointing": False}
    refused = techniques.refused(published(asked, budget()))
    assert refused is not None and "nothing is saved" in refused[0]
    assert techniques.refused(published({**asked, "train.gradient_checkpointing": 4}, budget())) is None


def test_no_more_blocks_are_streamed_than_there_are(published: Any) -> None:
    case = published({"train.streamed_blocks": 900}, budget())
    made = chosen(case)["streamed_blocks"]
    assert made.value == 60 and "900" in made.reason


@pytest.mark.parametrize("faster", ["compile", "graphs"])
def test_auto_streams_nothing_where_steps_are_to_be_compiled_or_recorded(published: Any, faster: str) -> None:
    """Whatever the memory: the two exclude each other, and a plan that does not fit says so."""
    case = published({f"train.{faster}": True}, budget(gib=4.0))
    made = chosen(case)["streamed_blocks"]
    assert made.value == 0 and f"train.{faster} is true" in made.reason
