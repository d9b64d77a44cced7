"""Conditionings: from a cache entry, into a batch, onto a device."""

import re

import pytest
import torch

from runtime.families.base import Conditioning, collate, conditioning_of


def one(length: int, controls: int = 1, size: int = 8) -> Conditioning:
    return Conditioning(
        embeds=torch.full((1, length, 4), float(length)),
        mask=None,
        controls=tuple(torch.full((1, 16, size, size), float(index)) for index in range(controls)),
    )


def test_equal_lengths_are_stacked_without_a_mask() -> None:
    batch = collate([one(3), one(3), one(3)])
    assert batch.mask is None and batch.embeds.shape == (3, 3, 4)
    assert batch.controls[0].shape == (3, 16, 8, 8)


def test_shorter_ones_are_padded_behind_and_masked() -> None:
    batch = collate([one(2), one(4), one(1)])
    assert batch.mask is not None and batch.mask.dtype == torch.bool
    assert batch.mask.tolist() == [[True, True, False, False], [True] * 4, [True, False, False, False]]
    assert torch.equal(batch.embeds.bool().all(-1), batch.mask)


def test_a_batch_of_one_has_no_mask() -> None:
    assert collate([one(5)]).mask is None


def test_row_keeps_its_own_caption_and_controls() -> None:
    items = [one(2), one(3)]
    items[1].controls[0].fill_(9.0)
    batch = collate(items)
    assert batch.embeds[0, 0, 0] == 2.0 and batch.embeds[1, 0, 0] == 3.0
    assert batch.controls[0][0, 0, 0, 0] == 0.0 and batch.controls[0][1, 0, 0, 0] == 9.0


def shapes(*sizes: tuple[int, int]) -> Conditioning:
    controls = tuple(torch.zeros(1, 16, *size) for size in sizes)
    return Conditioning(embeds=torch.zeros(1, 2, 4), mask=None, controls=controls)


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([one(2, controls=1), one(2, controls=2)], "samples with [1, 2] controls are in one batch"),
        ([one(2, controls=2), one(3, controls=0)], "samples with [2, 0] controls are in one batch"),
        ([shapes((4, 8)), shapes((8, 4))], "control 0 has shapes [(16, 4, 8), (16, 8, 4)]"),
        ([shapes((8, 8), (8, 8)), shapes((8, 8), (8, 6))], "control 1 has shapes"),
    ],
)
def test_samples_with_other_controls_do_not_go_into_one_batch(items: list[Conditioning], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        collate(items)


def test_samples_without_controls_make_a_batch() -> None:
    batch = collate([one(2, controls=0), one(3, controls=0)])
    assert batch.controls == () and batch.embeds.shape == (2, 3, 4)


def test_controls_come_in_the_order_of_their_numbers() -> None:
    tensors = {f"control_{index}": torch.full((16, 8, 8), float(index)) for index in (10, 2, 0, 1)}
    tensors |= {
        "prompt_embeds": torch.zeros(3, 4),
        "empty_embeds": torch.ones(2, 4),
        "target": torch.zeros(16, 8, 8),
    }
    told = conditioning_of(tensors)
    assert [float(control[0, 0, 0, 0]) for control in told.controls] == [0, 1, 2, 10]
    assert told.embeds.shape == (1, 3, 4)
    assert conditioning_of(tensors, "empty_embeds").embeds.shape == (1, 2, 4)


def test_to_casts_all_but_the_mask() -> None:
    moved = collate([one(2), one(3)]).to("cpu", torch.bfloat16)
    assert moved.embeds.dtype == moved.controls[0].dtype == torch.bfloat16
    assert moved.mask is not None and moved.mask.dtype == torch.bool
