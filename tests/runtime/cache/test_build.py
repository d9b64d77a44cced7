"""The cache phase: what it encodes, what it leaves alone, what it never loads."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from runtime import files
from runtime.cache import build, encode, roundtrip
from runtime.cache.store import Store
from runtime.data import images
from runtime.errors import CacheError, DataError
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.progress import Progress


def stamps(root: Path) -> dict[str, int]:
    return {p.as_posix(): p.stat().st_mtime_ns for p in root.rglob("*.safetensors")}


def test_what_an_entry_holds(lab: Any, held: Any, conforms: Any) -> None:
    """Batches of four: a view would be saved with the whole batch behind it."""
    lab.cache({"data.caption_dropout_rate": 0.1, "validation.guidance_scale": 2.0, "cache.batch_size": 4})
    manifest = held.store.manifest()
    conforms(manifest, "cache-manifest")
    assert manifest["counts"] == {"train": 8, "holdout": 3, "prompt": 0}
    for entry in manifest["entries"]:
        found = held.store.read(entry["folder"])
        conforms(held.store.entry(entry["folder"]), "cache-entry")
        extra = "empty_embeds" if entry["split"] == "train" else "negative_embeds"
        assert set(found) == {"target", "control_0", "prompt_embeds", extra}
        assert found["target"].shape == found["control_0"].shape == (16, 8, 8)
        assert found["prompt_embeds"].shape[1] == found[extra].shape[1]
        path = held.root / entry["folder"] / "tensors.safetensors"
        header = int.from_bytes(path.read_bytes()[:8], "little")
        assert path.stat().st_size == 8 + header + sum(t.numel() * t.element_size() for t in found.values())


def test_the_summary_counts_by_kind_what_lies_there(lab: Any, held: Any) -> None:
    summary = lab.cache({"data.caption_dropout_rate": 0.1})
    assert summary.tensors == {"latents": 11, "controls": 11, "embeddings": 11 + 8}
    every = [held.tensors(f"p{number}") for number in range(11)]
    embeds = sum(t.nbytes for one in every for name, t in one.items() if "embeds" in name)
    assert summary.bytes == {"latents": 11 * 4096, "controls": 11 * 4096, "embeddings": embeds}


def test_embeddings_of_one_prompt_depend_on_its_control(lab: Any) -> None:
    """The framework that this recipe grew from keys them by the text, and trains each on the last one's."""
    job = lab.job()
    same = [want for want in job.wants if want.document["prompt"] == "paint the circle red"]
    assert len(same) >= 3
    embeds = [job.store.read(want.folder)["prompt_embeds"] for want in same]
    for index, one in enumerate(embeds):
        for other in embeds[index + 1 :]:
            assert one.shape == other.shape and not torch.allclose(one, other, atol=1e-3)


