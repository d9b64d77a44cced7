"""Micro-batches out of a cache: order, captions dropped or picked, padding and masks."""

import dataclasses
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from runtime import files
from runtime.cache.encode import Encoded
from runtime.cache.store import Store
from runtime.data.order import Item, Order, Share, Slot
from runtime.families import base
from runtime.families.registry import load_family
from runtime.index import Index
from runtime.training import batches as module
from runtime.training import draws
from runtime.training.batches import Batches, bucket_name


def store_of(root: Path) -> Store:
    return Store(root / "cache", Index(path=root / "index.json"))


def batches(
    root: Path, *, batch_size: int = 2, seed: int = 42, shuffle: bool = True, views: int = 1, **changes: Any
) -> Batches:
    """Over the training samples of a cache, all of one source and bucket."""
    listed = store_of(root).manifest()["entries"]
    order = Order(
        items=[Item(id=e["id"], source="a", bucket=64) for e in listed if e["split"] == "train"],
        shares={"a": Share(views=views, batch_size=batch_size)},
        seed=seed,
        shuffle=shuffle,
    )
    return Batches(store_of(root), order, **{"caption_dropout": 0.0, **changes})


def entry_of(root: Path, name: str) -> dict[str, torch.Tensor]:
    return store_of(root).read(batches(root).folders["train", name])


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize(("batch_size", "views"), [(3, 1), (2, 3), (1, 2)])
def test_an_epoch_has_every_training_sample_as_often_as_asked(
    prepared: Path, workers: int, batch_size: int, views: int
) -> None:
    """Short last batches are kept, and nothing is lost or doubled where one epoch ends and the next begins."""
    found = batches(prepared, batch_size=batch_size, views=views, workers=workers, epochs=4)
    per_epoch = -(-8 * views // batch_size)
    assert found.order.count(1) == per_epoch
    steps = -(-4 * per_epoch // 3)
    every = [micro for window in found.windows(1, steps, 3) for micro in window]
    assert len(every) == 4 * per_epoch
    for epoch in range(4):
        micros = every[per_epoch * epoch : per_epoch * (epoch + 1)]
        assert {micro.epoch for micro in micros} == {epoch}
        assert Counter(name for micro in micros for name in micro.ids) == dict.fromkeys(
            found.ids("train"), views
        )
    assert len(found.ids("holdout")) == 3 and not set(found.ids("holdout")) & set(found.ids("train"))


def test_workers_change_nothing(prepared: Path) -> None:
    def seen(workers: int) -> list[Any]:
        windows = batches(prepared, workers=workers).windows(2, 9, 3)
        return [
            (m.ids, float(m.target.sum()), float(m.conditioning.embeds.sum())) for w in windows for m in w
        ]

    assert seen(0) == seen(1) == seen(2) == seen(5)


def test_the_order_is_asked_for_in_one_thread_only(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It remembers epochs and counts; two threads at once could count one twice or miss what was cleared."""
    found = batches(prepared, workers=4, views=2)
    asked: set[int] = set()
    original = Order.epoch

    def epoch(self: Order, number: int) -> list[tuple[Slot, ...]]:
        asked.add(threading.get_ident())
        return original(self, number)

    monkeypatch.setattr(Order, "epoch", epoch)
    assert len(list(found.windows(1, 20, 2))) == 20
    assert asked == {threading.get_ident()}


def test_order_is_a_function_of_seed_and_epoch(prepared: Path) -> None:
    def order(epoch: int, **changes: Any) -> list[tuple[str, ...]]:
        found = batches(prepared, **changes)
        return [found.at(4 * epoch + place).ids for place in range(4)]

    assert order(1) == order(1)
    assert order(0) != order(1) != order(1, seed=7)
    assert order(0, shuffle=False) == order(1, shuffle=False)


def test_what_holds_the_base_never_shares_a_micro_batch_with_what_is_learned(prepared: Path) -> None:
    names = batches(prepared).ids("train")
    order = Order(
        items=[
            Item(id=name, source="ab"[index % 2], bucket=64, regularisation=index % 2 == 1)
            for index, name in enumerate(names)
        ],
        shares={"a": Share(batch_size=3, views=2), "b": Share(batch_size=3)},
        seed=1,
        shuffle=True,
    )
    found = Batches(store_of(prepared), order, caption_dropout=0.0)
    held = set(names[1::2])
    assert found.learned() == names[0::2]
    micros = [found.at(micro) for micro in range(order.count(2))]
    assert {micro.regularisation for micro in micros} == {True, False}
    for micro in micros:
        assert set(micro.ids) <= held if micro.regularisation else not set(micro.ids) & held
    counts = Counter(name for micro in micros for name in micro.ids)
    assert counts == {name: 2 if name in held else 4 for name in names}


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


@pytest.mark.parametrize(("accumulation", "read"), [(1, 1 + 16), (3, 3 + 18), (20, 20 + 20)])
@pytest.mark.parametrize("workers", [1, 3])
def test_reading_ahead_is_deep_and_stops_when_the_loop_does(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, workers: int, accumulation: int, read: int
) -> None:
    """Sixteen micro-batches or more beyond the step's own, in whole steps, however few threads read."""
    found = batches(prepared, batch_size=1, workers=workers)
    done = counted(found, monkeypatch)
    windows = found.windows(1, 1000, accumulation)
    next(windows)
    assert waited(done) == read
    next(windows)
    assert waited(done) == read + accumulation
    windows.close()
    assert waited(done) == read + accumulation


def test_what_waits_to_be_read_is_given_up_with_the_loop(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = batches(prepared, batch_size=1)
    read = found.read
    monkeypatch.setattr(found, "read", lambda folder: (time.sleep(0.05), read(folder))[1])
    windows = found.windows(1, 1000, 1)
    next(windows)
    started = time.monotonic()
    windows.close()
    assert time.monotonic() - started < 0.4  # sixteen of them would take 0.8 s


@pytest.mark.parametrize(("batch_size", "entries", "read"), [(1, 5, 6), (2, 5, 2 * (1 + 2)), (1, 0.5, 2)])
def test_reading_ahead_is_bounded_in_bytes(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, batch_size: int, entries: float, read: int
) -> None:
    listed = store_of(prepared).manifest()["entries"]
    largest = max(sum(file["size"] for file in entry["files"].values()) for entry in listed)
    monkeypatch.setattr(module, "AHEAD_BYTES", int(entries * largest))
    found = batches(prepared, batch_size=batch_size)
    done = counted(found, monkeypatch)
    windows = found.windows(1, 1000, 1)
    next(windows)
    assert waited(done) == read


def counted(found: Batches, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is read from now on."""
    done: list[str] = []
    original = found.read
    monkeypatch.setattr(found, "read", lambda folder: (done.append(folder), original(folder))[1])
    return done


def waited(done: list[str]) -> int:
    """How much has been read when nothing was added for a while."""
    before = -1
    while before < len(done):
        before = len(done)
        time.sleep(0.15)
    return before


@pytest.mark.parametrize("workers", [0, 2])
def test_a_failure_while_reading_reaches_the_loop(
    prepared: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    found = batches(prepared, workers=workers)
    monkeypatch.setattr(found, "read", lambda folder: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(found.windows(1, 2, 1))


def test_a_small_dataset_is_read_once(prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = Store.read
    monkeypatch.setattr(Store, "read", lambda self, folder: (read.append(folder), original(self, folder))[1])
    found = batches(prepared, workers=0)
    list(found.windows(1, 20, 1))
    assert len(read) == len(set(read)) == 8


def test_captions_are_dropped_at_the_rate_and_replaced_by_the_empty_one(lab: Any) -> None:
    lab.cache({"data.caption_dropout_rate": 0.5})
    for rate, low, high in ((0.0, 0, 0), (1.0, 80, 80), (0.5, 25, 55)):
        found, again = (batches(lab.root, caption_dropout=rate) for _ in range(2))
        dropped = [found.at(micro).dropped for micro in range(40)]
        assert low <= sum(map(len, dropped)) <= high
        assert dropped == [again.at(micro).dropped for micro in range(40)]
    for micro in range(8):
        got = batches(lab.root, caption_dropout=1.0, batch_size=1).at(micro)
        assert got.dropped == got.ids
        # with the same control
        assert torch.equal(got.conditioning.embeds[0], entry_of(lab.root, got.ids[0])["empty_embeds"])


def test_views_of_one_epoch_drop_each_for_itself(lab: Any) -> None:
    lab.cache({"data.caption_dropout_rate": 0.5})
    found = batches(lab.root, caption_dropout=0.5, views=8, batch_size=1)
    counts = Counter(name for micro in range(64) for name in found.at(micro).dropped)
    assert 20 <= sum(counts.values()) <= 44
    assert any(0 < count < 8 for count in counts.values())


def test_a_run_counts_what_it_dropped(lab: Any) -> None:
    changes = {"data.caption_dropout_rate": 0.5, "train.max_train_steps": 8}
    lab.cache(changes)
    lines = files.read_json_lines(lab.fit(changes).path / "metrics.jsonl")
    found = batches(lab.root, caption_dropout=0.5)
    expected = [list(found.at(micro).dropped) for micro in range(8)]
    assert [line["dropped"] for line in lines] == expected
    assert 0 < sum(map(len, expected)) < 16


def several(root: Path) -> None:
    """p-samples get two further captions, told apart by their value."""
    store = store_of(root)
    for entry in store.manifest()["entries"]:
        tensors = {name: t.clone() for name, t in store.read(entry["folder"]).items()}
        embeds = tensors["prompt_embeds"]
        more = {f"prompt_embeds_{n}": torch.full_like(embeds, float(n)) for n in (1, 2)}
        write(store, entry, {**tensors, **more, "prompt_embeds": torch.zeros_like(embeds)})


def write(store: Store, entry: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    from runtime.cache.key import Wanted

    want = Wanted(
        id=entry["id"],
        split=entry["split"],
        document=store.entry(entry["folder"])["document"],
        key=entry["key"],
        target=None,
        controls=(),
    )
    store.write(want, Encoded(tensors=tensors))


def test_one_of_several_captions_is_picked_by_seed_epoch_time_and_sample(lab: Any) -> None:
    several(lab.root)
    picked: dict[tuple[int, str], list[int]] = {}
    found = batches(lab.root, batch_size=1, views=3)
    for micro in range(24 * 6):
        got = found.at(micro)
        picked.setdefault((got.epoch, got.ids[0]), []).append(int(got.conditioning.embeds[0, 0, 0]))
    counts = Counter(value for values in picked.values() for value in values)
    assert counts.keys() == {0, 1, 2} and min(counts.values()) > 30  # of 144, 48 each expected
    for (epoch, name), values in picked.items():
        # The slots of one sample come in the order of their time.
        expected = [int(draws.uniform("pick", 42, epoch, time, name) * 3) for time in range(3)]
        assert values == expected
    other = batches(lab.root, batch_size=1, views=3, seed=7)
    first = [int(b.at(m).conditioning.embeds[0, 0, 0]) for b in (found, other) for m in range(24)]
    assert first[:24] != first[24:]


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
            tensors = entry_of(prepared, name)
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


def test_masks_of_a_batch_lie_over_its_targets(lab: Any) -> None:
    for index, name in enumerate(("p1", "p2", "p3")):
        path = lab.root / "dataset" / "control_images" / f"{name}_mask.png"
        Image.new("L", (64, 64), 255 * index // 2).save(path)
    lab.scan()
    lab.cache()
    found = lab.launch({"data.batch_size": 3}).batches
    micros = [found.at(micro) for micro in range(found.order.count(1))]
    for micro in micros:
        masked = {name in ("p1", "p2", "p3") for name in micro.ids}
        assert masked == {micro.mask is not None}
        if micro.mask is not None:
            assert (
                micro.mask.shape == (len(micro.ids), 1, 8, 8) == (len(micro.ids), 1, *micro.target.shape[2:])
            )
            grey = {"p1": 0.0, "p2": 127 / 255, "p3": 1.0}
            assert [float(m.mean()) for m in micro.mask] == pytest.approx([grey[n] for n in micro.ids])
    assert any(micro.mask is not None for micro in micros)


def test_bucket_name_is_in_pixels_height_first() -> None:
    held = {f"control_{n}": torch.zeros(16, 4, 4 + n) for n in (10, 2, 0)}
    assert bucket_name({**held, "target": torch.zeros(16, 8, 12)}) == "64x96+32x32+32x48+32x112"
