from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.config.load import load_config
from runtime.config.recommend import Value, recommend, recommended_steps, render, target_size
from runtime.errors import DataError
from runtime.planning import architecture


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((64, 64), (64, 64)),
        ((100, 40), (32, 96)),
        ((672, 384), (384, 672)),
        ((8, 8), (16, 16)),
        ((1344, 768), (384, 672)),
    ],
)
def test_target_size_is_the_median_within_the_published_area(
    make_dataset: Any, read_dataset: Any, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    found, reason = target_size(read_dataset(make_dataset(count=3, size=size)).samples, 16)
    assert found == expected
    assert f"median {size[1]} x {size[0]}" in reason


@pytest.mark.parametrize(("count", "steps"), [(1, 300), (10, 300), (20, 600), (35, 1050), (100, 2000)])
def test_steps_follow_the_dataset(count: int, steps: int) -> None:
    assert recommended_steps(count) == steps


@pytest.mark.parametrize(("real", "rate"), [(False, 1e-3), (True, 1e-4)])
@pytest.mark.parametrize("steps", [None, 7])
def test_recommended_config_loads_and_every_line_has_its_reason(
    make_model: Any,
    make_dataset: Any,
    read_dataset: Any,
    tmp_path: Path,
    real: bool,
    rate: float,
    steps: int | None,
) -> None:
    base = architecture.read(make_model(real=real))
    text = recommend(read_dataset(make_dataset()), base, model="external:model", device="cpu", steps=steps)
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    config = load_config(path).config
    assert config.model.pretrained_model_name_or_path == "external:model"
    assert config.data.processor.target_size == (64, 64)
    assert config.train.max_train_steps == (steps or 300)
    assert config.train.checkpointing_steps <= (steps or 300)
    assert config.lr_scheduler.warmup_steps < (steps or 300)
    assert config.optimizer.init_args.lr == rate
    values = [line for line in text.splitlines() if ": " in line and not line.startswith("#")]
    assert all("  # " in line for line in values)


@pytest.mark.parametrize(
    ("text", "size", "reason"),
    [
        ("", "[544, 960]", "the default of dataset files"),
        ("resolution = [64, 32]", "[32, 64]", "as the dataset file says"),
    ],
)
def test_a_dataset_files_own_size_stands_in_the_config(
    make_model: Any, make_dataset: Any, read_dataset: Any, text: str, size: str, reason: str
) -> None:
    """musubi-tuner trains at 960 x 544 where a file says nothing, so its users' files mean that."""
    root = make_dataset()
    listed = root.parent / "sets.toml"
    listed.write_text(
        f'[general]\nbatch_size = 3\n{text}\n[[datasets]]\nfolder = "pairs"\n', encoding="utf-8"
    )
    found = recommend(read_dataset(listed), architecture.read(make_model()), model="m", device="cpu")
    line = next(line for line in found.splitlines() if "target_size" in line)
    assert size in line and reason in line
    assert "batch_size: 3  # as the dataset file says" in found


def test_no_training_sample_is_refused(make_model: Any, make_dataset: Any, read_dataset: Any) -> None:
    empty = replace(read_dataset(make_dataset()), samples=())
    with pytest.raises(DataError) as caught:
        recommend(empty, architecture.read(make_model()), model="m", device="cpu")
    assert caught.value.remedy == "finetune dataset"


@pytest.mark.parametrize(
    "value", [0.0, 1e-4, 2.5e-6, 0.25, 1.0, 3, True, None, "a: #b", "äöü", [1, 2], ["x"]]
)
def test_rendered_value_reads_back(value: Any) -> None:
    text = render(
        [Value(key="a.b", value=value, reason="because"), Value(key="a.c.d", value=1, reason="why")]
    )
    assert yaml.safe_load(text) == {"a": {"b": value, "c": {"d": 1}}}
