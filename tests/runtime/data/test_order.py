"""Every sample exactly as often as it should be, in an order that nothing but seed and epoch decides."""

from collections import Counter
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data import order
from runtime.data.order import Item, Order, Share

IDS = st.lists(st.text(min_size=1, max_size=6), unique=True, min_size=1, max_size=20)
ITEMS = IDS.flatmap(
    lambda ids: st.tuples(
        *(
            st.builds(
                Item,
                id=st.just(name),
                source=st.sampled_from("ab"),
                bucket=st.integers(0, 2),
                regularisation=st.just(False),
            )
            for name in ids
        )
    )
)
SHARES = st.fixed_dictionaries(
    {
        name: st.builds(Share, views=st.integers(1, 3), weight=st.none(), batch_size=st.integers(1, 5))
        for name in "ab"
    }
)
WEIGHTED = st.fixed_dictionaries(
    {
        name: st.builds(Share, views=st.integers(1, 3), weight=st.floats(0.1, 9.0), batch_size=st.just(2))
        for name in "ab"
    }
)
SEEDS, EPOCHS = st.integers(0, 2**63 - 1), st.integers(0, 50)


def make(items: tuple[Item, ...], shares: dict[str, Share], seed: int = 42, shuffle: bool = True) -> Order:
    return Order(items=items, shares=shares, seed=seed, shuffle=shuffle)


def plain(names: str, bucket: int = 1) -> tuple[Item, ...]:
    return tuple(Item(id=name, source="a", bucket=bucket) for name in names)


def ids(batches: list[tuple[order.Slot, ...]]) -> list[list[str]]:
    return [[slot.id for slot in batch] for batch in batches]


@given(items=ITEMS, shares=SHARES, seed=SEEDS, epoch=EPOCHS, shuffle=st.booleans())
def test_each_item_is_seen_exactly_its_views_in_batches_of_one_bucket(
    items: tuple[Item, ...], shares: dict[str, Share], seed: int, epoch: int, shuffle: bool
) -> None:
    found = make(items, shares, seed, shuffle)
    batches = found.epoch(epoch)
    known = {item.id: item for item in items}
    seen = Counter(slot.id for batch in batches for slot in batch)
    assert seen == {item.id: shares[item.source].views for item in items}
    for batch in batches:
        assert len({known[slot.id].bucket for slot in batch}) == 1
        assert len({shares[known[slot.id].source].batch_size for slot in batch}) == 1
        assert 1 <= len(batch) <= shares[known[batch[0].id].source].batch_size
    for name, views in seen.items():
        assert sorted(slot.time for batch in batches for slot in batch if slot.id == name) == list(
            range(views)
        )
    assert found.count(epoch + 1) == (epoch + 1) * len(batches)


