import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data import order

IDS = st.lists(st.text(min_size=1, max_size=6), unique=True, min_size=1, max_size=20)
KEYS = IDS.flatmap(lambda ids: st.tuples(*(st.tuples(st.just(name), st.integers(0, 2)) for name in ids)))
SEEDS, EPOCHS, SIZES = st.integers(0, 2**63 - 1), st.integers(0, 50), st.integers(1, 5)


@given(keys=KEYS, size=SIZES, seed=SEEDS, epoch=EPOCHS, shuffle=st.booleans())
def test_each_item_is_taken_exactly_once_in_batches_of_one_bucket(
    keys: tuple[order.Keyed, ...], size: int, seed: int, epoch: int, shuffle: bool
) -> None:
    batches = order.micro_batches(keys, size, seed, epoch, shuffle)
    buckets = dict(keys)
    assert sorted(name for batch in batches for name in batch) == sorted(buckets)
    assert all(1 <= len(batch) <= size for batch in batches)
    assert all(len({buckets[name] for name in batch}) == 1 for batch in batches)
    assert len(batches) == order.count_micro_batches(keys, size)


@given(keys=KEYS, size=SIZES, seed=SEEDS, epoch=EPOCHS, data=st.data())
def test_shuffled_order_depends_on_seed_and_epoch_alone(
    keys: tuple[order.Keyed, ...], size: int, seed: int, epoch: int, data: st.DataObject
) -> None:
    expected = order.micro_batches(keys, size, seed, epoch, True)
    again = data.draw(st.permutations(keys))
    assert order.micro_batches(again, size, seed, epoch, True) == expected


def test_epochs_and_seeds_differ() -> None:
    keys = [(f"s{index}", 1) for index in range(20)]
    orders = {str(order.micro_batches(keys, 1, seed, epoch, True)) for seed in (1, 2) for epoch in range(5)}
    assert len(orders) == 10


def test_unshuffled_keeps_the_given_order() -> None:
    keys = [("b", 1), ("a", 1), ("d", 2), ("c", 1)]
    assert order.micro_batches(keys, 2, 1, 3, False) == [["b", "a"], ["c"], ["d"]]


def test_order_never_changes_between_versions() -> None:
    """A resumed run continues in the order of the run that it resumes."""
    keys = [(name, 1) for name in "abcdef"]
    assert order.micro_batches(keys, 4, 42, 0, True) == [["c", "a", "f", "e"], ["b", "d"]]
    singles = order.micro_batches(keys, 1, 42, 7, True)
    assert "".join(batch[0] for batch in singles) == "ceadfb"


@pytest.mark.parametrize(
    ("steps", "epochs", "micro", "accumulation", "expected"),
    [(7, None, 5, 4, 7), (None, 1, 5, 1, 5), (None, 2, 5, 4, 3), (None, 3, 18, 2, 27), (None, 1, 1, 8, 1)],
)
def test_planned_steps(
    steps: int | None, epochs: int | None, micro: int, accumulation: int, expected: int
) -> None:
    found = order.planned_steps(
        max_train_steps=steps, num_epochs=epochs, micro_per_epoch=micro, accumulation=accumulation
    )
    assert found == expected


def test_planned_steps_need_a_length() -> None:
    with pytest.raises(ValueError, match="neither"):
        order.planned_steps(max_train_steps=None, num_epochs=None, micro_per_epoch=1, accumulation=1)


@pytest.mark.parametrize(
    ("planned", "interval", "expected"),
    [(5, 5, [5]), (7, 3, [3, 6, 7]), (6, 3, [3, 6]), (4, 100, [4]), (3, 1, [1, 2, 3])],
)
def test_planned_checkpoints(planned: int, interval: int, expected: list[int]) -> None:
    assert order.planned_checkpoints(planned, interval) == expected
