"""A key changes with everything that the tensors depend on, and with nothing else."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from runtime import files
from runtime.cache import key

CONTROL = "dataset/control_images/p0.png"
SAMPLES = [{"prompt": "make it green", "images": [CONTROL]}]


def keys(lab: Any, changes: dict[str, Any] | None = None) -> dict[str, str]:
    return {want.id: want.key for want in lab.job(changes).wants}


def of_split(lab: Any, split: str) -> set[str]:
    return {want.id for want in lab.job().wants if want.split == split}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def swap(lab: Any, folder: str) -> None:
    shutil.copyfile(lab.root / "dataset" / folder / "p1.png", lab.root / "dataset" / folder / "p0.png")


def recaption(lab: Any) -> None:
    (lab.root / "dataset" / "training_images" / "p0.txt").write_text("other words", encoding="utf-8")


@pytest.mark.parametrize(
    "edit", [recaption, lambda lab: swap(lab, "training_images"), lambda lab: swap(lab, "control_images")]
)
def test_a_file_of_one_sample_changes_its_key_alone(lab: Any, edit: Any) -> None:
    before = keys(lab)
    edit(lab)
    lab.scan()
    assert changed(before, keys(lab)) == {"p0"}


@pytest.mark.parametrize(
    ("changes", "whose"),
    [
        ({"data.processor.target_size": [32, 64]}, "all"),
        ({"data.processor.controls_size": [32, 64]}, "all"),
        ({"data.processor.vl_pixels": 1024}, "all"),
        ({"train.mixed_precision": "bf16"}, "all"),
        ({"data.caption_dropout_rate": 0.1}, "train"),
        ({"validation.guidance_scale": 2.0}, "holdout"),
        ({"train.seed": 1, "train.max_train_steps": 9, "model.lora.r": 8, "data.batch_size": 1}, "none"),
        ({"model.quantize": "nf4", "validation.seed": 3, "loss.sigma_sampling": "uniform"}, "none"),
        ({"validation.negative_prompt": "ugly"}, "none"),  # guidance is off
        ({"cache.cache_dir": "elsewhere"}, "none"),
    ],
)
def test_settings(lab: Any, changes: dict[str, Any], whose: str) -> None:
    splits = {"all": ["train", "holdout"], "none": []}.get(whose, [whose])
    expected = set().union(*(of_split(lab, split) for split in splits))
    assert changed(keys(lab), keys(lab, changes)) == expected


def test_other_dropout_rate_above_zero_is_the_same_entry(lab: Any) -> None:
    assert keys(lab, {"data.caption_dropout_rate": 0.1}) == keys(lab, {"data.caption_dropout_rate": 0.9})


def test_a_negative_prompt_counts_where_guidance_is_on(lab: Any) -> None:
    one, other = (
        keys(lab, {"validation.guidance_scale": 2.0, "validation.negative_prompt": text})
        for text in (" ", "ugly")
    )
    assert changed(one, other) == of_split(lab, "holdout")


@pytest.mark.parametrize("component", ["text_encoder", "vae", "tokenizer", "processor"])
def test_every_file_of_an_encoder_counts(lab: Any, nano: Path, tmp_path: Path, component: str) -> None:
    """Another fine-tune of the same architecture has the same shapes and other embeddings."""
    before = keys(lab)
    model = tmp_path / "other"
    shutil.copytree(nano, model)
    files.write_json(lab.workspace.local_path, {"external": {"model": str(model)}})
    assert keys(lab) == before  # where it lies does not matter
    path = next(iter(sorted((model / component).iterdir())))
    path.write_bytes(path.read_bytes() + b" ")
    assert changed(before, keys(lab)) == set(before)


def test_the_denoiser_does_not_count(lab: Any, nano: Path, tmp_path: Path) -> None:
    before = keys(lab)
    model = tmp_path / "other"
    shutil.copytree(nano, model)
    shutil.rmtree(model / "transformer")
    (model / "transformer").mkdir()
    shutil.copyfile(nano / "transformer" / "config.json", model / "transformer" / "config.json")
    files.write_json(lab.workspace.local_path, {"external": {"model": str(model)}})
    assert keys(lab) == before


def test_prompts_to_sample(lab: Any) -> None:
    before = keys(lab)
    job = lab.job({"validation.samples": SAMPLES})
    (prompt,) = [want for want in job.wants if want.split == "prompt"]
    assert (prompt.id, prompt.target, prompt.document["target"]) == ("prompt-0", None, None)
    assert changed(before, keys(lab, {"validation.samples": SAMPLES})) == {"prompt-0"}
    other = keys(lab, {"validation.samples": [{**SAMPLES[0], "prompt": "make it red"}]})
    assert other["prompt-0"] != prompt.key


def test_a_prompt_whose_picture_is_gone_is_named(lab: Any) -> None:
    from runtime.errors import DataError

    with pytest.raises(DataError, match=r"validation\.samples\[0\]: no image at .*gone\.png"):
        keys(lab, {"validation.samples": [{"prompt": "x", "images": ["gone.png"]}]})


def test_folder_is_sixteen_hex_of_the_key(lab: Any) -> None:
    for want in lab.job().wants:
        assert want.folder == want.key[:16] == files.document_digest(want.document)[:16]


def test_differences_are_named_by_their_path() -> None:
    old = {"a": {"b": 1, "c": [1, 2]}, "d": "same", "gone": 1}
    new = {"a": {"b": 2, "c": [1, 2]}, "d": "same", "new": 2}
    assert key.differences(old, new) == [
        "a.b: 1 in the cache, 2 now",
        "gone: 1 in the cache, None now",
        "new: None in the cache, 2 now",
    ]
    assert key.differences(old, old) == []
