import time
from typing import Any

from gates.datasets.counts import Pair
from gates.datasets.looking import _assign

MANY = 30_000


def _sample(target: str, prompt: str, *controls: str) -> dict[str, Any]:
    return {
        "target": {"path": target}, "controls": [{"path": path} for path in controls], "mask": None,
        "prompt": prompt, "alternatives": [],
    }  # fmt: skip


def test_rows_of_one_target_find_the_sample_that_is_alike() -> None:
    pairs = [
        (Pair(target="t", text="new"), ("new",)),
        (Pair(target="t", controls=("c",), text="b"), ("b",)),
        (Pair(target="t", text="a"), ("a ",)),
        (Pair(target="t", text="d"), ("d",)),
        (Pair(target="u", text="a"), ("a",)),
    ]
    samples = [_sample("t", "a"), _sample("t", "old"), _sample("t", "b", "c")]
    assert _assign(pairs, samples) == [samples[1], samples[2], samples[0], None, None]


def test_many_rows_of_one_target_take_no_longer_each() -> None:
    """Quadratic, 30,000 would take minutes."""
    pairs = [(Pair(target="t", text="x"), ("x",))] * MANY
    samples = [_sample("t", "x") for _ in range(MANY)]
    start = time.process_time()
    assert _assign(pairs, samples) == samples
    assert time.process_time() - start < 10