def test_a_rerun_loads_no_model_opens_no_picture_and_writes_nothing(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {"prompt": "make it green", "images": ["dataset/control_images/p0.png"]}
    changes = {"validation.samples": [prompt]}
    lab.cache(changes)
    before = {path: path.stat().st_mtime_ns for path in lab.root.rglob("*") if path.is_file()}
    for owner, name in ((QwenImageEdit, "load_encoders"), (encode, "load"), (images, "load")):
        monkeypatch.setattr(owner, name, lambda *given, name=name, **named: pytest.fail(name))
    monkeypatch.setattr(images, "identify", _remembered(images.identify))
    summary = lab.cache(changes)
    assert (summary.entries, summary.built, summary.kept, summary.reasons) == (12, 0, 12, {})
    for own in (lab.root / "config.yaml", lab.workspace.index_path):  # the fixture's, and no evidence
        before.pop(own)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def _remembered(original: Any) -> Any:
    """The fixture's pictures are seconds old and not remembered; everybody's else are."""

    def identify(path: Path, name: str, index: Any) -> images.Identity:
        with Image.open(path) as picture:
            width, height = picture.size
        index.put(path, name, 0, 0, {})
        return images.Identity(
            size=path.stat().st_size, sha256=files.file_digest(path), width=width, height=height
        )

    return identify


def test_the_denoiser_is_never_loaded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import QwenImageTransformer2DModel

    shutil.rmtree(lab.root / "cache")
    for cls, name in ((QwenImageEdit, "load_denoiser"), (QwenImageTransformer2DModel, "from_pretrained")):
        monkeypatch.setattr(cls, name, lambda *given, **named: pytest.fail("loaded"))
    assert lab.cache().built == 11


def test_same_pictures_same_tensors(lab: Any, held: Any) -> None:
    before = held.tensors("p0")
    shutil.rmtree(lab.root / "cache")
    assert lab.cache().reasons == {"new": [want.id for want in lab.job().wants]}
    assert all(torch.equal(before[name], tensor) for name, tensor in held.tensors("p0").items())


def test_only_the_changed_sample_is_written(lab: Any, held: Any) -> None:
    before = stamps(held.root)
    images_of = lab.root / "dataset" / "training_images"
    shutil.copyfile(images_of / "p3.png", images_of / "p0.png")
    lab.scan()
    assert lab.cache().reasons == {"changed: target": ["p0"]}
    assert {path: stamp for path, stamp in stamps(held.root).items() if path in before} == before


def test_going_back_finds_the_earlier_entries(lab: Any) -> None:
    changes = {"data.processor.target_size": [32, 32]}
    summary = lab.cache(changes)
    assert (summary.built, summary.left_over) == (11, 11)
    assert lab.cache().built == 0
    assert lab.cache(changes).built == 0


def test_why_is_said_before_it_is_done(lab: Any, stub: None, capsys: pytest.CaptureFixture[str]) -> None:
    build.build(lab.job({"data.processor.target_size": [32, 32]}), Progress())
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("encoding")]
    assert len(lines) == 1
    assert re.fullmatch(
        r"encoding 11: changed: sizes\.controls, sizes\.target \(p0, p1, p10 and 8 more\)", lines[0]
    )


def test_why_is_still_known_after_a_kill(lab: Any, stub: None, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"data.processor.target_size": [32, 32]}
    with monkeypatch.context() as patch:
        patch.setattr(Store, "write", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            lab.cache(changes)
    assert list(lab.cache(changes).reasons) == ["changed: sizes.controls, sizes.target"]


@pytest.mark.parametrize("name", ["tensors.safetensors", "entry.json"])
@pytest.mark.parametrize("how", ["truncated", "empty", "foreign", "gone"])
def test_a_damaged_entry_is_named_and_built_again(lab: Any, held: Any, name: str, how: str) -> None:
    before = held.tensors("p1")
    path = held.folder("p1") / name
    if how == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "foreign":
        shutil.copyfile(held.folder("p2") / name, path)
    else:
        path.unlink()
    with pytest.raises(CacheError, match=r"the cache is damaged:\n  p1: ") as caught:
        build.open_for_fit(lab.job())
    assert caught.value.remedy == "finetune cache"
    summary = lab.cache()
    ((reason, ids),) = summary.reasons.items()
    assert (ids, summary.kept) == (["p1"], 10)
    assert name in reason or reason in ("new", "made for something else")
    assert all(torch.equal(before[key], tensor) for key, tensor in held.tensors("p1").items())
    build.open_for_fit(lab.job())


def test_files_of_others_are_never_touched(lab: Any, held: Any) -> None:
    own = [held.root / "notes.txt", held.root / "old" / "x.safetensors", held.folder("p1") / "y.bin"]
    for path in own:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"mine")
    (held.folder("p1") / "entry.json").unlink()
    lab.cache({"data.processor.target_size": [32, 32]})
    lab.cache()
    assert all(path.read_bytes() == b"mine" for path in own)


