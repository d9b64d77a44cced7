"""The cache phase: what it encodes, what it leaves alone, what it never loads."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from runtime import files
from runtime.cache import build, encode
from runtime.cache.store import Store
from runtime.data import images
from runtime.errors import DataError
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.progress import Progress


def quiet() -> Progress:
    return Progress(quiet=True)


def folder(lab: Any, name: str) -> Path:
    entries = Store(lab.root / "cache").manifest()["entries"]
    return lab.root / "cache" / str(next(e["folder"] for e in entries if e["id"] == name))


def tensors(lab: Any, name: str) -> dict[str, torch.Tensor]:
    """Copies: what is read is mapped, and these tests overwrite files in place."""
    return {key: t.clone() for key, t in Store(lab.root / "cache").read(folder(lab, name).name).items()}


def stamps(root: Path) -> dict[str, int]:
    return {p.as_posix(): p.stat().st_mtime_ns for p in root.rglob("*.safetensors")}


def test_what_an_entry_holds(lab: Any, conforms: Any) -> None:
    lab.cache({"data.caption_dropout_rate": 0.1, "validation.guidance_scale": 2.0})
    manifest = Store(lab.root / "cache").manifest()
    conforms(manifest, "cache-manifest")
    assert manifest["counts"] == {"train": 8, "holdout": 3, "prompt": 0}
    for entry in manifest["entries"]:
        found = Store(lab.root / "cache").read(entry["folder"])
        conforms(Store(lab.root / "cache").entry(entry["folder"]), "cache-entry")
        extra = "empty_embeds" if entry["split"] == "train" else "negative_embeds"
        assert set(found) == {"target", "control_0", "prompt_embeds", extra}
        assert found["target"].shape == found["control_0"].shape == (16, 8, 8)
        assert found["prompt_embeds"].shape[1] == found[extra].shape[1]
        size = sum(t.numel() * t.element_size() for t in found.values())
        written = entry["files"]["tensors.safetensors"]["size"]
        assert size <= written <= size + 1024  # the header


def test_embeddings_of_one_prompt_depend_on_its_control(lab: Any) -> None:
    """The framework that this recipe grew from keys them by the text, and trains each on the last one's."""
    job = lab.job()
    same = [want for want in job.wants if want.document["prompt"] == "paint the circle red"]
    assert len(same) >= 3
    embeds = [job.store.read(want.folder)["prompt_embeds"] for want in same]
    for index, one in enumerate(embeds):
        for other in embeds[index + 1 :]:
            assert one.shape == other.shape and not torch.allclose(one, other, atol=1e-3)


def test_a_rerun_loads_no_model_and_writes_nothing(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.stat().st_mtime_ns for path in lab.root.rglob("*") if path.is_file()}
    monkeypatch.setattr(QwenImageEdit, "load_encoders", lambda *given, **named: pytest.fail("loaded"))
    summary = lab.cache()
    assert (summary.entries, summary.built, summary.kept, summary.reasons) == (11, 0, 11, {})
    before.pop(lab.root / "config.yaml")  # which the fixture writes
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_denoiser_is_never_loaded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import QwenImageTransformer2DModel

    shutil.rmtree(lab.root / "cache")
    for cls, name in ((QwenImageEdit, "load_denoiser"), (QwenImageTransformer2DModel, "from_pretrained")):
        monkeypatch.setattr(cls, name, lambda *given, **named: pytest.fail("loaded"))
    assert lab.cache().built == 11


def test_same_pictures_same_tensors(lab: Any) -> None:
    before = tensors(lab, "p0")
    shutil.rmtree(lab.root / "cache")
    lab.cache()
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors(lab, "p0").items())


@pytest.mark.parametrize(
    "what", ["training_images/p0.png", "control_images/p0.png", "training_images/p0.txt"]
)
def test_only_the_changed_sample_is_built(lab: Any, what: str) -> None:
    before = stamps(lab.root / "cache")
    shutil.copyfile(lab.root / "dataset" / what.replace("p0", "p3"), lab.root / "dataset" / what)
    lab.scan()
    summary = lab.cache()
    assert (summary.built, summary.kept, summary.left_over) == (1, 10, 1)
    key = {"training_images/p0.png": "target", "control_images/p0.png": "controls"}.get(what, "prompt")
    assert summary.reasons == {f"changed: {key}": 1}
    assert {path: stamp for path, stamp in stamps(lab.root / "cache").items() if path in before} == before


