import json
import string
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime import files
from runtime.config.load import apply_overrides, known_keys, load_config, parse
from runtime.errors import ConfigError

MINIMAL = {"model": {"pretrained_model_name_or_path": "base"}, "train": {"max_train_steps": 5}}
TEXT = "model: {pretrained_model_name_or_path: base}\ntrain:\n  max_train_steps: 5\n"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "config.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def refusal(folder: Path, text: str | bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text))
    assert caught.value.remedy
    return caught.value.message


def test_minimal_config_loads_with_its_digest(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, TEXT))
    assert loaded.raw == MINIMAL
    assert loaded.digest == files.document_digest(MINIMAL)
    assert loaded.config.train.max_train_steps == 5
    assert loaded.config.data.processor.target_size == (384, 672)


@pytest.mark.parametrize(
    "data", [TEXT.encode("utf-8-sig"), TEXT.encode("utf-16"), TEXT.replace("\n", "\r\n").encode()]
)
def test_editors_of_windows_are_read(tmp_path: Path, data: bytes) -> None:
    assert load_config(write(tmp_path, data)).raw == MINIMAL


def test_missing_file_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is missing") as caught:
        load_config(tmp_path / "config.yaml")
    assert caught.value.remedy == "finetune recommend"


TRAPS = [
    ("seed: 1e-4", "1e-4 is read as text", "write 1.0e-4"),
    ("seed: 1E5", "1E5 is read as text", "write 1.0e+5"),
    ("seed: 07", "07 is read as 7", "write 7"),
    ("seed: 010", "010 is read as 8", "write 10"),
    ("seed: 1:30", "base 60", '"1:30"'),
    ("seed: 0x10", "not a plain number", "write its digits"),
    ("seed: 2026-11-30", "read as a date", '"2026-11-30"'),
    ("seed: .nan", "saw .nan", "finite"),
    ("seed: 1.0e+999", "saw 1.0e+999", "finite"),
    ("seed: " + "9" * 5000, "more than 20 digits", ""),
    ("gradient_checkpointing: on", "on is read as true", "write true"),
    ("gradient_checkpointing: No", "No is read as false", "write false"),
    ("seed: 1\n  seed: 2", "given twice", "first on line 4"),
    ("on: 1", "key 'on' is read as bool", ""),
    ("1: 1", "key '1' is read as int", ""),
    ("seed: !!python/object:os.system x", "tag", "not accepted"),
    ("seed: !!int x", "not a plain number", ""),
    ("seed: !!bool x", "expected true or false", ""),
    ("seed: !!binary aGk=", "tag", "not accepted"),
    ("seed: !!set {a, b}", "tag", "not accepted"),
    ('seed: "\\ud800"', "surrogate", ""),
]


@pytest.mark.parametrize(("line", "seen", "instead"), TRAPS)
def test_yaml_trap_is_explained_with_line_and_key(tmp_path: Path, line: str, seen: str, instead: str) -> None:
    message = refusal(tmp_path, TEXT + "  " + line + "\n")
    assert seen in message
    assert instead in message
    assert "line 4" in message or "line 5" in message


def test_quoted_trap_is_text(tmp_path: Path) -> None:
    text = TEXT + 'logging: {tracker_project_name: "1e-4"}\n'
    assert load_config(write(tmp_path, text)).config.logging.tracker_project_name == "1e-4"


SYNTAX = [
    ("a: b\n\tc: d", "tabs can't indent"),
    ("a: [1", "line"),
    ("a: &x 1\nb: *x", "aliases"),
    ("a: &x [*x]", "aliases"),
    ("<<: {a: 1}", "read as merge"),
    ("[" * 1500, "nested too deeply"),
    ("", "expected a mapping"),
    ("- 1", "expected a mapping"),
    ("a: 1\n---\nb: 2", "line"),
    (b"a: \xff", "save it as UTF-8"),
    ("a: \x00", "special characters"),
]


@pytest.mark.parametrize(("text", "seen"), SYNTAX)
def test_unreadable_yaml_is_refused(tmp_path: Path, text: str | bytes, seen: str) -> None:
    assert seen in refusal(tmp_path, text)


