"""A key changes with everything that the tensors depend on, and with nothing else."""

import dataclasses
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from runtime import files
from runtime.cache import key
from runtime.errors import DataError
from runtime.families import facts, registry

CONTROL = "dataset/control_images/p0.png"
SAMPLES = [{"prompt": "make it green", "images": [CONTROL]}]
EVERY = ("train", "holdout")


def keys(lab: Any, changes: dict[str, Any] | None = None) -> dict[str, str]:
    return {want.id: want.key for want in lab.job(changes).wants}


def of_split(lab: Any, *splits: str) -> set[str]:
    return {want.id for want in lab.job().wants if want.split in splits}


def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


def swap(lab: Any, folder: str) -> None:
    shutil.copyfile(lab.root / "dataset" / folder / "p1.png", lab.root / "dataset" / folder / "p0.png")


def caption(lab: Any, text: str) -> None:
    (lab.root / "dataset" / "training_images" / "p0.txt").write_text(text, encoding="utf-8")


def mask(lab: Any, grey: int = 128) -> None:
    path = lab.root / "dataset" / "control_images" / "p0_mask.png"
    Image.new("L", (64, 64), grey).save(path)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (lambda lab: swap(lab, "training_images"), "target"),
        (lambda lab: swap(lab, "control_images"), "controls"),
        (lambda lab: caption(lab, "other words"), "prompt"),
        (mask, "mask"),
    ],
)
def test_a_file_of_one_sample_rebuilds_it_alone_and_is_named(
    lab: Any, stub: None, edit: Callable[[Any], None], reason: str
) -> None:
    before = keys(lab)
    edit(lab)
    lab.scan()
    assert changed(before, keys(lab)) == {"p0"}
    summary = lab.cache()
    assert summary.reasons == {f"changed: {reason}": ["p0"]}
    assert (summary.built, summary.kept, summary.left_over) == (1, 10, 1)
    assert lab.cache().reasons == {}


def test_the_bytes_of_a_mask_count_not_only_that_there_is_one(lab: Any, stub: None) -> None:
    mask(lab, 0)
    lab.scan()
    lab.cache()
    mask(lab, 255)
    lab.scan()
    assert lab.cache().reasons == {"changed: mask": ["p0"]}


def dataset_file(lab: Any, keys_of_p: str = "", keys_of_q: str = "") -> None:
    """Two sources: p0 to p4 as `p`, the others as `q`."""
    for name, numbers in (("p", range(5)), ("q", range(5, 11))):
        for folder, suffixes in (("training_images", ("png", "txt")), ("control_images", ("png",))):
            (lab.root / "dataset" / name / folder).mkdir(parents=True, exist_ok=True)
            for file in (f"p{number}.{suffix}" for number in numbers for suffix in suffixes):
                source = lab.root / "dataset" / folder / file
                if source.is_file():
                    source.rename(lab.root / "dataset" / name / folder / file)
    blocks = [
        f'[[datasets]]\nimage_directory = "{name}/training_images"\n'
        f'control_directory = "{name}/control_images"\ncaption_extension = ".txt"\n{more}\n'
        for name, more in (("p", keys_of_p), ("q", keys_of_q))
    ]
    path = lab.root / "dataset" / "dataset.toml"
    path.write_text("".join(blocks), encoding="utf-8")
    target = files.read_json(lab.workspace.target_path)
    files.write_json(lab.workspace.target_path, {**target, "dataset": "dataset/dataset.toml"})
    _scan_target(lab)


def _scan_target(lab: Any) -> None:
    from runtime.commands.dataset import scan

    scan(lab.workspace, 3)


def of_source(lab: Any, source: str) -> set[str]:
    return {sample.id for sample in lab.job().listed.samples if sample.source == source}


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ("resolution = [32, 32]", "sizes"),
        ("control_resolution = [32, 32]", "sizes"),
        ("num_repeats = 3", ""),
        ("batch_size = 2", ""),
    ],
)
def test_what_a_dataset_file_says_of_one_source_rebuilds_that_source(
    lab: Any, stub: None, more: str, reason: str
) -> None:
    dataset_file(lab)
    lab.cache()
    dataset_file(lab, keys_of_p=more)
    summary = lab.cache()
    first = lab.job().listed.sources[0].name
    found = {_outer(why.removeprefix("changed: ")): sorted(ids) for why, ids in summary.reasons.items()}
    assert found == ({reason: sorted(of_source(lab, first))} if reason else {})


