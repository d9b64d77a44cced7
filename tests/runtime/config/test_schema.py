from pathlib import Path
from typing import Any

import jsonschema
import pytest

from runtime.config import schema
from runtime.config.load import apply_overrides, known_keys

MINIMAL = {"model": {"pretrained_model_name_or_path": "base"}, "train": {"max_train_steps": 5}}


def test_committed_schema_is_what_the_model_gives() -> None:
    assert schema.main(["--check"]) == 0


def test_check_notices_a_stale_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "PATH", tmp_path / "config.schema.json")
    assert schema.main(["--check"]) == 1
    assert schema.main([]) == 0
    assert schema.main(["--check"]) == 0
    schema.PATH.write_text(schema.render() + "\n", encoding="utf-8")
    assert schema.main(["--check"]) == 1


def test_schema_is_valid_and_names_itself() -> None:
    document = schema.build_schema()
    jsonschema.Draft202012Validator.check_schema(document)
    assert document["$id"] == schema.ID
    assert schema.render().endswith("}\n") and "\r" not in schema.render()


def test_every_key_has_a_description() -> None:
    document = schema.build_schema()
    nodes = [document, *document["$defs"].values()]
    bare = [
        name for node in nodes for name, field in node["properties"].items() if not field.get("description")
    ]
    assert bare == []
    assert {name for node in nodes for name in node["properties"]} == {k.split(".")[-1] for k in known_keys()}


@pytest.mark.parametrize(
    ("overrides", "valid"),
    [
        ({}, True),
        ({"train.num_epochs": 2}, False),
        ({"train.max_train_steps": None}, False),
        ({"train.max_train_steps": None, "train.num_epochs": 2}, True),
        ({"train.num_epochs": None}, True),
        ({"train.seeds": 2}, False),
        ({"cache.use_cache": False}, False),
        ({"data.processor.target_size": [64, 64]}, True),
        ({"data.processor.target_size": [64, 64, 64]}, False),
        ({"optimizer.init_args": {"betas": [0.9, 0.99]}}, True),
        ({"optimizer.init_args": {"eps": "1e-8"}}, False),
        ({"model.lora.init_lora_weights": True}, True),
        ({"model.lora.init_lora_weights": "zero"}, False),
    ],
)
def test_schema_judges_as_the_loader_does(overrides: dict[str, Any], valid: bool) -> None:
    validator = jsonschema.Draft202012Validator(schema.build_schema())
    assert validator.is_valid(apply_overrides(MINIMAL, overrides)) is valid