def test_going_back_finds_the_earlier_entries(lab: Any) -> None:
    changes = {"data.processor.target_size": [32, 32]}
    assert lab.cache(changes).built == 11
    assert lab.cache().built == 0
    assert lab.cache(changes).built == 0


def test_reason_of_a_changed_setting_names_it(lab: Any) -> None:
    summary = lab.cache({"data.processor.target_size": [32, 32]})
    assert summary.reasons == {
        "changed: settings.processing.controls_size, settings.processing.target_size": 11
    }
    assert summary.left_over == 11


@pytest.mark.parametrize("name", ["tensors.safetensors", "entry.json"])
@pytest.mark.parametrize("how", ["truncated", "empty", "foreign", "gone"])
def test_a_damaged_entry_is_built_again(lab: Any, name: str, how: str) -> None:
    before = tensors(lab, "p1")
    path = folder(lab, "p1") / name
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        shutil.copyfile(folder(lab, "p2") / name, path)
    else:
        path.unlink()
    summary = lab.cache()
    assert (summary.built, summary.kept) == (1, 10)
    assert all(torch.equal(before[key], tensor) for key, tensor in tensors(lab, "p1").items())


def test_files_of_others_are_never_touched(lab: Any) -> None:
    own = [
        lab.root / "cache" / "notes.txt",
        lab.root / "cache" / "old" / "x.safetensors",
        folder(lab, "p1") / "y.bin",
    ]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    (folder(lab, "p1") / "entry.json").unlink()
    lab.cache({"data.processor.target_size": [32, 32]})
    lab.cache()
    assert all(path.read_bytes() == b"mine" for path in own)