@pytest.mark.parametrize(("at_once", "kept"), [(1, 4), (2, 8)])
@pytest.mark.parametrize("part", ["text_encoder", "vae"])
def test_an_interruption_costs_the_batch_at_hand(
    lab: Any, monkeypatch: pytest.MonkeyPatch, part: str, at_once: int, kept: int
) -> None:
    changes = {"cache.batch_size": at_once}
    shutil.rmtree(lab.root / "cache")
    original, count = encode.encode, []

    def killed(family: Any, encoders: Any, config: Any, wants: Any, *reads: Any) -> Any:
        if reads and encode.loaded(encoders) == [part]:  # what is made again for the evidence has none
            count.append(1)
            if len(count) == 5:
                raise KeyboardInterrupt
        return original(family, encoders, config, wants, *reads)

    with monkeypatch.context() as patch:
        patch.setattr(encode, "encode", killed)
        with pytest.raises(KeyboardInterrupt):
            lab.cache(changes)
    assert files.read_json(lab.root / "cache" / "manifest.json")["complete"] is False
    with pytest.raises(CacheError, match="is not finished"):
        build.open_for_fit(lab.job(changes))
    summary = lab.cache(changes)
    first = part == "text_encoder"
    assert summary.prompts == (11 - kept if first else 0)
    assert (summary.built, summary.kept) == ((11, 0) if first else (11 - kept, kept))
    assert summary.pictures == 2 * summary.built
    assert not (lab.root / "cache" / ".parts").exists()


