"""Gate 04: a healthy config and plan pass, and each planted fault turns its check and no other."""

from collections.abc import Callable
from typing import Any

import pytest

PLAN = "04-plan"


def _config(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    return lambda made: made.edit_config(change)


def _prompt_file(line: str) -> Callable[[Any], None]:
    def write(made: Any) -> None:
        (made.root / "p.txt").write_text(line, encoding="utf-8")
        made.edit_config(lambda c: c.update(validation={"prompt_file": "p.txt"}))

    return write


def _text(old: str, new: str) -> Callable[[Any], None]:
    """A change of the text of config.yaml; the plan is not made anew."""

    def spoil(made: Any) -> None:
        path = made.root / "config.yaml"
        text = path.read_text(encoding="utf-8")
        assert old in text
        path.write_text(text.replace(old, new), encoding="utf-8", newline="\n")

    return spoil


def _plan(change: Callable[[dict[str, Any]], Any]) -> Callable[[Any], None]:
    return lambda made: made.edit(made.evidence(PLAN), lambda document: change(document["data"]))


def _fit(**values: Any) -> Callable[[Any], None]:
    return _plan(lambda data: data["phases"]["fit"].update(values))


def _target(**values: Any) -> Callable[[Any], None]:
    return lambda made: made.edit(".gates/target.json", lambda document: document.update(values))


FAULTS: dict[str, tuple[Callable[[Any], Any], set[str]]] = {
    "no config": (
        lambda m: (m.root / "config.yaml").unlink(),
        {"schema-valid", "no-placeholders", "cache-mandatory"},
    ),
    "unknown key": (_config(lambda c: c["train"].update(warmup=3)), {"schema-valid"}),
    "unknown section": (_config(lambda c: c.update(trainer="QwenImageEdit")), {"schema-valid"}),
    "text for a number": (
        _config(lambda c: c.update(optimizer={"init_args": {"lr": "1e-4"}})),
        {"schema-valid"},
    ),
    "1e-4 as YAML reads it": (_text("checkpointing_steps: 20", "checkpointing_steps: 1e1"), {"schema-valid"}),
    "a leading zero": (_text("checkpointing_steps: 20", "checkpointing_steps: 020"), {"schema-valid"}),
    "on for true": (_text("checkpointing_steps: 20", "checkpointing_steps: 20\n  gradient_checkpointing: on"),
        {"schema-valid"}),
    "a date": (_text("target_size:", "vl_pixels: 2026-11-30\n    target_size:"), {"schema-valid"}),
    "no model": (_config(lambda c: c.pop("model")), {"schema-valid"}),
    "TODO": (_config(lambda c: c["model"].update(pretrained_model_name_or_path="TODO")), {"no-placeholders"}),
    "angle brackets": (_config(lambda c: c.update(logging={"output_dir": "<out>"})), {"no-placeholders"}),
    "path/to": (_config(lambda c: c.update(cache={"cache_dir": "path/to/cache"})), {"no-placeholders"}),
    "cache off": (_config(lambda c: c.update(cache={"use_cache": False})), {"cache-mandatory"}),
    "no such model": (
        _config(lambda c: c["model"].update(pretrained_model_name_or_path="models/other")),
        {"paths-exist"},
    ),
    "a model folder without index": (
        lambda m: (m.root / "models/base/model_index.json").unlink(),
        {"paths-exist"},
    ),
    "another hub id than the target's": (
        _config(lambda c: c["model"].update(pretrained_model_name_or_path="Qwen/Qwen-Image-Edit")),
        {"paths-exist"},
    ),
    "a sample image that isn't there": (
        _config(lambda c: c.update(validation={"samples": [{"prompt": "x", "images": ["no.png"]}]})),
        {"paths-exist"},
    ),
    "a sample of another multiple": (
        _config(
            lambda c: c.update(
                validation={"samples": [{"prompt": "x", "images": ["config.yaml"], "size": [64, 50]}]}
            )
        ),
        {"size-multiple"},
    ),
    "a prompt file with an image that isn't there": (
        _prompt_file("x --ci no.png"),
        {"paths-exist"},
    ),
    "a prompt file with a size of another multiple": (
        _prompt_file("x --ci config.yaml --w 64 --h 50"),
        {"size-multiple"},
    ),
    "no dataset evidence": (
        lambda m: m.evidence("02-dataset").unlink(),
        {"paths-exist", "dataset-unchanged"},
    ),
    "no plan": (
        lambda m: m.evidence(PLAN).unlink(),
        {"dataset-unchanged", "size-multiple", "device-matches-host"},
    ),
    "planned for another dataset": (
        _plan(lambda d: d.update(dataset_digest="0" * 64)),
        {"dataset-unchanged"},
    ),
    "a prompt edited in the evidence": (
        lambda m: m.edit(m.evidence("02-dataset"), lambda d: d["data"]["samples"][0].update(prompt="x")),
        {"dataset-unchanged"},
    ),
    "both lengths": (_config(lambda c: c["train"].update(num_epochs=3)), {"checkpoint-within-steps"}),
    "no length": (_config(lambda c: c["train"].pop("max_train_steps")), {"checkpoint-within-steps"}),
    "interval beyond the end": (
        _config(lambda c: c["train"].update(checkpointing_steps=61)),
        {"checkpoint-within-steps"},
    ),
    "interval beyond the epochs' end": (
        _config(lambda c: c.update(train={"num_epochs": 2, "checkpointing_steps": 61})),
        {"checkpoint-within-steps"},
    ),
    "odd size": (_config(lambda c: c["data"]["processor"].update(target_size=[40, 48])), {"size-multiple"}),
    "odd controls": (
        _config(lambda c: c["data"]["processor"].update(controls_size=[32, 50])),
        {"size-multiple"},
    ),
    "a plan with another multiple": (_plan(lambda d: d.update(size_multiple=8)), {"size-multiple"}),
    "an unknown family": (_plan(lambda d: d.update(family="flux")), {"size-multiple"}),
    "config for another device": (
        _config(lambda c: c.update(hardware={"device": "xpu"})),
        {"device-matches-host"},
    ),
    "plan for another device": (_plan(lambda d: d.update(device="cuda")), {"device-matches-host"}),
    "target of another device": (_target(device="xpu"), {"device-matches-host"}),
    "planned for another config": (_text("r: 2", "r: 4"), {"memory-plan-fits"}),
    "peak beyond the budget": (
        lambda m: (
            _fit(components_gib={"denoiser": 8.5}, peak_gib=8.5, resident_gib=7.0)(m),
            _plan(lambda d: d.update(margin_gib=-0.5))(m),
        ),
        {"memory-plan-fits"},
    ),
    "components that don't add up": (_fit(components_gib={"denoiser": 7.4}), {"memory-plan-fits"}),
    "a margin that isn't there": (_plan(lambda d: d.update(margin_gib=7.5)), {"memory-plan-fits"}),
    "resident above peak": (_fit(resident_gib=1.9), {"memory-plan-fits"}),
    "disk full": (_plan(lambda d: d["disk"].update(free_gib=0.5)), {"memory-plan-fits"}),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_turns_its_check(fault: str, made: Any, judge: Any, assert_turned: Any) -> None:
    spoil, expected = FAULTS[fault]
    spoil(made)
    assert_turned(judge(made, "04"), fail=expected)


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
    FAULTS[fault][0](made)
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
