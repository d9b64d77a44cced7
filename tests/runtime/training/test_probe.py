"""The probe asks the same questions at every measurement."""

from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.cache.store import Store
from runtime.data.order import Item, Order, Share
from runtime.families.qwen_image_edit import QwenImageEdit
from runtime.index import Index
from runtime.training.batches import Batches
from runtime.training.objective import FlowMatching
from runtime.training.probe import Probe
from runtime.training.sigmas import Sigmas


def probe(root: Path, samples: int = 8, count: int = 4, seed: int = 42, sampling: str = "sigmoid") -> Probe:
    store = Store(root / "cache", Index(path=root / "index.json"))
    items = [
        Item(id=entry["id"], source="a", bucket=64)
        for entry in store.manifest()["entries"]
        if entry["split"] == "train"
    ]
    order = Order(items=items, shares={"a": Share()}, seed=seed, shuffle=True)
    batches = Batches(store, order, caption_dropout=0.0)
    objective = FlowMatching(family=QwenImageEdit(), sigmas=Sigmas(sampling=sampling), seed=seed)
    return Probe(batches, objective, samples=samples, count=count)


def zero(noisy: torch.Tensor, sigma: torch.Tensor, told: Any) -> torch.Tensor:
    return torch.zeros_like(noisy)


def questions(line: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [(item["sample"], item["split"], item["sigma"], item["noise"]) for item in line["items"]]


def test_same_questions_at_every_step(prepared: Path, conforms: Any) -> None:
    first, later = probe(prepared).measure(zero, 0), probe(prepared).measure(zero, 50)
    assert first["items"] == later["items"] and later["step"] == 50
    conforms({**first, "at": "2026-11-30T12:00:00.000Z"}, "probe")
    assert len(first["items"]) == (8 + 3) * 4
    assert len(set(questions(first))) == len(first["items"])


def test_other_seed_other_questions(prepared: Path) -> None:
    assert set(questions(probe(prepared).measure(zero, 0))).isdisjoint(
        questions(probe(prepared, seed=7).measure(zero, 0))
    )


def test_sigmas_are_spread_evenly_whatever_the_training_draws(prepared: Path) -> None:
    for sampling in ("sigmoid", "uniform", "family_shift"):
        line = probe(prepared, samples=1, count=4, sampling=sampling).measure(zero, 0)
        assert [item["sigma"] for item in line["items"]] == [0.125, 0.375, 0.625, 0.875] * 2


def test_fewer_samples_are_a_part_of_more(prepared: Path) -> None:
    few, many = (set(questions(probe(prepared, samples=n).measure(zero, 0))) for n in (2, 3))
    assert few < many and len(few) == 16


def test_means_are_those_of_each_split(prepared: Path) -> None:
    line = probe(prepared).measure(zero, 0)
    for split, name in (("train", "train_mean"), ("holdout", "holdout_mean")):
        losses = [item["loss"] for item in line["items"] if item["split"] == split]
        assert line[name] == pytest.approx(sum(losses) / len(losses))


def test_a_loss_that_is_no_number_is_null_and_so_is_its_mean(prepared: Path, conforms: Any) -> None:
    def broken(noisy: torch.Tensor, sigma: torch.Tensor, told: Any) -> torch.Tensor:
        return torch.full_like(noisy, float("nan") if float(sigma) > 0.8 else 0.0)

    line = probe(prepared).measure(broken, 0)
    conforms({**line, "at": "2026-11-30T12:00:00.000Z"}, "probe")
    assert {item["sigma"] for item in line["items"] if item["loss"] is None} == {0.875}
    assert line["train_mean"] is None and line["holdout_mean"] is None


def test_a_cache_without_held_out_samples(lab: Any) -> None:
    lab.scan(holdout=0)
    lab.cache()
    assert probe(lab.root).measure(zero, 0)["holdout_mean"] is None


def test_measuring_in_a_fit_has_no_dropout_and_leaves_training_mode_on(lab: Any) -> None:
    from runtime.training import loop

    session = lab.launch({"model.lora.lora_dropout": 0.5, "train.probe_samples": 3})
    with torch.no_grad():
        for parameter in session.trained.adapter.parameters():
            parameter.add_(0.05)
    one, other = loop._probe(session, 0), loop._probe(session, 0)
    assert one == other
    assert session.denoiser.training