@pytest.mark.parametrize(
    ("owner", "name"),
    [(encode, "load"), (Store, "write"), (Store, "entry"), (roundtrip, "measure"), (roundtrip, "compare")],
)
def test_interrupted_anywhere_it_resumes(
    lab: Any, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    shutil.rmtree(lab.root / "cache")
    original, count = getattr(owner, name), []

    def interrupted(*given: Any, **named: Any) -> Any:
        count.append(1)
        if len(count) in (1, 3):
            raise KeyboardInterrupt
        return original(*given, **named)

    monkeypatch.setattr(owner, name, interrupted)
    interruptions = 0
    for _ in range(4):
        try:
            lab.cache()
            break
        except KeyboardInterrupt:
            interruptions += 1
    assert interruptions >= 1
    build.open_for_fit(lab.job())
    assert lab.workspace.evidence(roundtrip.NAME) is not None
    assert lab.cache().built == 0


def test_caching_and_training_twice(lab: Any) -> None:
    assert lab.cache().built == 0
    for _ in range(2):
        assert lab.fit({"train.max_train_steps": 2}).document["state"] == "completed"
    assert lab.cache().built == 0


def test_two_samples_of_equal_content(lab: Any, held: Any) -> None:
    """They share an entry; none is missing, none is built for ever."""
    for source, suffix in (("training_images", "png"), ("control_images", "png"), ("training_images", "txt")):
        path = lab.root / "dataset" / source
        shutil.copyfile(path / f"p1.{suffix}", path / f"p2.{suffix}")
    lab.scan()
    lab.cache()
    assert lab.cache().built == 0
    assert held.folder("p1") == held.folder("p2")
    assert len(lab.launch().batches.ids("train")) == len(lab.job().listed.of("train"))


def test_a_renamed_pair_and_another_holdout_need_no_encoding(lab: Any, held: Any) -> None:
    for kind, suffix in (("training_images", "png"), ("control_images", "png"), ("training_images", "txt")):
        path = lab.root / "dataset" / kind
        (path / f"p1.{suffix}").rename(path / f"first.{suffix}")
    lab.scan(holdout=2)
    assert lab.cache().built == 0
    assert held.folder("first").is_dir()
    assert held.store.manifest()["counts"] == {"train": 9, "holdout": 2, "prompt": 0}


def test_a_cache_outside_of_the_workspace(lab: Any, tmp_path: Path, conforms: Any) -> None:
    outside = tmp_path / "large disk" / "cache"
    changes = {"cache.cache_dir": str(outside)}
    assert lab.cache(changes).built == 11
    document = files.read_json(lab.workspace.evidence_path(roundtrip.NAME))
    conforms(document, "evidence")
    assert list(document["inputs"]["files"]) == ["external:cache/manifest.json"]
    assert lab.fit(changes).document["state"] == "completed"


def test_a_second_control_is_refused_for_a_family_of_one(lab: Any) -> None:
    control = lab.root / "dataset" / "control_images"
    shutil.copyfile(control / "p1.png", control / "p0_control_1.png")
    lab.scan()
    with pytest.raises(
        DataError, match=r"sample p0 has 2 controls; family qwen-image-edit takes 0 to 1"
    ) as caught:
        lab.job()
    assert "qwen-image-edit-plus" in caught.value.remedy


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"data.processor.target_size": [96, 96]}, r"sizes\.target: \[64, 64\] in the cache, \[96, 96\] now"),
        ({"data.processor.enable_bucket": True, "data.processor.target_size": [32, 32]}, r"\[32, 32\] now"),
        ({"data.processor.vl_pixels": 1024}, r"processing\.vl_pixels: 1048576 in the cache, 1024 now"),
        ({"cache.dtypes.vae": "bf16"}, r"encoders\.vae\.dtype: fp32 in the cache, bf16 now"),
        ({"data.caption_dropout_rate": 0.1}, r"empty_prompt: False in the cache, True now \("),
    ],
)
def test_a_fit_on_a_cache_of_other_settings_is_refused_by_name(
    lab: Any, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(CacheError, match=told) as caught:
        lab.launch(changes)
    assert caught.value.remedy == "finetune cache"
    assert not lab.project.exists()  # refused before a run is opened


def test_what_most_samples_differ_in_is_told_first(lab: Any) -> None:
    """Boxes follow sizes, each sample's its own; seven of them would push the one line that says it out."""
    for number in range(8):
        Image.new("RGB", (80 + number, 100)).save(lab.root / "dataset" / "training_images" / f"p{number}.png")
    lab.scan()
    lab.cache({"data.processor.target_size": [32, 64]})
    with pytest.raises(CacheError) as caught:
        build.open_for_fit(lab.job())
    assert re.search(r"samples:\n  sizes\.(target|controls): \[+32, 64\]+ in the cache", str(caught.value))


def test_a_full_disk_is_told_before_anything_is_encoded(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"data.processor.target_size": [32, 32]}
    monkeypatch.setattr(encode, "load", lambda *given: pytest.fail("loaded"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=build.SPARE_GIB * files.GIB))
    before = files.read_json(lab.root / "cache" / "manifest.json")
    with pytest.raises(CacheError, match=r"needs about 0\.00 GiB for 11 entries and 0\.5 GiB to spare"):
        lab.cache(changes)
    assert files.read_json(lab.root / "cache" / "manifest.json") == before
    job = lab.job(changes)
    needed = sum(build._expected_bytes(job, want) for want in job.wants)
    for free, refused in ((needed - 1, True), (needed + 1, False)):
        usage = SimpleNamespace(free=build.SPARE_GIB * files.GIB + free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        if refused:
            with pytest.raises(CacheError, match="are free in"):
                build.refuse_full_disk(job, job.wants)
        else:
            build.refuse_full_disk(job, job.wants)


@pytest.mark.parametrize(
    "changes", [{}, {"data.caption_dropout_rate": 0.5, "validation.guidance_scale": 3.0}]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_expected_bytes_are_near_the_written_ones(
    lab: Any, held: Any, changes: dict[str, Any], dtype: str
) -> None:
    wished = {**changes, "cache.dtypes.vae": dtype, "cache.dtypes.text_encoder": dtype}
    job = lab.job(wished)
    build.build(job, Progress(quiet=True))
    expected = sum(build._expected_bytes(job, want) for want in job.wants)
    written = sum((held.root / w.folder / "tensors.safetensors").stat().st_size for w in job.wants)
    assert written / 2 < expected < written * 2
