"""Pairs of losses, base and adapter, at the same questions."""

from pathlib import Path
from typing import Any

import pytest

from runtime.config.resolve import resolve
from runtime.inference import heldout, sampler
from runtime.inference.painter import Painter


@pytest.fixture
def painter(lab: Any) -> Painter:
    """With an adapter that learned something."""
    run = lab.fit({"optimizer.init_args.lr": 0.05})
    job = lab.job()
    config = resolve(lab.workspace, lab.configure().config).config
    return Painter(job.family, job.model, config, run.path / "checkpoint-1-6")


def tensors(lab: Any) -> tuple[str, dict[str, Any]]:
    store = lab.job().store
    entry = next(e for e in store.manifest()["entries"] if e["split"] == "holdout")
    return entry["id"], store.read(entry["folder"])


def test_each_line_asks_base_and_adapter_the_same(lab: Any, painter: Painter) -> None:
    name, found = tensors(lab)
    lines = heldout.losses(painter, name, found, seed=42)
    assert lines == heldout.losses(painter, name, found, seed=42)
    assert len(lines) == len({line["noise"] for line in lines}) == heldout.DRAWS
    sigmas = [line["sigma"] for line in lines]
    assert sigmas == sorted(sigmas) and 0 < sigmas[0] < 0.05 and 0.95 < sigmas[-1] < 1
    assert all(line["base"] > 0 and line["base"] != line["adapter"] for line in lines)


def test_questions_depend_on_seed_and_sample(
    lab: Any, painter: Painter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heldout, "DRAWS", 2)
    name, found = tensors(lab)
    noises = [
        {line["noise"] for line in heldout.losses(painter, label, found, seed=seed)}
        for label, seed in ((name, 42), (name, 7), ("another", 42))
    ]
    assert len(set.union(*noises)) == 6


def task(name: str) -> sampler.Task:
    return sampler.Task(name=name, size=(64, 64), seed=1, steps=2, guidance=1.0)


def test_a_zeroed_adapter_answers_as_the_base_and_comes_back(lab: Any, painter: Painter) -> None:
    name, found = tensors(lab)
    answers = {}
    for variant in ("base", "zero", "adapter"):
        with painter.variant(variant):
            answers[variant] = painter.sample(task(name), found)[0]
    assert (answers["base"] == answers["zero"]).all()
    assert not (answers["base"] == answers["adapter"]).all()
    with pytest.raises(RuntimeError, match="inside"), painter.variant("zero"):
        raise RuntimeError("inside")
    again = painter.sample(task(name), found)[0]
    assert (again == answers["adapter"]).all()


def test_without_a_checkpoint_every_variant_is_the_base(lab: Any, nano: Path) -> None:
    job = lab.job()
    config = resolve(lab.workspace, lab.configure().config).config
    bare = Painter(job.family, job.model, config, None)
    name, found = tensors(lab)
    pictures = []
    for variant in ("base", "adapter"):
        with bare.variant(variant):
            pictures.append(bare.sample(task(name), found)[0])
    assert (pictures[0] == pictures[1]).all()