@given(items=ITEMS, shares=st.one_of(SHARES, WEIGHTED), seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_shuffled_order_depends_on_seed_and_epoch_alone(
    items: tuple[Item, ...], shares: dict[str, Share], seed: int, epoch: int, data: st.DataObject
) -> None:
    again = tuple(data.draw(st.permutations(items)))
    assert make(again, shares, seed).epoch(epoch) == make(items, shares, seed).epoch(epoch)


@given(items=ITEMS, shares=WEIGHTED, seed=SEEDS, shuffle=st.booleans())
def test_weights_share_out_an_epoch_of_the_same_length_and_rounds_leave_nobody_out(
    items: tuple[Item, ...], shares: dict[str, Share], seed: int, shuffle: bool
) -> None:
    found = make(items, shares, seed, shuffle)
    sizes = Counter(item.source for item in items)
    total = sum(size * shares[name].views for name, size in sizes.items())
    weights = {name: shares[name].weight or 0.0 for name in sizes}
    seen: Counter[str] = Counter()
    source = {item.id: item.source for item in items}
    for epoch in range(4):
        views = [slot.id for batch in found.epoch(epoch) for slot in batch]
        assert len(views) == total
        taken = Counter(source[name] for name in views)
        for name, weight in weights.items():
            exact = total * weight / sum(weights.values())
            assert taken[name] in (floor(exact), floor(exact) + 1)
        seen.update(views)
        for name in sizes:
            times = [seen[item.id] for item in items if item.source == name]
            assert max(times) - min(times) <= 1
    assert found.count(4) == sum(len(found.epoch(epoch)) for epoch in range(4))


@given(items=ITEMS, shares=st.one_of(SHARES, WEIGHTED), seed=SEEDS)
def test_locate_counts_micro_batches_across_epochs(
    items: tuple[Item, ...], shares: dict[str, Share], seed: int
) -> None:
    found = make(items, shares, seed)
    every = [(epoch, place) for epoch in range(5) for place in range(len(found.epoch(epoch)))]
    fresh = make(items, shares, seed)
    assert fresh.locate(len(every) - 1) == every[-1]
    assert [found.locate(micro) for micro in range(len(every))] == every


def test_epochs_and_seeds_differ() -> None:
    items = plain("abcdefghijklmnopqrst")
    orders = {str(make(items, {"a": Share()}, seed).epoch(epoch)) for seed in (1, 2) for epoch in range(5)}
    assert len(orders) == 10


def test_unshuffled_keeps_the_given_order() -> None:
    items = (*plain("ba"), *plain("d", 2), *plain("c"))
    shares = {"a": Share(batch_size=2)}
    assert ids(make(items, shares, shuffle=False).epoch(3)) == [["b", "a"], ["c"], ["d"]]


@given(names=IDS, seed=SEEDS, epoch=EPOCHS, small=st.integers(1, 3), times=st.integers(1, 3))
def test_of_one_bucket_a_batch_of_a_times_b_is_a_batches_of_b(
    names: list[str], seed: int, epoch: int, small: int, times: int
) -> None:
    """Accumulation trains on what the large batch would have: the same samples in every step."""
    items = tuple(Item(id=name, source="a", bucket=0) for name in names)
    large = make(items, {"a": Share(batch_size=small * times)}, seed).epoch(epoch)
    little = make(items, {"a": Share(batch_size=small)}, seed).epoch(epoch)
    joined = [sum(little[start : start + times], ()) for start in range(0, len(little), times)]
    assert joined == large


def test_repeated_samples_are_spread_over_the_epoch() -> None:
    """Not all first views first: a source seen once would otherwise be gone before the repeats begin."""
    items = (
        *(Item(id=f"few{i}", source="a", bucket=0) for i in range(10)),
        *(Item(id=f"once{i}", source="b", bucket=0) for i in range(50)),
    )
    found = make(items, {"a": Share(views=5), "b": Share()}).epoch(0)
    halves = [Counter(batch[0].id[:3] for batch in half) for half in (found[:50], found[50:])]
    assert all(15 <= half["few"] <= 35 for half in halves)


def test_order_never_changes_between_versions() -> None:
    """A resumed run continues in the order of the run that it resumes."""
    shares = {"a": Share(batch_size=4)}
    assert ids(make(plain("abcdef"), shares).epoch(0)) == [["d", "b", "c", "a"], ["f", "e"]]
    singles = make(plain("abcdef"), {"a": Share()}).epoch(7)
    assert "".join(batch[0].id for batch in singles) == "cdeafb"


@pytest.mark.parametrize(
    ("steps", "epochs", "samples", "accumulation", "expected"),
    [(7, None, 5, 4, 7), (None, 1, 5, 1, 5), (None, 2, 5, 4, 3), (None, 3, 18, 2, 27), (None, 1, 1, 8, 1)],
)
def test_planned_steps(
    steps: int | None, epochs: int | None, samples: int, accumulation: int, expected: int
) -> None:
    found = order.planned_steps(
        make(plain("abcdefghijklmnopqr"[:samples]), {"a": Share()}),
        max_train_steps=steps,
        num_epochs=epochs,
        accumulation=accumulation,
    )
    assert found == expected


def test_planned_steps_need_a_length() -> None:
    with pytest.raises(ValueError, match="neither"):
        order.planned_steps(
            make(plain("a"), {"a": Share()}), max_train_steps=None, num_epochs=None, accumulation=1
        )


@pytest.mark.parametrize(
    ("planned", "interval", "expected"),
    [(5, 5, [5]), (7, 3, [3, 6, 7]), (6, 3, [3, 6]), (4, 100, [4]), (3, 1, [1, 2, 3])],
)
def test_planned_checkpoints(planned: int, interval: int, expected: list[int]) -> None:
    assert order.planned_checkpoints(planned, interval) == expected