@pytest.mark.parametrize("split", ["train", "holdout"])
def test_alternative_captions_count_where_they_are_trained(lab: Any, split: str) -> None:
    job = lab.job()
    sample = next(sample for sample in job.listed.samples if sample.split == split)
    more = dataclasses.replace(sample, alternatives=("another way to say it",))
    listed = dataclasses.replace(
        job.listed, samples=tuple(more if s is sample else s for s in job.listed.samples)
    )
    after = key.wanted(job.config, lab.workspace, listed, job.facts, job.common)
    found = changed({want.id: want.key for want in job.wants}, {want.id: want.key for want in after})
    assert found == ({sample.id} if split == "train" else set())


@pytest.mark.parametrize(
    ("changes", "splits", "reason"),
    [
        ({"data.processor.target_size": [32, 32]}, EVERY, "sizes"),
        ({"data.processor.controls_size": [32, 32]}, EVERY, "sizes"),
        ({"data.processor.target_size": [32, 64]}, EVERY, "boxes, sizes"),
        ({"data.processor.background": [0, 0, 0]}, EVERY, "settings.processing.background"),
        ({"data.processor.vl_pixels": 1024}, EVERY, "settings.processing.vl_pixels"),
        ({"data.max_prompt_tokens": 512}, EVERY, "settings.processing.max_prompt_tokens"),
        ({"cache.dtypes.text_encoder": "bf16"}, EVERY, "settings.encoders.text_encoder.dtype"),
        ({"cache.dtypes.vae": "bf16"}, EVERY, "settings.encoders.vae.dtype"),
        ({"cache.vae": "folded"}, EVERY, "settings.encoders.vae.mode"),
        ({"cache.vae": "exact"}, (), ""),
        ({"data.caption_dropout_rate": 0.1}, ("train",), "empty_prompt"),
        ({"validation.guidance_scale": 2.0}, ("holdout",), "negative_prompt"),
        ({"train.seed": 1, "train.max_train_steps": 9, "model.lora.r": 8, "data.batch_size": 1}, (), ""),
        ({"model.quantize": "nf4", "validation.seed": 3, "loss.sigma_sampling": "uniform"}, (), ""),
        ({"train.mixed_precision": "bf16"}, (), ""),  # of the denoiser
        ({"cache.batch_size": 4, "data.num_workers": 2}, (), ""),
        ({"validation.negative_prompt": "ugly"}, (), ""),  # guidance is off
        ({"data.processor.bucket_no_upscale": True}, (), ""),  # buckets are off
        ({"data.processor.enable_bucket": True}, (), ""),  # all are square
    ],
)
def test_settings(
    lab: Any, stub: None, changes: dict[str, Any], splits: tuple[str, ...], reason: str
) -> None:
    expected = of_split(lab, *splits)
    summary = lab.cache(changes)
    found = {why: set(ids) for why, ids in summary.reasons.items()}
    if not splits:
        assert found == {}
    else:
        told = ", ".join(
            sorted({part for why in found for part in why.removeprefix("changed: ").split(", ")})
        )
        assert (set().union(*found.values()), _outer(told)) == (expected, reason)


def _outer(told: str) -> str:
    """`sizes.target` as `sizes`: which of both changed is not the point here."""
    names = {
        part.partition(".")[0] if part.startswith(("sizes", "boxes")) else part for part in told.split(", ")
    }
    return ", ".join(sorted(names))


def test_buckets_change_the_keys_of_those_whose_size_they_change(lab: Any, stub: None) -> None:
    wide = Image.new("RGB", (128, 32), (9, 9, 9))
    for folder in ("training_images", "control_images"):
        wide.save(lab.root / "dataset" / folder / "p0.png")
    lab.scan()
    lab.cache()
    summary = lab.cache({"data.processor.enable_bucket": True})
    assert list(summary.reasons.values()) == [["p0"]]


