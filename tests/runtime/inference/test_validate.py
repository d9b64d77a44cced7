"""Base and adapter over the held-out samples of a cache."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from runtime import files
from runtime.errors import UserError
from runtime.inference import heldout, validate
from runtime.progress import Progress
from runtime.training import checkpoints

SAMPLES = [{"prompt": "make it green", "images": ["dataset/control_images/p0.png"]}]


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss on held-out samples has tests of its own."""
    monkeypatch.setattr(heldout, "DRAWS", 2)


def paint(lab: Any, wanted: str = "last", changes: dict[str, Any] | None = None) -> validate.Result:
    checkpoint = validate.find_checkpoint(lab.project, wanted, lab.root)
    return validate.validate(lab.workspace, lab.configure(changes), checkpoint, Progress(quiet=True))


def file_of(sample: dict[str, Any]) -> str:
    return Path(sample["pictures"]["base"]["path"]).name


def pixels(path: Path) -> Any:
    with Image.open(path) as picture:
        return np.asarray(picture).astype(int)


def test_every_held_out_sample_and_prompt_is_painted(lab: Any, conforms: Any) -> None:
    changes = {"validation.samples": SAMPLES}
    lab.cache(changes)
    run = lab.fit(changes)
    result = paint(lab, changes=changes)
    document = files.read_json(lab.workspace.evidence_path("08-validation"))
    conforms(document, "evidence")
    assert document["complete"] is True and document["data"] == result.data
    assert {sample["id"] for sample in result.data["samples"]} == {
        *(
            e["id"]
            for e in files.read_json(lab.root / "cache" / "manifest.json")["entries"]
            if e["split"] == "holdout"
        ),
        "prompt-0",
    }
    assert result.run == run.path and result.grid == run.path / "validation" / "grid.png"
    for sample in result.data["samples"]:
        for name in ("control", "base", "adapter"):
            assert pixels(run.path / "validation" / name / file_of(sample)).shape == (64, 64, 3)
        target = run.path / "validation" / "target" / file_of(sample)
        assert target.is_file() == (sample["id"] != "prompt-0")
    assert pixels(result.grid).shape[1] > 4 * 192


def test_the_adapter_changes_the_picture_and_the_base_stays(lab: Any) -> None:
    run = lab.fit({"optimizer.init_args.lr": 0.05})
    result = paint(lab)
    folder = run.path / "validation"
    first = {
        (name, file_of(sample)): pixels(folder / name / file_of(sample))
        for name in ("base", "adapter")
        for sample in result.data["samples"]
    }
    for sample in result.data["samples"]:
        assert np.abs(first["base", file_of(sample)] - first["adapter", file_of(sample)]).max() > 2
    other = lab.fit({"optimizer.init_args.lr": 0.02})
    paint(lab)
    for sample in result.data["samples"]:
        again = pixels(other.path / "validation" / "base" / file_of(sample))
        assert np.array_equal(again, first["base", file_of(sample)])


def test_painting_twice_gives_the_same_pictures(lab: Any) -> None:
    run = lab.fit()
    paint(lab)
    before = {path: files.file_digest(path) for path in (run.path / "validation").rglob("*.png")}
    paint(lab)
    assert {path: files.file_digest(path) for path in before} == before


def test_the_embedded_base_edits(lab: Any, tmp_path: Path) -> None:
    """The whole way of a prompt: encode, sample, decode, with the base that was trained to recolour."""
    from runtime import demo
    from runtime.demo import shapes

    base = Path(demo.__file__).parent / "base"
    files.write_json(lab.workspace.local_path, {"external": {"model": str(base)}})
    shape = shapes.Shape(kind="circle", colour="blue", x=32.0, y=32.0, radius=18.0)
    shapes.draw(shapes.Scene(background="white", shapes=(shape,))).save(lab.root / "blue.png")
    changes = {
        "validation.samples": [{"prompt": "paint the circle red", "images": ["blue.png"]}],
        "validation.num_inference_steps": 8,
        "train.max_train_steps": 1,
        "train.checkpointing_steps": 1,
    }
    lab.cache(changes)
    run = lab.fit(changes)
    result = paint(lab, changes=changes)
    (name,) = [file_of(sample) for sample in result.data["samples"] if sample["id"] == "prompt-0"]
    painted = pixels(run.path / "validation" / "base" / name)
    assert np.abs(painted[24:40, 24:40].mean((0, 1)) - shapes.COLOURS["red"]).max() < 40
    assert np.abs(painted[:6].mean((0, 1)) - shapes.COLOURS["white"]).max() < 20


def test_guidance_uses_the_cached_negative_prompt(lab: Any) -> None:
    run = lab.fit()
    paint(lab)
    before = {path: pixels(path) for path in (run.path / "validation" / "base").iterdir()}
    changes = {"validation.guidance_scale": 4.0}
    lab.cache(changes)
    result = paint(lab, changes=changes)
    manifest = files.read_json(lab.root / "cache" / "manifest.json")["entries"]
    assert {file_of(sample) for sample in result.data["samples"]} == {
        f"{entry['folder']}.png" for entry in manifest if entry["split"] == "holdout"
    }
    after = [pixels(run.path / "validation" / "base" / file_of(sample)) for sample in result.data["samples"]]
    assert not any(np.array_equal(one, other) for one, other in zip(before.values(), after, strict=True))


def test_which_checkpoint(lab: Any) -> None:
    run = lab.fit({"train.max_train_steps": 5, "train.checkpointing_steps": 2})
    lab.fit(smoke=True)
    best = files.read_json(run.path / "run.json")["best"]["checkpoint"]
    find = validate.find_checkpoint
    assert find(lab.project, "best", lab.root) == run.path / best
    assert find(lab.project, "last", lab.root).name == "checkpoint-1-5"
    plain = checkpoints.plains(run.path)[0]
    assert find(lab.project, plain.relative_to(lab.root).as_posix(), lab.root) == plain
    shutil.rmtree(run.path / best)
    assert find(lab.project, "best", lab.root).name in ("checkpoint-1-5", "checkpoint-last-1-5-last")


@pytest.mark.parametrize(
    ("wanted", "told"),
    [("best", "no full run"), ("last", "no full run"), ("outputs/x", "holds no pytorch_lora")],
)
def test_no_checkpoint(lab: Any, wanted: str, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        validate.find_checkpoint(lab.project, wanted, lab.root)
    assert caught.value.remedy.startswith("finetune ")


def test_a_sample_that_changed_since_it_was_cached(lab: Any) -> None:
    lab.fit()
    held = next(
        e["id"]
        for e in files.read_json(lab.root / "cache" / "manifest.json")["entries"]
        if e["split"] == "holdout"
    )
    (lab.root / "dataset" / "training_images" / f"{held}.txt").write_text("other words", encoding="utf-8")
    lab.scan()
    with pytest.raises(UserError, match=f"{held} changed since") as caught:
        paint(lab)
    assert caught.value.remedy == "finetune cache"


def test_a_new_prompt_that_is_not_cached_is_not_passed_over(lab: Any) -> None:
    lab.fit()
    with pytest.raises(UserError, match="prompt-0") as caught:
        paint(lab, changes={"validation.samples": SAMPLES})
    assert caught.value.remedy == "finetune cache"


def test_the_denoiser_alone_is_needed(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from runtime.families.qwen_image_edit import QwenImageEdit

    lab.fit()
    monkeypatch.setattr(QwenImageEdit, "load_encoders", lambda *given, **named: pytest.fail("loaded"))
    assert len(paint(lab).data["samples"]) == 3
