"""What model.lora.target_modules means, over the names of a small denoiser."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.config.targets import PRESETS, Targets, matching
from runtime.errors import ConfigError

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
BLOCK = (
    *(f"attn.{name}" for name in ATTENTION),
    *("img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
    *("img_mod.1", "txt_mod.1"),
)
LAYERS = 12  # two digits: block 1 is not block 11
OUTER = ("img_in", "txt_in", "time_text_embed.timestep_embedder.linear_1", "norm_out.linear", "proj_out")
NAMES = [*OUTER[:3], *(f"transformer_blocks.{i}.{name}" for i in range(LAYERS) for name in BLOCK), *OUTER[3:]]


@pytest.mark.parametrize(
    ("targets", "per_block", "outside"),
    [
        ("attention", 8, 0),
        ("attention+mlp", 12, 0),
        ("all-linear", 14, 0),
        (("to_q", "to_k", "to_v", "to_out.0"), 4, 0),
        (("attn.to_q",), 1, 0),
        (("net.2",), 2, 0),
        (("*.to_q",), 1, 0),
        (("transformer_blocks.*.attn.to_*",), 5, 0),
        (("*_mod.1", "img_mod.1"), 2, 0),
        (("*_in", "proj_out"), 0, 3),
        (("*",), 14, 5),
    ],
)
def test_number_of_linears_meant(targets: Targets, per_block: int, outside: int) -> None:
    assert len(matching(NAMES, targets)) == LAYERS * per_block + outside


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("transformer_blocks.1.attn.to_q",), ["transformer_blocks.1.attn.to_q"]),
        (
            ("transformer_blocks.1*.attn.to_q",),
            [f"transformer_blocks.{i}.attn.to_q" for i in (1, 10, 11)],
        ),
        (("transformer_blocks.[02].img_mod.1",), [f"transformer_blocks.{i}.img_mod.1" for i in (0, 2)]),
        (("proj_out", "img_in"), ["img_in", "proj_out"]),
    ],
)
def test_linears_meant_in_the_denoisers_order(targets: Targets, expected: list[str]) -> None:
    assert matching(NAMES, targets) == expected


@given(st.sets(st.sampled_from(NAMES), min_size=1))
def test_whole_names_mean_themselves(chosen: set[str]) -> None:
    # img_in is no end of another name; linear_1 and the like come with their parents.
    assert set(matching(NAMES, tuple(chosen))) == chosen


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (("to_q", "to_queue"), "is called to_queue; the nearest are attn.to_q"),
        (("q",), "is called q; "),
        (("attn",), "is called attn; "),
        (("*.to_qq",), "matches *.to_qq; the nearest are attn.to_q"),
        (("transformer_blocks.99.attn.to_q",), "is called transformer_blocks.99.attn.to_q; "),
        (("TO_Q",), "is called TO_Q; "),
        (("img_mlp.net.1",), "the nearest are img_mlp.net.2, "),
    ],
)
def test_a_target_that_means_nothing_is_told_with_the_nearest(targets: Targets, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        matching(NAMES, targets)
    assert told in caught.value.message
    assert all(name in caught.value.message for name in (*BLOCK, *PRESETS))
    assert caught.value.remedy
