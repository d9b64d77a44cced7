"""Micro-batches out of a cache: order, captions dropped, padding and masks."""

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from runtime.cache.store import Store
from runtime.families import base
from runtime.families.registry import load_family
from runtime.training.batches import Batches, bucket_name


def batches(root: Path, **changes: Any) -> Batches:
    settings = {"batch_size": 2, "seed": 42, "shuffle": True, "caption_dropout": 0.0}
    return Batches(Store(root / "cache"), **{**settings, **changes})


def test_an_epoch_has_every_training_sample_once(prepared: Path) -> None:
    found = batches(prepared, batch_size=3)
    assert found.per_epoch == 3
    for epoch in range(3):
        ids = [name for micro in range(3) for name in found.at(3 * epoch + micro).ids]
        assert sorted(ids) == sorted(found.ids("train")) and len(ids) == 8
    assert len(found.ids("holdout")) == 3 and not set(found.ids("holdout")) & set(found.ids("train"))


def test_order_is_a_function_of_seed_and_epoch(prepared: Path) -> None:
    def order(epoch: int, **changes: Any) -> list[tuple[str, ...]]:
        found = batches(prepared, **changes)
        return [found.at(4 * epoch + place).ids for place in range(4)]

    assert order(1) == order(1)
    assert order(0) != order(1) != order(1, seed=7)
    assert order(0, shuffle=False) == order(1, shuffle=False)


def test_windows_are_the_micro_batches_in_order_from_any_step_on(prepared: Path) -> None:
    found = batches(prepared)
    every = [found.at(micro).ids for micro in range(12)]
    whole = [[micro.ids for micro in window] for window in found.windows(1, 4, 3)]
    assert [ids for window in whole for ids in window] == every
    assert [[m.ids for m in window] for window in found.windows(3, 4, 3)] == whole[2:]


@pytest.mark.parametrize(("epochs", "sizes"), [(None, [3, 3, 3]), (2, [3, 3, 2])])
def test_last_window_is_short_where_the_length_is_a_number_of_epochs(
    prepared: Path, epochs: int | None, sizes: list[int]
) -> None:
    found = batches(prepared, epochs=epochs)
    assert [len(window) for window in found.windows(1, 3, 3)] == sizes


def test_a_failure_while_reading_ahead_reaches_the_loop(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = batches(prepared)
    monkeypatch.setattr(found, "read", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(found.windows(1, 2, 1))


def test_reading_ahead_stops_when_the_loop_does(prepared: Path) -> None:
    windows = batches(prepared).windows(1, 1000, 1)
    next(windows)
    windows.close()


def test_captions_are_dropped_at_the_rate_and_replaced_by_the_empty_one(lab: Any) -> None:
    lab.cache({"data.caption_dropout_rate": 0.5})
    for rate, low, high in ((0.0, 0, 0), (1.0, 80, 80), (0.5, 25, 55)):
        found, again = (batches(lab.root, caption_dropout=rate) for _ in range(2))
        dropped = [found.at(micro).dropped for micro in range(40)]
        assert low <= sum(map(len, dropped)) <= high
        assert dropped == [again.at(micro).dropped for micro in range(40)]
    for micro in range(8):
        got = batches(lab.root, caption_dropout=1.0, batch_size=1).at(micro)
        tensors = Store(lab.root / "cache").read(batches(lab.root).folders["train", got.ids[0]])
        assert got.dropped == got.ids
        assert torch.equal(got.conditioning.embeds[0], tensors["empty_embeds"])  # with the same control


def lengths(found: Batches) -> dict[str, int]:
    return {
        name: found.read(found.folders["train", name])["prompt_embeds"].shape[0]
        for name in found.ids("train")
    }


def test_captions_of_equal_length_need_no_mask(prepared: Path) -> None:
    """A mask, even of all true, forces attention off the fast path."""
    found = batches(prepared, batch_size=8)
    long = lengths(found)
    usual = Counter(long.values()).most_common(1)[0][0]
    same = [name for name in long if long[name] == usual]
    tensors = [found.read(found.folders["train", name]) for name in same]
    assert len(same) >= 2
    assert base.collate([base.conditioning_of(t) for t in tensors]).mask is None
    assert found.at(0).conditioning.mask is not None  # all eight are of unequal length


def test_a_padded_batch_answers_as_each_sample_alone_would(prepared: Path, nano: Path) -> None:
    family = load_family(nano)
    denoiser = family.load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
    got = batches(prepared, batch_size=8).at(0)
    told = got.conditioning
    sigma = torch.linspace(0.1, 0.9, 8)
    with torch.no_grad():
        together = family.predict(denoiser, got.target, sigma, told)
        for row, name in enumerate(got.ids):
            tensors = Store(prepared / "cache").read(batches(prepared).folders["train", name])
            alone = family.predict(
                denoiser, got.target[row : row + 1], sigma[row : row + 1], base.conditioning_of(tensors)
            )
            assert torch.allclose(together[row], alone[0], atol=2e-5), name


def test_what_lies_under_the_mask_changes_nothing(prepared: Path, nano: Path) -> None:
    family = load_family(nano)
    denoiser = family.load_denoiser(nano, device="cpu", dtype=torch.float32, quantize="none")
    got = batches(prepared, batch_size=8).at(0)
    told = got.conditioning
    assert told.mask is not None
    rubbish = torch.where(told.mask[..., None], told.embeds, torch.full_like(told.embeds, 37.0))
    sigma = torch.full((8,), 0.5)
    with torch.no_grad():
        clean = family.predict(denoiser, got.target, sigma, told)
        dirty = family.predict(denoiser, got.target, sigma, dataclasses.replace(told, embeds=rubbish))
        blind = family.predict(
            denoiser, got.target, sigma, dataclasses.replace(told, mask=None, embeds=rubbish)
        )
    assert torch.allclose(clean, dirty, atol=1e-6)
    assert not torch.allclose(clean, blind, atol=1e-2)  # the mask is what keeps it out


def test_bucket_name_is_in_pixels_height_first() -> None:
    assert bucket_name(((16, 8, 12), (16, 4, 4))) == "64x96+32x32"