def test_all_problems_are_listed_at_once(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "model: {}\ntrain: {max_train_step: 5, seed: 07, warmup_steps: 3}\n"
        "data: {batch_size: 0}\nnonsense: 1\n",
    )
    for expected in [
        "line 2: train.seed: 07 is read as 7",
        "model.pretrained_model_name_or_path: missing",
        "train.max_train_step: unknown key; did you mean train.max_train_steps?",
        "train.warmup_steps: unknown key; did you mean lr_scheduler.warmup_steps?",
        "data.batch_size: saw 0, expected greater than or equal to 1",
        "nonsense: unknown key; known here: model, data",
    ]:
        assert expected in message


ABSENT = [
    ("model.full_finetune", True),
    ("model.blocks_to_swap", 1),
    ("model.fp8_base", True),
    ("model.lora.dtype", "bf16"),
    ("optimizer.fused_backward_pass", True),
    ("train.blocks_to_swap", 1),
    ("train.fused_backward_pass", True),
    ("train.num_processes", 2),
    ("hardware.devices", [0, 1]),
]


@pytest.mark.parametrize(("key", "value"), ABSENT)
def test_what_this_trainer_does_not_have_is_refused_by_name(key: str, value: Any) -> None:
    """Options of other trainers: full fine-tuning, block swap, fp8, more processes. Silence would be a lie."""
    with pytest.raises(ConfigError, match=rf"{key}: unknown key; "):
        parse(apply_overrides(MINIMAL, {key: value}))


BAD_VALUES: list[tuple[str, Any, str]] = [
    ("train.max_train_steps", "5", 'saw "5" (text)'),
    ("train.max_train_steps", True, "saw true"),
    ("train.max_train_steps", 5.5, "saw 5.5"),
    ("train.max_train_steps", 0, "saw 0"),
    ("train.gradient_checkpointing", 1, "true, false, selective or a number from 2 on"),
    ("train.gradient_checkpointing", "often", "true, false, selective or a number from 2 on"),
    ("train.streamed_blocks", -1, "saw -1"),
    ("train.compile", "yes", "saw"),
    ("optimizer.init_args.lr", "1e-4", "without quotes, as in 0.0001"),
    ("optimizer.init_args.lr", True, "saw true"),
    ("optimizer.init_args.lr", 0.0, "saw 0.0"),
    ("optimizer.init_args.eps", "1e-8", "expected a number"),
    ("optimizer.init_args.betas", [0.9, "0.99"], "expected a number"),
    ("optimizer.class_path", "AdamW", "dotted path"),
    ("data.shuffle", 1, "saw 1"),
    ("data.processor.target_size", [0, 64], "target_size[0]: saw 0"),
    ("data.processor.target_size", [64], "target_size"),
    ("data.processor.target_size", "64x64", "target_size"),
    ("data.caption_dropout_rate", 1.5, "saw 1.5"),
    ("model.lora.init_lora_weights", 1, "'gaussian' or true"),
    ("model.lora.init_lora_weights", False, "saw false"),
    ("model.lora.target_modules", ["to_q", "to_q"], "each module once"),
    ("model.quantize", "fp8", "'auto', 'none' or 'nf4'"),
    ("cache.vae", "fast", "'exact', 'folded' or 'tiled'"),
    ("cache.batch_size", 0, "cache.batch_size: saw 0, expected 'auto', or greater than or equal to 1"),
    ("cache.batch_size", 300, "cache.batch_size: saw 300, expected 'auto', or less than or equal to 256"),
    ("cache.batch_size", True, "cache.batch_size: saw true, expected 'auto', or a valid integer"),
    ("cache.batch_size", "4", "expected 'auto', or a valid integer; without quotes"),
    ("cache.use_cache", False, "text encoder"),
    ("logging.tracker_project_name", "a/b", "folder name"),
    ("logging.output_dir", "cache", "must differ"),
    ("validation.samples", [{"prompt": "x"}], "validation.samples[0].images: missing"),
    ("hardware.device", "gpu", "'auto', 'cpu', 'xpu' or 'cuda'"),
    ("resume", "", "resume"),
]


