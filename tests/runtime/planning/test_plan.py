import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runtime import files
from runtime.commands.dataset import scan
from runtime.config.load import Loaded, apply_overrides, parse
from runtime.data import manifest
from runtime.errors import DataError, UserError
from runtime.planning import architecture, choices, plan
from runtime.planning.budget import Budget
from runtime.planning.choice import Case
from runtime.planning.plan import Plan
from runtime.quantize.made import Made
from runtime.workspace import Workspace

SCHEMAS = Path(__file__).parents[3] / "schemas"
TINY = {
    "model": {"pretrained_model_name_or_path": "base"},
    "train": {"max_train_steps": 10},
    "data": {"processor": {"target_size": [64, 64]}},
}


def budget(gib: float = 100.0, device: str = "cpu") -> Budget:
    return Budget(device=device, reason="because", gib=gib, source="a test", host_gib=500.0)


@pytest.fixture
def draw(make_model: Any, make_dataset: Any, read_dataset: Any) -> Any:
    """Draws a plan of `overrides` over TINY; twelve pairs, three held out."""

    def make(
        overrides: dict[str, Any] | None = None,
        found: Budget | None = None,
        *,
        controls: int = 1,
        disk: float = 500.0,
        **model: Any,
    ) -> Plan:
        raw = apply_overrides(TINY, overrides or {})
        listed = read_dataset(make_dataset(controls=controls))
        return plan.draw(
            Loaded(raw=raw, digest=files.document_digest(raw), config=parse(raw)),
            listed,
            architecture.read(make_model(**model)),
            found or budget(),
            disk_free_gib=disk,
        )

    return make


