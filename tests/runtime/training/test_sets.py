"""Several sources in one run: repeats, a regularisation set, masks, buckets, captions to pick from."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from runtime import files
from runtime.commands.init import write_target
from runtime.data import reading
from runtime.training import loop

SETS = """
[[datasets]]
folder = "dataset"
num_repeats = 2
caption_lines = true
[[datasets]]
name = "held"
image_directory = "held"
regularisation = true
resolution = [96, 64]
"""


@pytest.fixture
def sets(lab: Any) -> Any:
    """`lab` with a dataset file: its pairs twice an epoch, one masked, and four pictures of another shape."""
    held = lab.root / "held"
    held.mkdir()
    for index in range(4):
        Image.new("RGB", (120, 80), (60 * index, 90, 200)).save(held / f"h{index}.png")
        (held / f"h{index}.txt").write_text(f"a plain sheet {index}", encoding="utf-8")
    mask = Image.new("L", (32, 32))
    mask.paste(255, (0, 0, 16, 32))
    mask.save(lab.root / "dataset" / "control_images" / "p5_mask.png")
    (lab.root / "dataset" / "training_images" / "p5.txt").write_text("red\nblue\n", encoding="utf-8")
    (lab.root / "sets.toml").write_text(SETS, encoding="utf-8")
    write_target(lab.workspace, model=None, dataset=str(lab.root / "sets.toml"), device=None)
    found = reading.build(lab.workspace, "sets.toml", 3)
    lab.workspace.begin_evidence("02-dataset", "test").write(inputs={}, data=found.to_json())
    lab.cache()
    return lab


def lines(path: Path) -> list[dict[str, Any]]:
    return files.read_json_lines(path / "metrics.jsonl")


def test_an_epoch_of_several_sets(sets: Any) -> None:
    run = sets.fit({"train.max_train_steps": None, "train.num_epochs": 2})
    seen = Counter(name for line in lines(run.path) for name in line["samples"])
    assert {name: count for name, count in seen.items() if name.startswith("held/")} == {
        f"held/h{index}": 2 for index in range(4)
    }
    own = [count for name, count in seen.items() if name.startswith("dataset/")]
    assert own == [4] * len(own) and len(own) == 8
    buckets = {line["bucket"] for line in lines(run.path)}
    assert buckets == {"64x64+64x64", "64x96"}
    probe = files.read_json_lines(run.path / "probe.jsonl")[-1]
    assert all(item["sample"].startswith("dataset/") for item in probe["items"])


def test_a_regularisation_set_holds_the_base_and_costs_nothing_at_the_start(
    sets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With lora_B at zero base and adapter agree; later they don't, and the loss pulls them together."""
    session = sets.launch()
    losses: dict[bool, list[float]] = {True: [], False: []}
    original = type(session.objective).step_losses

    def watched(objective: Any, predict: Any, base: Any, batch: Any, draw: Any) -> torch.Tensor:
        found = original(objective, predict, base, batch, draw)
        losses[batch.regularisation] += found.tolist()
        return found

    monkeypatch.setattr(type(session.objective), "step_losses", watched)
    first = next(w for w in session.batches.windows(1, 99, 1) if w[0].regularisation)
    found, _ = loop._gradients(session, 1, first)
    assert found.tolist() == [0.0] * len(first[0].ids)
    session.trained.optimizer.zero_grad()
    for step, window in enumerate(session.batches.windows(1, 12, 1), 1):
        loop._gradients(session, step, window)
        session.trained.optimizer.step()
        session.trained.optimizer.zero_grad()
    assert min(losses[False]) > 0.0 and max(losses[True]) > 0.0
    assert session.trained.adapter.parameters()[0].requires_grad


def test_a_first_step_of_regularisation_alone_is_no_run_without_gradient(sets: Any) -> None:
    """Its loss and gradient are zero by nature; the first step that learns is what must have one."""
    session = sets.launch({"data.batch_size": 1})
    held = next(w for w in session.batches.windows(1, 99, 1) if w[0].regularisation)
    own = next(w for w in session.batches.windows(1, 99, 1) if not w[0].regularisation)
    cursor = loop.Cursor(step=0, epoch=0, loss_ema=[0.0, 0.0], saved_step=0, not_finite=[], proven=False)
    assert loop._step(session, cursor, held)["grad_norm"] == 0.0 and not cursor.proven
    assert loop._step(session, cursor, own)["grad_norm"] > 0.0 and cursor.proven


def test_a_mask_reaches_the_loss(sets: Any) -> None:
    session = sets.launch({"data.batch_size": 8})
    masked = [w[0] for w in session.batches.windows(1, 30, 1) if w[0].mask is not None]
    assert {batch.ids for batch in masked} == {("dataset/p5",)} or all(
        set(batch.ids) == {"dataset/p5"} for batch in masked
    )
    mask = masked[0].mask
    assert mask is not None and mask.shape[-3:] == (1, 8, 8)
    assert bool((mask[..., :4] == 1).all()) and bool((mask[..., 4:] == 0).all())


def test_captions_are_picked_by_epoch_and_time(sets: Any) -> None:
    session = sets.launch({"data.batch_size": 1})
    held = {
        window[0].conditioning.embeds.sum().item()
        for window in session.batches.windows(1, 100, 1)
        if window[0].ids == ("dataset/p5",)
    }
    assert len(held) == 2


def test_another_number_of_repeats_is_another_training(sets: Any) -> None:
    from runtime.errors import ResumeError

    sets.fit({"train.max_train_steps": 2, "train.checkpointing_steps": 2})
    text = (sets.root / "sets.toml").read_text(encoding="utf-8").replace("num_repeats = 2", "num_repeats = 3")
    (sets.root / "sets.toml").write_text(text, encoding="utf-8")
    found = reading.build(sets.workspace, "sets.toml", 3)
    sets.workspace.begin_evidence("02-dataset", "test").write(inputs={}, data=found.to_json())
    assert sets.cache().built == 0
    with pytest.raises(ResumeError, match="dataset: "):
        sets.launch({"train.max_train_steps": 4}, resume="latest")


def test_the_manifest_is_that_of_the_schema(sets: Any, conforms: Any) -> None:
    path = sets.workspace.evidence_path("02-dataset")
    conforms(json.loads(path.read_text(encoding="utf-8")), "evidence")
