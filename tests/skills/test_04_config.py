"""Gate 04: a healthy config and plan pass, and each planted fault turns its check and no other."""

from typing import Any

import pytest

from gates.selftest.faults import config
from gates.selftest.faults.config import _plan, _prompt_file, _target, _text

FAULTS = {fault.what: fault for fault in config.FAULTS}


def test_healthy(made: Any, judge: Any, assert_turned: Any) -> None:
    verdict = judge(made, "04")
    assert verdict.passes and verdict.counts["pass"] == 9
    assert_turned(verdict)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("checkpointing_steps: 20", "checkpointing_steps: 20\n  checkpointing_steps: 30"),
        ("model:", "model: [unclosed"),
        ("r: 2", "r: &a 2\n    lora_alpha: *a"),
        ("r: 2", "r: !!python/object/apply:os.system ['true']"),
        ("r: 2", "1: 2"),
    ],
)
def test_what_is_no_config_is_an_error(old: str, new: str, made: Any, judge: Any) -> None:
    _text(old, new)(made)
    verdict = judge(made, "04")
    assert (verdict.verdict, verdict.outcome, verdict.exit_code) == ("FAIL", "error", 3)
    assert verdict.first_failure == "schema-valid"


MESSAGES = {
    "unknown key": "train.warmup: unknown key; known here: ",
    "text for a number": 'optimizer.init_args.lr: saw "1e-4" (text), expected a number',
    "1e-4 as YAML reads it": "line 13: train.checkpointing_steps: 1e1 is read as text",
    "no model": "model: missing",
}


@pytest.mark.parametrize("fault", MESSAGES)
def test_messages_name_key_value_and_what_to_write(fault: str, made: Any, judge: Any) -> None:
    FAULTS[fault].spoil(made)
    check = next(c for c in judge(made, "04").checks if c.id == "schema-valid")
    assert MESSAGES[fault] in check.message


def test_nearest_key_is_named(made: Any, judge: Any) -> None:
    made.edit_config(lambda c: c["train"].update(max_train_step=3))
    check = next(c for c in judge(made, "04").checks if c.id == "schema-valid")
    assert "train.max_train_step: unknown key; did you mean max_train_steps?" in check.message


@pytest.mark.parametrize(
    ("target", "config", "plan", "passes"),
    [
        ("auto", "auto", "cpu", True),
        ("auto", "xpu", "xpu", True),
        ("xpu", "auto", "xpu", True),
        ("auto", "xpu", "cpu", False),
        ("xpu", "auto", "cpu", False),
        ("xpu", "auto", "auto", False),
    ],
)
def test_devices(target: str, config: str, plan: str, passes: bool, made: Any, judge: Any) -> None:
    _target(device=target)(made)
    made.edit_config(lambda c: c.update(hardware={"device": config}))
    _plan(lambda d: d.update(device=plan))(made)
    assert judge(made, "04").passes == passes


def test_a_hub_id_that_the_target_names_passes(made: Any, judge: Any) -> None:
    _target(model="Qwen/Qwen-Image-Edit")(made)
    made.edit_config(lambda c: c["model"].update(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit"))
    assert judge(made, "04").passes


def test_a_prompt_may_hold_brackets(made: Any, judge: Any) -> None:
    sample = {"prompt": "<3", "images": ["config.yaml"], "negative_prompt": "TODO <3"}
    made.edit_config(lambda c: c.update(validation={"negative_prompt": "TODO <3", "samples": [sample]}))
    assert judge(made, "04").passes


def test_a_prompt_file_that_is_gone_fails_and_one_that_is_wrong_is_an_error(
    made: Any, judge: Any, assert_turned: Any
) -> None:
    _prompt_file("x --l 4 --ci config.yaml")(made)
    verdict = judge(made, "04")
    assert_turned(verdict, error={"paths-exist"})
    (made.root / "p.txt").unlink()
    gone = judge(made, "04")
    assert_turned(gone, fail={"paths-exist"})
    checks = [next(c for c in item.checks if c.id == "paths-exist") for item in (verdict, gone)]
    assert [check.message[:18] for check in checks] == ["p.txt line 1: --l:", "p.txt: is missing"]
    assert all("validation.prompt_file" in check.remedy for check in checks)


def test_a_prompt_file_that_is_whole_is_an_input_of_the_verdict(made: Any, judge: Any) -> None:
    _prompt_file("x --ci config.yaml --w 64 --h 48")(made)
    verdict = judge(made, "04")
    assert verdict.passes and "p.txt" in {item.path for item in verdict.inputs}


@pytest.mark.parametrize("key", ["transformer_weight", "lora"])
def test_weights_beside_the_base_must_be_there(key: str, made: Any, judge: Any) -> None:
    value = {"pretrained_weight": "gone.safetensors"} if key == "lora" else "gone.safetensors"
    made.edit_config(lambda c: c["model"].update({key: value}))
    check = next(c for c in judge(made, "04").checks if c.id == "paths-exist")
    assert check.status == "fail" and f"model.{key}" in check.message
    (made.root / "gone.safetensors").write_bytes(b"x")
    check = next(c for c in judge(made, "04").checks if c.id == "paths-exist")
    assert check.status == "pass"


@pytest.mark.parametrize(("free", "status"), [(2.0, "pass"), (1.999, "fail")])
def test_the_disk_keeps_as_much_to_spare_as_the_plan_asks_for(
    free: float, status: str, made: Any, judge: Any
) -> None:
    from gates.plans import SPARE_DISK_GIB
    from runtime.planning import advice

    assert SPARE_DISK_GIB == advice.SPARE_DISK_GIB == 1.0
    _plan(lambda d: d.update(disk={"needed_gib": 1.0, "free_gib": free}))(made)
    check = next(c for c in judge(made, "04").checks if c.id == "memory-plan-fits")
    assert check.status == status
