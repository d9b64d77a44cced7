"""What is set aside: by a list, by a number, by the rule; never a set that only holds the base's behaviour."""

from pathlib import Path

import pytest

from runtime.data import holdout
from runtime.data.sample import ImageFile, Sample
from runtime.errors import DataError


def fake(identity: str, *, picture: str | None = None, source: str = "dataset") -> Sample:
    shown = ImageFile(path=identity, size=1, sha256=(picture or identity).ljust(64, "0"), width=8, height=8)
    return Sample(
        id=identity,
        source=source,
        split="train",
        prompt="p",
        alternatives=(),
        caption=None,
        target=shown,
        controls=(shown,),
        mask=None,
    )


def held(samples: list[Sample]) -> set[str]:
    return {sample.id for sample in samples if sample.split == "holdout"}


@pytest.mark.parametrize(
    ("samples", "asked", "expected"),
    [(9, None, 0), (10, None, 3), (35, None, 3), (40, None, 4), (400, None, 16), (5, 2, 2), (12, 0, 0)],
)
def test_count(samples: int, asked: int | None, expected: int) -> None:
    split, rule, _ = holdout.split_off([fake(f"s{index}") for index in range(samples)], None, asked)
    assert len(held(split)) == expected
    assert f"{expected} of {samples}" in rule


def test_the_choice_is_a_function_of_the_ids_alone() -> None:
    forward = [fake(f"s{index}") for index in range(20)]
    chosen = [held(holdout.split_off(order, None, 4)[0]) for order in (forward, forward[::-1])]
    assert chosen[0] == chosen[1] and len(chosen[0]) == 4
    fewer = [sample for sample in forward if sample.id not in chosen[0]]
    assert not chosen[0] & held(holdout.split_off(fewer, None, 4)[0])


def test_one_target_under_several_captions_is_set_aside_whole() -> None:
    samples = [fake(f"s{index}", picture=f"{index // 3}") for index in range(30)]
    chosen = held(holdout.split_off(samples, None, 4)[0])
    groups = {int(name[1:]) // 3 for name in chosen}
    assert len(chosen) == 3 * len(groups) >= 4


def test_regularisation_is_trained_on_always() -> None:
    samples = [fake(f"s{index}", source="own" if index < 12 else "reg") for index in range(100)]
    split, rule, _ = holdout.split_off(samples, None, None, never={"reg"})
    assert len(held(split)) == 3 and held(split) <= {f"s{index}" for index in range(12)}
    assert "3 of 12" in rule
    split, rule, notes = holdout.split_off(samples, ["s3", "s50"], None, never={"reg"})
    assert held(split) == {"s3"} and [note.reason for note in notes] == [
        "s50: no usable sample has this name"
    ]


@pytest.mark.parametrize(("wished", "count"), [(None, 2), (["s0", "s1"], None)])
def test_something_must_be_left_to_train_on(wished: list[str] | None, count: int | None) -> None:
    with pytest.raises(DataError, match="leaves none"):
        holdout.split_off([fake("s0"), fake("s1")], wished, count)


def test_all_of_one_picture_are_never_all_set_aside_by_the_rule() -> None:
    samples = [fake(f"s{index}", picture="same") for index in range(12)]
    assert held(holdout.split_off(samples, None, None)[0]) == set()


def test_the_list_is_read_as_text_of_any_editor(tmp_path: Path) -> None:
    assert holdout.listed(tmp_path) is None
    (tmp_path / "holdout.txt").write_bytes(b"\xef\xbb\xbfs03\r\n\r\n s07 \r\nnobody\r\n")
    assert holdout.listed(tmp_path) == ["s03", "s07", "nobody"]
    (tmp_path / "holdout.txt").write_bytes("é\n".encode("utf-16"))
    assert holdout.listed(tmp_path) == ["é"]