def test_json_is_that_of_the_schema(draw: Any) -> None:
    document = draw().to_json()
    schema = json.loads((SCHEMAS / "evidence.schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(document, {**schema["$defs"]["04-plan"], "$defs": schema["$defs"]})
    json.dumps(document, allow_nan=False)
    assert document["size_multiple"] == 16 and document["family"] == "qwen-image-edit"


@pytest.mark.parametrize(
    ("overrides", "planned", "per_epoch", "epochs", "checkpoints"),
    [
        ({}, 10, 9, 1.111, 1),
        ({"train.checkpointing_steps": 4}, 10, 9, 1.111, 3),
        ({"train.max_train_steps": None, "train.num_epochs": 2}, 18, 9, 2, 1),
        (
            {"train.max_train_steps": None, "train.num_epochs": 3, "train.gradient_accumulation_steps": 4},
            7,
            3,
            3.111,
            1,
        ),
        ({"data.batch_size": 4}, 10, 3, 3.333, 1),
    ],
)
def test_steps(
    draw: Any, overrides: Any, planned: int, per_epoch: int, epochs: float, checkpoints: int
) -> None:
    steps = draw(overrides).steps
    assert (steps.samples, steps.planned, steps.per_epoch) == (9, planned, per_epoch)
    assert (steps.epochs, steps.checkpoints) == (epochs, checkpoints)


CHOICES = [
    ({}, "cpu", "model.quantize", "none", "fit peaks at"),
    ({}, "xpu", "model.quantize", "nf4", "auto: on xpu"),
    ({"model.quantize": "nf4"}, "cpu", "model.quantize", "nf4", "as configured"),
    ({}, "cpu", "train.mixed_precision", "no", "twice as slow"),
    ({}, "cuda", "train.mixed_precision", "bf16", "auto: cuda"),
    ({"train.mixed_precision": "no"}, "cuda", "train.mixed_precision", "no", "as configured"),
    ({}, "xpu", "optimizer.class_path", "torch.optim.AdamW", "XPU drivers"),
    (
        {"optimizer.class_path": "torch.optim.SGD"},
        "xpu",
        "optimizer.class_path",
        "torch.optim.SGD",
        "as configured",
    ),
    ({}, "xpu", "hardware.device", "xpu", "because"),
    ({}, "xpu", "cache.devices.vae", "xpu", "as hardware.device"),
    ({"cache.devices.text_encoder": "cpu"}, "xpu", "cache.devices.text_encoder", "cpu", "as configured"),
    ({}, "xpu", "cache.dtypes.text_encoder", "bf16", "auto: xpu computes in bf16"),
    ({}, "cpu", "cache.dtypes.vae", "fp32", "auto: on a CPU"),
    ({}, "cpu", "data.processor.vl_pixels", 1024 * 1024, "published"),
    ({"data.processor.vl_pixels": 4096}, "cpu", "data.processor.vl_pixels", 4096, "as configured"),
]


@pytest.mark.parametrize(("overrides", "device", "key", "value", "reason"), CHOICES)
def test_choice_has_its_value_and_reason(
    draw: Any, overrides: dict[str, Any], device: str, key: str, value: Any, reason: str
) -> None:
    choice = draw(overrides, budget(device=device)).choices[key]
    assert choice.value == value
    assert reason in choice.reason


@pytest.mark.parametrize(("gib", "value"), [(200.0, "none"), (60.0, "nf4")])
def test_quantize_on_a_cpu_is_decided_by_what_fits(draw: Any, gib: float, value: str) -> None:
    choice = draw({}, budget(gib), real=True).choices["model.quantize"]
    assert choice.value == value
    assert f"{gib:.1f} GiB may be filled" in choice.reason


@pytest.mark.parametrize(("gib", "value"), [(32.0, "xpu"), (14.8, "cpu")])
def test_text_encoder_that_does_not_fit_goes_to_the_cpu(draw: Any, gib: float, value: str) -> None:
    """Lunar Lake with 32 GiB offers 16.48 GiB: too little for 15.4 GiB of text encoder."""
    drawn = draw({"data.processor.target_size": [384, 672]}, budget(gib, "xpu"), real=True)
    choice = drawn.choices["cache.devices.text_encoder"]
    assert choice.value == value
    assert ("text_encoder" in drawn.phases["cache"].components_gib) is (value == "xpu")
    assert drawn.problems == ()


@pytest.mark.parametrize(
    ("overrides", "phase", "grows"),
    [
        ({"data.processor.target_size": [128, 128]}, "fit", True),
        ({"data.processor.target_size": [128, 128]}, "cache", True),
        ({"data.processor.controls_size": [128, 128]}, "fit", True),
        ({"data.processor.controls_size": [512, 512], "data.processor.vl_pixels": 784}, "validate", True),
        ({"data.batch_size": 3}, "fit", True),
        ({"model.lora.r": 64}, "fit", True),
        ({"model.lora.target_modules": ["to_q"]}, "fit", False),
        ({"train.gradient_checkpointing": False}, "fit", True),
        ({"train.gradient_checkpointing": "auto"}, "fit", True),
        ({"train.mixed_precision": "bf16"}, "fit", False),
    ],
)
def test_configured_value_reaches_the_plan(
    draw: Any, read_dataset: Any, overrides: Any, phase: str, grows: bool, tmp_path: Path
) -> None:
    after = draw(overrides)
    raw = apply_overrides(TINY, {})
    before = plan.draw(
        Loaded(raw=raw, digest="0" * 64, config=parse(raw)),
        read_dataset(tmp_path / "pairs"),
        architecture.read(tmp_path / "base"),
        budget(),
        disk_free_gib=500,
    )
    difference = after.phases[phase].peak_gib - before.phases[phase].peak_gib
    assert difference > 0 if grows else difference < 0


@pytest.mark.parametrize("overrides", [{"data.caption_dropout_rate": 0.1}, {"train.checkpointing_steps": 1}])
def test_disk_grows_with_what_is_kept(
    draw: Any, read_dataset: Any, overrides: dict[str, Any], tmp_path: Path
) -> None:
    after = draw(overrides)
    limited = apply_overrides(
        TINY, {**overrides, "train.checkpoints_total_limit": 1, "data.caption_dropout_rate": 0.0}
    )
    before = plan.draw(
        Loaded(raw=limited, digest="0" * 64, config=parse(limited)),
        read_dataset(tmp_path / "pairs"),
        architecture.read(tmp_path / "base"),
        budget(),
        disk_free_gib=500,
    )
    assert after.disk_needed_gib > before.disk_needed_gib


def test_good_plan_has_no_problem_and_a_margin(draw: Any) -> None:
    drawn = draw()
    assert drawn.problems == ()
    assert drawn.margin_gib == pytest.approx(100 - max(p.peak_gib for p in drawn.phases.values()))


PROBLEMS = [
    (
        {"data.processor.target_size": [60, 64]},
        {},
        "target_size is [60, 64], expected multiples of 16",
        "[48, 64]",
    ),
    ({"data.processor.controls_size": [64, 8]}, {}, "controls_size is [64, 8]", "[64, 16]"),
    ({}, {"controls": 2}, "12 samples have more controls", "Edit-Plus"),
    ({}, {"disk": 0.5}, "0.5 GiB are free", "free disk space"),
    ({}, {"found": budget(0.5)}, "would not fit", "no setting makes it fit"),
]


@pytest.mark.parametrize(("overrides", "given", "message", "remedy"), PROBLEMS)
def test_problem_is_named_with_its_remedy(
    draw: Any, overrides: dict[str, Any], given: dict[str, Any], message: str, remedy: str
) -> None:
    found = draw(overrides, **given).problems
    assert len(found) == 1
    assert message in found[0].message
    assert remedy in found[0].remedy


def test_edit_plus_takes_several_controls(draw: Any) -> None:
    assert draw(controls=3, family="qwen-image-edit-plus").problems == ()


WHOLE = {"train.streamed_blocks": 0}
MENDS = [
    ({**WHOLE, "model.quantize": "none"}, 28.0, "model.quantize: nf4"),
    ({**WHOLE, "train.gradient_checkpointing": False}, 22.0, "train.gradient_checkpointing: selective"),
    ({**WHOLE, "train.gradient_checkpointing": False}, 10.5, "train.gradient_checkpointing: true"),
    ({**WHOLE, "train.cached_modulation": False}, 11.0, "train.cached_modulation: true"),
    (
        {**WHOLE, "data.processor.target_size": [1024, 1024], "data.processor.controls_size": [1024, 1024]},
        13.5,
        "train.gradient_checkpointing: 2",
    ),
    ({"data.processor.target_size": [1024, 1024]}, 5.0, "data.processor.target_size: [672, 672]"),
    ({"data.batch_size": 6}, 4.5, "data.batch_size: 1"),
    (
        {**WHOLE, "data.processor.target_size": [1024, 1024]},
        8.0,
        "train.streamed_blocks: auto",
    ),
    (
        {
            "train.gradient_checkpointing": False,
            "train.streamed_blocks": 0,
            "cache.devices.text_encoder": "xpu",
        },
        12.0,
        "train.gradient_checkpointing: selective, model.quantize_text_encoder: nf4",
    ),
    (
        {
            "cache.devices.text_encoder": "cpu",
            "cache.batch_size": 8,
            "data.processor.target_size": [1024, 1024],
        },
        14.5,
        "cache.vae: folded",
    ),
]


@pytest.mark.parametrize(("overrides", "gib", "remedy"), MENDS)
def test_mildest_change_that_fits_is_named(
    draw: Any, overrides: dict[str, Any], gib: float, remedy: str
) -> None:
    published = {"data.processor.target_size": [384, 672], **overrides}
    drawn = draw(published, budget(gib, "xpu"), real=True)
    assert [problem.remedy for problem in drawn.problems] == [f"set {remedy} in config.yaml"]


def test_workspace_plan_and_choices_agree(workspace: Workspace) -> None:
    scan(workspace)
    raw = apply_overrides(
        TINY, {"model.pretrained_model_name_or_path": "external:model", "hardware.device": "cpu"}
    )
    loaded = Loaded(raw=raw, digest=files.document_digest(raw), config=parse(raw))
    made = plan.make_plan(workspace, loaded)
    assert made.choices == plan.resolve_choices(workspace, loaded.config)
    assert made.config_digest == loaded.digest
    assert made.dataset_digest == manifest.load(workspace).dataset_digest
    assert made.device == "cpu" and made.choices["hardware.device"].reason == "as configured"


def test_unscanned_dataset_is_refused(workspace: Workspace) -> None:
    raw = apply_overrides(TINY, {"hardware.device": "cpu"})
    loaded = Loaded(raw=raw, digest="0" * 64, config=parse(raw))
    for make in (
        lambda: plan.make_plan(workspace, loaded),
        lambda: plan.resolve_choices(workspace, loaded.config),
    ):
        with pytest.raises(DataError) as caught:
            make()
        assert caught.value.remedy == "finetune dataset"


@pytest.mark.parametrize("reference", ["nowhere", "external:nobody"])
def test_absent_base_is_refused(workspace: Workspace, reference: str) -> None:
    with pytest.raises(UserError) as caught:
        plan.locate_model(workspace, reference)
    assert reference.removeprefix("external:") in caught.value.message


def made_of(component: str, usable: bool = True) -> dict[str, Made]:
    reason = "step 06 made it" if usable else "it was made of another base"
    return {component: Made(component=component, folder=Path(component), usable=usable, reason=reason)}


@pytest.mark.parametrize(
    ("device", "quantized", "key", "value", "reason"),
    [
        ("cpu", made_of("transformer"), "model.quantize", "nf4", "auto: step 06 made it"),
        ("xpu", made_of("transformer"), "model.quantize", "nf4", "auto: step 06 made it"),
        (
            "cpu",
            made_of("transformer", False),
            "model.quantize",
            "none",
            "; it was made of another base and is not",
        ),
        (
            "xpu",
            made_of("transformer", False),
            "model.quantize",
            "nf4",
            "; it was made of another base and is not",
        ),
        ("cpu", made_of("text_encoder"), "model.quantize_text_encoder", "nf4", "auto: step 06 made it"),
        (
            "cpu",
            made_of("text_encoder", False),
            "model.quantize_text_encoder",
            "none",
            "made of another base",
        ),
        ("cpu", {}, "model.quantize_text_encoder", "none", "step 06 made no NF4 text encoder"),
    ],
)
def test_what_step_06_made_decides_auto(
    make_model: Any,
    make_dataset: Any,
    read_dataset: Any,
    device: str,
    quantized: Any,
    key: str,
    value: str,
    reason: str,
) -> None:
    listed = read_dataset(make_dataset())
    found = budget(device=device)
    choice = choices.choose(parse(TINY), listed, architecture.read(make_model()), found, quantized)[key]
    assert choice.value == value and reason in choice.reason


def test_what_step_06_kept_plain_is_counted_else_what_the_config_keeps(
    make_model: Any, make_dataset: Any, read_dataset: Any
) -> None:
    listed, base = read_dataset(make_dataset()), architecture.read(make_model())
    config = parse({**TINY, "model": {**TINY["model"], "nf4_keep": ["*.0.attn.to_?"]}})
    names = {"transformer": "transformer_blocks.1.img_mod.1", "text_encoder": "model.layers.0.mlp.up_proj"}
    made = {part: replace(made_of(part)[part], kept=(name,)) for part, name in names.items()}
    unusable = {part: replace(item, usable=False) for part, item in made.items()}

    def kept(quantized: Any) -> tuple[frozenset[str], frozenset[str]]:
        case = Case.of(config, listed, base, budget(12.0, "xpu"), quantized)
        settings = case.settings(choices.choose_for(case, quantized))
        return settings.kept, settings.text_encoder_kept

    assert kept(made) == tuple({name} for name in names.values())
    configured = {f"transformer_blocks.0.attn.to_{name}" for name in "qkv"}
    assert kept(unusable) == kept({}) == (configured, frozenset())


def test_an_nf4_text_encoder_fits_where_the_plain_one_has_to_go_to_the_cpu(
    make_model: Any, make_dataset: Any, read_dataset: Any
) -> None:
    listed = read_dataset(make_dataset())
    base = architecture.read(make_model(real=True))
    places = [
        choices.choose(parse(TINY), listed, base, budget(12.0, "xpu"), quantized)[
            "cache.devices.text_encoder"
        ].value
        for quantized in ({}, made_of("text_encoder"))
    ]
    assert places == ["cpu", "xpu"]
