from pathlib import Path
from typing import Any

import pytest
import yaml

from runtime.config.load import load_config
from runtime.config.recommend import Value, recommend, recommended_steps, render, target_size
from runtime.data import manifest
from runtime.errors import DataError
from runtime.memory import architecture


def samples(make_dataset: Any, **kwargs: Any) -> tuple[manifest.Sample, ...]:
    return manifest.build(make_dataset(**kwargs)).samples


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
    make_dataset: Any, size: tuple[int, int], expected: tuple[int, int]
) -> None:
    found, reason = target_size(samples(make_dataset, count=3, size=size), 16)
    assert found == expected
    assert f"median {size[1]} x {size[0]}" in reason


@pytest.mark.parametrize(("count", "steps"), [(1, 300), (10, 300), (20, 600), (35, 1050), (100, 2000)])
def test_steps_follow_the_dataset(count: int, steps: int) -> None:
    assert recommended_steps(count) == steps


@pytest.mark.parametrize(("real", "rate"), [(False, 1e-3), (True, 1e-4)])
@pytest.mark.parametrize("steps", [None, 7])
def test_recommended_config_loads_and_every_line_has_its_reason(
    make_model: Any, make_dataset: Any, tmp_path: Path, real: bool, rate: float, steps: int | None
) -> None:
    base = architecture.read(make_model(real=real))
    text = recommend(samples(make_dataset), base, model="external:model", device="cpu", steps=steps)
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


def test_no_training_sample_is_refused(make_model: Any) -> None:
    with pytest.raises(DataError) as caught:
        recommend([], architecture.read(make_model()), model="m", device="cpu")
    assert caught.value.remedy == "finetune dataset"


@pytest.mark.parametrize(
    "value", [0.0, 1e-4, 2.5e-6, 0.25, 1.0, 3, True, None, "a: #b", "äöü", [1, 2], ["x"]]
)
def test_rendered_value_reads_back(value: Any) -> None:
    text = render(
        [Value(key="a.b", value=value, reason="because"), Value(key="a.c.d", value=1, reason="why")]
    )
    assert yaml.safe_load(text) == {"a": {"b": value, "c": {"d": 1}}}
