"""What a launch checks before it loads a denoiser or opens a run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from runtime import files
from runtime.config import load
from runtime.errors import CacheError, ConfigError, DataError, UserError
from runtime.training import loop, prepared


@pytest.fixture
def no_denoiser(monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.families.qwen_image_edit import QwenImageEdit

    monkeypatch.setattr(QwenImageEdit, "load_denoiser", lambda *given, **named: pytest.fail("loaded"))


@pytest.mark.usefixtures("no_denoiser")
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data.processor.target_size": [32, 64]}, "sizes.target: [64, 64] in the cache, [32, 64] now (p0"),
        (
            {"data.processor.controls_size": [32, 32]},
            "sizes.controls: [[64, 64]] in the cache, [[32, 32]] now",
        ),
        ({"data.processor.vl_pixels": 1024}, "processing.vl_pixels: 1048576 in the cache, 1024 now"),
        ({"data.max_prompt_tokens": 9}, "processing.max_prompt_tokens: 1024 in the cache, 9 now"),
        ({"cache.dtypes.text_encoder": "bf16"}, "encoders.text_encoder.dtype: fp32 in the cache, bf16 now"),
        ({"data.caption_dropout_rate": 0.1}, "does not fit for 8 of 11 samples:\n  empty_prompt: False"),
        ({"validation.guidance_scale": 4.0}, "does not fit for 3 of 11 samples:\n  negative_prompt: None"),
        ({"validation.negative_prompt": "ugly", "validation.guidance_scale": 2.0}, "in the cache, ugly now"),
    ],
)
def test_a_cache_for_other_settings_is_refused_by_name(lab: Any, changes: dict[str, Any], told: str) -> None:
    with pytest.raises(CacheError) as caught:
        lab.launch(changes)
    assert told in caught.value.message
    assert caught.value.remedy == "finetune cache"
    assert not lab.project.exists()


@pytest.mark.usefixtures("no_denoiser")
def test_no_cache(lab: Any) -> None:
    shutil.rmtree(lab.root / "cache")
    with pytest.raises(CacheError, match=r"manifest\.json is missing"):
        lab.launch()


@pytest.mark.usefixtures("no_denoiser")
def test_a_cache_that_was_not_finished(lab: Any) -> None:
    path = lab.root / "cache" / "manifest.json"
    files.write_json(path, {**files.read_json(path), "complete": False})
    with pytest.raises(CacheError, match="is not finished"):
        lab.launch()


def entry(root: Path, name: str) -> Path:
    listed = files.read_json(root / "cache" / "manifest.json")["entries"]
    return root / "cache" / str(next(e["folder"] for e in listed if e["id"] == name))


def truncate(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def overwrite(folder: Path) -> None:
    path = folder / "tensors.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.usefixtures("no_denoiser")
@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (shutil.rmtree, "not there"),
        (truncate, r"tensors.safetensors has \d+ bytes, \d+ were written"),
        (overwrite, "tensors.safetensors has changed since it was written"),
        (lambda folder: (folder / "entry.json").write_bytes(b""), "entry.json is damaged"),
        (lambda folder: (folder / "tensors.safetensors").unlink(), "tensors.safetensors is missing"),
    ],
)
def test_a_damaged_entry_is_found_before_the_first_step(lab: Any, spoil: Any, told: str) -> None:
    """Not in the middle of a night's run, as a traceback of the reader."""
    spoil(entry(lab.root, "p1"))
    with pytest.raises(CacheError, match=f"p1: {told}") as caught:
        lab.launch()
    assert caught.value.remedy == "finetune cache"
    assert not lab.project.exists()


@pytest.mark.usefixtures("no_denoiser")
def test_a_dataset_that_changed_is_refused(lab: Any) -> None:
    (lab.root / "dataset" / "training_images" / "p0.txt").write_text("other words", encoding="utf-8")
    with pytest.raises(DataError, match="the dataset changed since it was scanned"):
        lab.launch()


@pytest.mark.parametrize(
    ("changes", "error", "told"),
    [
        ({"model.lora.target_modules": ["to_queue"]}, UserError, "to_queue"),
        ({"optimizer.class_path": "torch.optim.Nothing"}, ConfigError, r"torch\.optim\.Nothing"),
        ({"hardware.device": "xpu"}, UserError, "device xpu is not there"),
        ({"model.pretrained_model_name_or_path": "dataset"}, UserError, "model_index.json"),
        ({"model.pretrained_model_name_or_path": "external:nowhere"}, UserError, "not known on this machine"),
    ],
)
def test_what_can_not_be_trained_opens_no_run(
    lab: Any, changes: dict[str, Any], error: type[UserError], told: str
) -> None:
    with pytest.raises(error, match=told):
        lab.launch(changes)
    assert not lab.project.exists()


def test_run_json_says_what_is_trained_on_what(lab: Any, conforms: Any, nano: Path) -> None:
    launched = lab.launch()
    document = files.read_json(launched.run.path / "run.json")
    conforms(document, "run")
    assert (document["kind"], document["state"], document["done_steps"]) == ("full", "running", 0)
    assert document["config_digest"] == files.document_digest(document["config"])
    assert document["config"] == load.load_config(lab.workspace.config_path).raw
    manifest = files.read_json(lab.root / "cache" / "manifest.json")
    assert document["cache_digest"] == files.document_digest(
        [entry for entry in manifest["entries"] if entry["split"] == "train"]
    )
    assert document["dataset_digest"] == manifest["dataset_digest"]
    assert document["model"] == {
        "name": "external:model",
        "family": "qwen-image-edit",
        "fingerprints": {"transformer": files.weights_fingerprint(nano / "transformer")},
    }
    assert document["trainable"]["tensors"] == 16
    assert document["trainable"]["parameters"] == 2 * 4 * 2 * 4 * 128  # blocks, linears, A and B, rank, width
    assert document["trainable"]["scale"] == 2.0
    assert "auto" not in str(document["resolved"])
    assert document["choices"]["model.quantize"]["value"] == "none"
    assert str(lab.root) not in (launched.run.path / "run.json").read_text(encoding="utf-8")


def test_the_base_counts_as_many_parameters_in_nf4(lab: Any) -> None:
    plain, packed = (
        lab.launch({"model.quantize": quantize}).run.document["trainable"] for quantize in ("none", "nf4")
    )
    assert plain["base_parameters"] == packed["base_parameters"]
    assert packed["base_gib"] < 0.7 * plain["base_gib"]


@pytest.mark.parametrize(
    ("train", "steps"),
    [
        ({"max_train_steps": 40}, 5),
        ({"max_train_steps": 2}, 2),
        ({"max_train_steps": None, "num_epochs": 3}, 5),
    ],
)
def test_smoke_overrides(lab: Any, train: dict[str, Any], steps: int) -> None:
    config = lab.configure({f"train.{name}": value for name, value in train.items()}).config
    assert prepared.smoke_overrides(config) == {
        "train.max_train_steps": steps,
        "train.num_epochs": None,
        "train.checkpointing_steps": steps,
    }


def test_ema_of_a_constant_is_that_constant_from_the_first_step_on() -> None:
    state = [0.0, 0.0]
    for _ in range(5):
        state, value = loop.ema(state, 3.0)
        assert value == pytest.approx(3.0)