def test_a_kill_in_the_middle_costs_the_sample_at_hand(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.rmtree(lab.root / "cache")
    original, count = build.encode_entry, []

    def killed(*given: Any) -> Any:
        count.append(1)
        if len(count) == 5:
            raise KeyboardInterrupt
        return original(*given)

    with monkeypatch.context() as patch:
        patch.setattr(build, "encode_entry", killed)
        with pytest.raises(KeyboardInterrupt):
            lab.cache()
    assert files.read_json(lab.root / "cache" / "manifest.json")["complete"] is False
    summary = lab.cache()
    assert (summary.built, summary.kept) == (7, 4)


def test_two_samples_of_equal_content(lab: Any) -> None:
    """They share an entry; none is missing, none is built for ever."""
    for source, suffix in (("training_images", "png"), ("control_images", "png"), ("training_images", "txt")):
        path = lab.root / "dataset" / source
        shutil.copyfile(path / f"p1.{suffix}", path / f"p2.{suffix}")
    lab.scan()
    lab.cache()
    assert lab.cache().built == 0
    assert folder(lab, "p1") == folder(lab, "p2")
    assert len(lab.launch().batches.ids("train")) == 8


def test_a_renamed_pair_and_another_holdout_need_no_encoding(lab: Any) -> None:
    for kind, suffix in (("training_images", "png"), ("control_images", "png"), ("training_images", "txt")):
        path = lab.root / "dataset" / kind
        (path / f"p1.{suffix}").rename(path / f"first.{suffix}")
    lab.scan(holdout=2)
    assert lab.cache().built == 0
    assert folder(lab, "first").is_dir()
    assert Store(lab.root / "cache").manifest()["counts"] == {"train": 9, "holdout": 2, "prompt": 0}


def test_roundtrip_is_evidence_that_follows_the_schema(lab: Any, conforms: Any) -> None:
    document = files.read_json(lab.workspace.evidence_path("07-cache-roundtrip"))
    conforms(document, "evidence")
    assert document["complete"] is True
    assert document["inputs"]["files"] == {
        "cache/manifest.json": files.file_digest(lab.root / "cache" / "manifest.json")
    }
    data = document["data"]
    assert data["manifest_digest"] == files.document_digest(Store(lab.root / "cache").manifest()["entries"])
    assert len(data["samples"]) == build.ROUNDTRIP_SAMPLES
    for sample in data["samples"]:
        assert max(sample["embeds_error"], sample["latents_error"]) == 0.0
        assert sample["decoded_psnr_db"] > 25  # the embedded VAE reaches 35 on such pictures


def test_roundtrip_tells_an_entry_with_the_tensors_of_another(lab: Any) -> None:
    """Whole, listed, of the right shape, and wrong: what digests alone can't see."""
    job = lab.job()
    sample = build._compare(job, encode.load(job.family, job.model, job.config), job.wants[0])
    assert sample["embeds_error"] == 0.0
    job.store.write(job.wants[0], job.store.read(job.wants[1].folder))
    sample = build._compare(job, encode.load(job.family, job.model, job.config), job.wants[0])
    assert sample["latents_error"] > build.ROUNDTRIP_TOLERANCE


def test_roundtrip_is_made_again_when_the_cache_changed_or_it_was_not_finished(lab: Any) -> None:
    path = lab.workspace.evidence_path("07-cache-roundtrip")
    before = files.read_json(path)
    lab.cache()
    assert files.read_json(path) == before
    lab.workspace.begin_evidence("07-cache-roundtrip", "finetune cache")
    lab.cache()
    assert files.read_json(path)["complete"] is True
    lab.cache({"data.caption_dropout_rate": 0.1})
    assert files.read_json(path)["data"]["manifest_digest"] != before["data"]["manifest_digest"]


def test_a_cache_outside_of_the_workspace(lab: Any, tmp_path: Path, conforms: Any) -> None:
    outside = tmp_path / "large disk" / "cache"
    changes = {"cache.cache_dir": str(outside)}
    assert lab.cache(changes).built == 11
    document = files.read_json(lab.workspace.evidence_path("07-cache-roundtrip"))
    conforms(document, "evidence")
    assert list(document["inputs"]["files"]) == ["external:cache/manifest.json"]
    assert lab.fit(changes).document["state"] == "completed"


def test_a_second_control_is_refused_for_a_family_of_one(lab: Any) -> None:
    control = lab.root / "dataset" / "control_images"
    shutil.copyfile(control / "p1.png", control / "p0_control_1.png")
    lab.scan()
    with pytest.raises(
        DataError, match=r"sample p0 has 2 controls; family qwen-image-edit takes 1 to 1"
    ) as caught:
        lab.job()
    assert "qwen-image-edit-plus" in caught.value.remedy


def test_grey_black_and_white_reach_the_vae_in_minus_one_to_one(lab: Any) -> None:
    """Pixels in 0..1 give a washed-out adapter and no error."""
    job = lab.job()
    encoders = encode.load(job.family, job.model, job.config)
    for value in (0, 128, 255):
        picture = Image.new("RGB", (64, 64), (value, value, value))
        picture.save(lab.root / "flat.png")
        want = job.wants[0]
        flat = type(want)(
            id="flat",
            split="train",
            document=want.document,
            key=want.key,
            target=lab.root / "flat.png",
            controls=want.controls,
        )
        latents = build.encode_entry(job, encoders, flat)["target"]
        pixels = torch.from_numpy(images.to_array(picture))
        assert float(pixels.min()) == pytest.approx(value / 127.5 - 1, abs=1e-6)
        reference = encoders.pipeline.vae.encode(pixels[None, :, None]).latent_dist.mode()[0, :, 0]
        config = encoders.pipeline.vae.config
        mean, std = (torch.tensor(x)[:, None, None] for x in (config.latents_mean, config.latents_std))
        assert torch.allclose(latents, (reference - mean) / std, atol=1e-5)
        decoded = job.family.decode(encoders.pipeline.vae, latents[None])[0]
        assert float((decoded - pixels).abs().mean()) < 0.1


@pytest.mark.parametrize(
    ("size", "area", "expected"),
    [((64, 64), 1024 * 1024, (64, 64)), ((64, 64), 1024, (32, 32)), ((128, 32), 1024, (64, 16))],
)
def test_what_the_text_encoder_sees_is_shrunk_never_enlarged(
    size: tuple[int, int], area: int, expected: tuple[int, int]
) -> None:
    assert encode._for_text_encoder(Image.new("RGB", size), area).size == expected
