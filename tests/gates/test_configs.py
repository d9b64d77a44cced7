import copy

import pytest

from gates import configs, schema

BASE = {"model": {"lora": {"r": 4}}, "train": {"steps": 5, "seed": 1}, "resume": None}


def test_without_and_overridden_leave_the_original() -> None:
    before = copy.deepcopy(BASE)
    assert configs.without(BASE, "resume", "train.steps", "model.lora.r", "no.such") == {
        "model": {"lora": {}}, "train": {"seed": 1},
    }  # fmt: skip
    assert configs.overridden(BASE, {"train.steps": 9})["train"] == {"steps": 9, "seed": 1}
    assert before == BASE


def test_differences_name_the_leaf() -> None:
    other = configs.overridden(BASE, {"model.lora.r": 8, "train.new": 1})
    assert list(configs.differences(BASE, BASE)) == []
    assert list(configs.differences(BASE, other)) == [
        "model.lora.r: 4 then, 8 now",
        "train.new: None then, 1 now",
    ]


@pytest.mark.parametrize(
    ("config", "resolved", "faults"),
    [
        ({"a": {"b": "auto"}}, {"a": {"b": "cpu"}}, 0),
        ({"a": {"b": "cpu"}}, {"a": {"b": "xpu"}}, 1),
        ({"a": {"b": 1}}, {"a": {"b": 1, "c": 2}}, 0),
        ({"a": {"b": 1}}, {"a": None}, 1),
        ({"a": {"b": None}}, {"a": {"b": [64, 64]}}, 0),
    ],
)
def test_unresolved(config: dict[str, object], resolved: dict[str, object], faults: int) -> None:
    assert len(list(configs.unresolved(config, resolved))) == faults


def test_defaults_come_from_the_published_schema_at_every_depth() -> None:
    filled = schema.with_defaults(
        {"model": {"pretrained_model_name_or_path": "x", "lora": {"r": 2}}, "train": {}}
    )
    assert filled["model"]["lora"]["r"] == 2 and filled["model"]["lora"]["lora_alpha"] == 16
    assert filled["data"]["processor"]["controls_size"] is None
    assert filled["cache"]["devices"]["vae"] == "auto"
    assert filled["train"]["checkpointing_steps"] == 100
    filled["data"]["processor"]["target_size"].append(1)
    again = schema.with_defaults({"model": {}, "train": {}})
    assert len(again["data"]["processor"]["target_size"]) == 2