@pytest.mark.parametrize(
    ("folder", "one", "other"),
    [
        ("training_images", {}, {"enable_bucket": True, "bucket_no_upscale": True, "target_size": [96, 96]}),
        ("control_images", {"controls_size": [64, 64]}, {"controls_resize": "keep"}),
    ],
)
def test_the_part_of_a_picture_counts_not_its_final_size_alone(
    lab: Any, folder: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """70 x 70, scaled to 64 x 64 or its centre cut out."""
    Image.new("RGB", (70, 70), (9, 9, 9)).save(lab.root / "dataset" / folder / "p0.png")
    lab.scan()
    wants = [
        next(want for want in lab.job({f"data.processor.{k}": v for k, v in changes.items()}).wants)
        for changes in (one, other)
    ]
    assert wants[0].document["sizes"] == wants[1].document["sizes"]
    assert wants[0].key != wants[1].key


def test_other_dropout_rate_above_zero_is_the_same_entry(lab: Any) -> None:
    assert keys(lab, {"data.caption_dropout_rate": 0.1}) == keys(lab, {"data.caption_dropout_rate": 0.9})


def test_a_negative_prompt_counts_where_guidance_is_on(lab: Any) -> None:
    one, other = (
        keys(lab, {"validation.guidance_scale": 2.0, "validation.negative_prompt": text})
        for text in (" ", "ugly")
    )
    assert changed(one, other) == of_split(lab, "holdout")


@pytest.mark.parametrize("component", ["text_encoder", "vae", "tokenizer", "processor"])
def test_every_file_of_an_encoder_counts(
    lab: Any, stub: None, rebase: Callable[..., Path], component: str
) -> None:
    """Another fine-tune of the same architecture has the same shapes and other embeddings."""
    before = keys(lab)
    model = rebase()
    assert keys(lab) == before  # where it lies does not matter
    path = next(iter(sorted((model / component).iterdir())))
    path.write_bytes(path.read_bytes() + b" ")
    assert changed(before, keys(lab)) == set(before)
    (reason,) = lab.cache().reasons
    assert reason == f"changed: settings.encoders.{component}.fingerprint"


def test_the_denoiser_does_not_count(lab: Any, nano: Path, rebase: Callable[..., Path]) -> None:
    before = keys(lab)
    model = rebase()
    shutil.rmtree(model / "transformer")
    (model / "transformer").mkdir()
    shutil.copyfile(nano / "transformer" / "config.json", model / "transformer" / "config.json")
    assert keys(lab) == before


def test_another_family_is_another_entry(lab: Any, stub: None, rebase: Callable[..., Path]) -> None:
    rebase("QwenImageEditPlusPipeline")
    (reason,) = lab.cache().reasons
    assert reason == ("changed: settings.family, settings.processing.vl_pixels, settings.template_version")


def test_another_version_of_the_template(lab: Any, stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    newer = dataclasses.replace(facts.QWEN_IMAGE_EDIT, template_version="edit-next")
    monkeypatch.setitem(registry.PIPELINES, "QwenImageEditPipeline", newer)
    assert list(lab.cache().reasons) == ["changed: settings.template_version"]


def test_another_version_of_the_schema(lab: Any, stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """How pixels are made is no setting: a mended fault in it needs a new version here, or old entries stay."""
    monkeypatch.setattr(key, "SCHEMA", "cache-key/0")
    assert list(lab.cache().reasons) == ["changed: schema"]


def test_times_and_places_of_files_do_not_count(lab: Any) -> None:
    before = keys(lab)
    for path in (lab.root / "dataset").rglob("*.*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    lab.scan()
    assert keys(lab) == keys(lab, {"cache.cache_dir": "elsewhere"}) == before


def test_prompts_to_sample(lab: Any) -> None:
    before = keys(lab)
    job = lab.job({"validation.samples": SAMPLES})
    (prompt,) = [want for want in job.wants if want.split == "prompt"]
    assert (prompt.id, prompt.target, prompt.document["target"]) == ("prompt-0", None, None)
    assert changed(before, keys(lab, {"validation.samples": SAMPLES})) == {"prompt-0"}
    other = keys(lab, {"validation.samples": [{**SAMPLES[0], "prompt": "make it red"}]})
    assert other["prompt-0"] != prompt.key


def test_a_prompt_whose_picture_is_gone_is_named(lab: Any) -> None:
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
