import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates import buckets

ROWS = json.loads(
    (Path(__file__).resolve().parents[2] / "schemas" / "vectors" / "sizes.json").read_text(encoding="utf-8")
)["sizes"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row["name"])
def test_the_vectors(row: dict[str, Any]) -> None:
    target = tuple(row["target"]) if row["target"] else None
    controls = [tuple(control) for control in row["controls"]]
    found = buckets.final_sizes(row["processor"], row["settings"], row["step"], target, controls)
    assert found == row["final"]


def test_the_vectors_have_unique_names() -> None:
    assert len({row["name"] for row in ROWS}) == len(ROWS) >= 40


@pytest.mark.parametrize(
    ("height", "width", "count", "first"),
    [
        (544, 960, 47, (1472, 352)),
        (1024, 1024, 65, (2048, 512)),
        (1328, 1328, 85, (2688, 656)),
        (64, 64, 5, (128, 32)),
    ],
)
def test_the_buckets_are_those_of_the_reference(
    height: int, width: int, count: int, first: tuple[int, int]
) -> None:
    """Counts and the narrowest, as musubi-tuner's BucketSelector makes them with a step of 16."""
    found = buckets.buckets(height * width, 16)
    assert (len(found), found[0], found[-1]) == (count, first, first[::-1])
    assert found == tuple(sorted(found, key=lambda size: (size[1], size[0])))


_side = st.integers(1, 5000)
_size = st.tuples(_side, _side)
_flag = st.sampled_from([None, True, False])


@settings(deadline=None, database=None)
@given(
    target=st.none() | _size,
    controls=st.lists(_size, max_size=2),
    wanted=_size,
    limit=st.none() | _size,
    resize=st.sampled_from(["cover", "area", "keep"]),
    bucket=_flag,
    keep=_flag,
    step=st.sampled_from([8, 16, 32]),
)
def test_no_side_is_below_a_step_however_odd_the_picture(
    target: Any, controls: Any, wanted: Any, limit: Any, resize: str, bucket: Any, keep: Any, step: int
) -> None:
    size = [max(side // step, 1) * step for side in wanted]
    processor = {
        "target_size": size, "controls_size": None, "controls_resize": resize, "enable_bucket": True,
        "bucket_no_upscale": bool(bucket),
    }  # fmt: skip
    said = {
        "resolution": None, "enable_bucket": bucket, "bucket_no_upscale": None, "control_resolution": limit,
        "no_resize_control": keep,
    }  # fmt: skip
    found = buckets.final_sizes(processor, said, step, target, controls)
    assert len(found["controls"]) == len(controls)
    for height, width in (found["target"], *found["controls"]):
        assert height >= step and width >= step and height % step == width % step == 0