@pytest.mark.parametrize(("key", "value", "seen"), BAD_VALUES)
def test_bad_value_is_named_with_what_was_seen(key: str, value: Any, seen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(apply_overrides(MINIMAL, {key: value}))
    assert key.split("[")[0] in caught.value.message or "config.yaml" in caught.value.message
    assert seen in caught.value.message


@pytest.mark.parametrize(
    ("overrides", "seen"),
    [
        ({"train.max_train_steps": None}, "saw neither"),
        ({"train.num_epochs": 2}, "saw both"),
        ({"train.compile": True, "train.streamed_blocks": 2}, "compile: true and streamed_blocks 2"),
        ({"train.graphs": True, "train.streamed_blocks": 2}, "graphs: true and streamed_blocks 2"),
        ({"train.graphs": True, "model.lora.lora_dropout": 0.1}, "lora_dropout 0.1, expected one"),
        ({"validation.guidance_scale": 4.0, "validation.negative_prompt": ""}, "requires negative_prompt"),
    ],
)
def test_keys_are_judged_together(overrides: dict[str, Any], seen: str) -> None:
    with pytest.raises(ConfigError, match=seen):
        parse(apply_overrides(MINIMAL, overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        {"train.max_train_steps": None, "train.num_epochs": 2},
        {"validation.guidance_scale": 4.0},
        {"optimizer.init_args": {"lr": 1, "betas": [0.9, 0.99], "amsgrad": True}},
        {"model.lora.init_lora_weights": True},
        {"train.max_grad_norm": 0},
        {"train.compile": True, "train.graphs": True, "train.streamed_blocks": 0},
        {"train.gradient_checkpointing": 4, "train.streamed_blocks": 8},
        {"train.gradient_checkpointing": "selective"},
    ],
)
def test_good_combinations_pass(overrides: dict[str, Any]) -> None:
    parse(apply_overrides(MINIMAL, overrides))


def test_optimizer_arguments_reach_the_config() -> None:
    config = parse(apply_overrides(MINIMAL, {"optimizer.init_args": {"betas": [0.9, 0.95], "eps": 1e-6}}))
    assert config.optimizer.init_args.model_dump() == {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-6}


def test_overrides_leave_the_original_alone() -> None:
    raw = {"train": {"num_epochs": 2}}
    changed = apply_overrides(
        raw, {"train.max_train_steps": 5, "train.num_epochs": None, "data.batch_size": 2}
    )
    assert changed == {"train": {"num_epochs": None, "max_train_steps": 5}, "data": {"batch_size": 2}}
    assert raw == {"train": {"num_epochs": 2}}


def test_filled_config_loads_again() -> None:
    config = parse(MINIMAL)
    assert parse(config.model_dump(mode="json")) == config


def test_known_keys_reach_every_section() -> None:
    keys = set(known_keys())
    assert {"resume", "model.lora.r", "data.processor.target_size", "validation.samples.prompt"} <= keys


Json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
SECTIONS = st.dictionaries(st.sampled_from(sorted({k.split(".")[0] for k in known_keys()})), Json, max_size=4)
PIECES = st.text(string.printable, max_size=60) | st.lists(
    st.sampled_from(
        [*"-:{}[]&*!|>%@`'\"#,? \n\t", "<<", "a", "1", "!!int", "!!float", "!!bool", "0x", "1_", "=", "~"]
    ),
    max_size=12,
).map("".join)


def only_config_errors(path: Path) -> None:
    try:
        loaded = load_config(path)
    except ConfigError as error:
        assert error.message and error.remedy
    else:
        json.dumps(loaded.raw, allow_nan=False)


@settings(deadline=None, max_examples=150)
@given(document=SECTIONS)
def test_any_document_gives_a_config_or_a_config_error(document: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "config.yaml"
    path.write_text(yaml.safe_dump(document, allow_unicode=True), encoding="utf-8", errors="replace")
    only_config_errors(path)


@settings(deadline=None, max_examples=300)
@given(text=PIECES)
def test_any_text_gives_a_config_or_a_config_error(text: str, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "config.yaml"
    path.write_bytes(text.encode())
    only_config_errors(path)


@settings(deadline=None, max_examples=100)
@given(data=st.binary(max_size=40))
def test_any_bytes_give_a_config_or_a_config_error(data: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("any") / "config.yaml"
    path.write_bytes(data)
    only_config_errors(path)


@settings(deadline=None, max_examples=150)
@given(key=st.sampled_from(sorted(known_keys())), value=Json)
def test_any_value_at_any_key_gives_a_config_or_a_config_error(key: str, value: Any) -> None:
    try:
        parse(apply_overrides(MINIMAL, {key: value}))
    except ConfigError as error:
        assert error.message
