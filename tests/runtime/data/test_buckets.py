"""Sizes and crop boxes. All sizes are (height, width)."""

import json
from dataclasses import replace
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from runtime.config.model import Processor
from runtime.data import buckets, images
from runtime.data.buckets import Box, Placed, Sizing
from runtime.data.sample import Settings, Size
from runtime.errors import DataError

STEP = 16
SIDES = st.one_of(st.integers(1, 80), st.integers(1, 6000))
PICTURES = st.tuples(SIDES, SIDES)
AREAS = st.tuples(st.integers(1, 120), st.integers(1, 120)).map(lambda size: (size[0] * 16, size[1] * 16))
STEPS = st.sampled_from([8, 16, 32])

# area, how many buckets, the narrowest, one more that is there
COUNTS = [
    ((544, 960), 47, (1472, 352), (720, 720)),
    ((1024, 1024), 65, (2048, 512), (1024, 1024)),
    ((1328, 1328), 85, (2688, 656), (1328, 1328)),
    ((64, 64), 5, (128, 32), (64, 64)),
    ((63, 65), 8, (240, 16), (48, 64)),  # the root is 63.99: rounded down, not to 64
    ((16, 16), 1, (16, 16), (16, 16)),
    ((5, 5), 1, (16, 16), (16, 16)),  # smaller than one step
]


@pytest.mark.parametrize(("area", "count", "narrowest", "one"), COUNTS)
def test_buckets_of_an_area(area: Size, count: int, narrowest: Size, one: Size) -> None:
    found = buckets.buckets(area, STEP)
    assert len(found) == len(set(found)) == count
    assert found[0] == narrowest and found[-1] == narrowest[::-1] and one in found
    assert list(found) == sorted(found, key=lambda size: (size[1], size[0]))


def test_every_bucket_of_a_small_area() -> None:
    assert buckets.buckets((64, 64), STEP) == ((128, 32), (80, 48), (64, 64), (48, 80), (32, 128))
    assert buckets.buckets((64, 96), 32) == ((192, 32), (96, 64), (64, 96), (32, 192))


@given(area=st.tuples(SIDES, SIDES), step=STEPS)
def test_buckets_are_multiples_within_the_area(area: Size, step: int) -> None:
    found = buckets.buckets(area, step)
    pixels = area[0] * area[1]
    assert all(side >= step and side % step == 0 for size in found for side in size)
    assert all(height * width <= pixels for height, width in found) or found == ((step, step),)
    assert {size[::-1] for size in found} == set(found)


NEAREST = [
    ((720, 720), (544, 960), False, (720, 720)),
    ((544, 960), (544, 960), False, (544, 960)),
    ((960, 544), (544, 960), False, (960, 544)),
    ((1, 1), (544, 960), False, (720, 720)),
    ((7, 300), (64, 64), False, (32, 128)),
    ((300, 7), (64, 64), False, (128, 32)),
    ((5000, 4), (1024, 1024), False, (2048, 512)),
    ((4, 5000), (1024, 1024), False, (512, 2048)),
    ((96, 192), (64, 64), False, (48, 80)),  # 2 lies 1/3 from 5/3, and 2 from 4: linear, not by proportion
    ((85, 100), (64, 64), False, (64, 64)),
    ((15, 20), (64, 64), False, (64, 64)),  # 4/3 lies as near to 1 as to 5/3: the narrower
    # the edges of a step
    ((47, 33), (64, 64), True, (32, 32)),
    ((48, 32), (64, 64), True, (48, 32)),
    ((49, 31), (64, 64), True, (48, 16)),
    ((64, 64), (64, 64), True, (64, 64)),
    ((16, 256), (64, 64), True, (16, 256)),  # just the area
    ((64, 65), (64, 64), True, (64, 64)),  # above the area: the bucket of its aspect
    ((47, 33), (64, 64), False, (80, 48)),
    ((1, 1), (64, 64), True, (16, 16)),
    ((7, 300), (64, 64), True, (16, 288)),
    ((4, 5000), (1024, 1024), True, (16, 4992)),
]


@pytest.mark.parametrize(("picture", "area", "no_upscale", "expected"), NEAREST)
def test_nearest_bucket(picture: Size, area: Size, no_upscale: bool, expected: Size) -> None:
    assert buckets.nearest(picture, area, STEP, no_upscale=no_upscale) == expected


AREA = [
    ((1024, 1024), (1024, 1024), (1024, 1024)),
    ((33, 65), (1024, 1024), (720, 1440)),
    ((768, 1024), (1024, 1024), (880, 1184)),
    ((1024, 768), (1024, 1024), (1184, 880)),
    ((64, 64), (1024, 1024), (1024, 1024)),  # enlarged as well
    ((1, 1), (64, 64), (64, 64)),
    # the width below, the one above, the second below the ideal
    ((37, 313), (96, 320), (64, 480)),
    ((168, 294), (272, 304), (208, 384)),
    ((27, 249), (224, 144), (48, 512)),
    # a ribbon: musubi divides by zero, or takes a negative side
    ((5000, 4), (1024, 1024), (32768, 32)),
    ((4, 5000), (1024, 1024), (16, 36160)),
    ((1, 99999), (64, 64), (16, 256)),
    ((99999, 1), (64, 64), (256, 16)),
    ((5, 5), (5, 5), (16, 16)),
]


@pytest.mark.parametrize(("picture", "wanted", "expected"), AREA)
def test_area_size(picture: Size, wanted: Size, expected: Size) -> None:
    assert buckets.area_size(picture, wanted, STEP) == expected


@given(picture=PICTURES, wanted=st.tuples(SIDES, SIDES), step=STEPS)
def test_no_picture_and_no_area_gives_a_side_of_nothing(picture: Size, wanted: Size, step: int) -> None:
    for size in (
        buckets.area_size(picture, wanted, step),
        buckets.nearest(picture, wanted, step),
        buckets.nearest(picture, wanted, step, no_upscale=True),
    ):
        assert all(side >= step and side % step == 0 for side in size)


def inside(box: Box, picture: Size) -> bool:
    left, top, right, bottom = box
    return 0 <= left < right <= picture[1] and 0 <= top < bottom <= picture[0]


@given(picture=PICTURES, size=PICTURES)
def test_cover_is_the_largest_centred_part_of_the_right_aspect(picture: Size, size: Size) -> None:
    placed = buckets.cover(picture, size)
    left, top, right, bottom = placed.box
    assert placed.size == size and inside(placed.box, picture)  # a hair outside, and Pillow refuses
    assert left == pytest.approx(picture[1] - right) and top == pytest.approx(picture[0] - bottom)
    assert (right - left) * size[0] == pytest.approx((bottom - top) * size[1], rel=1e-6)
    assert min(left, top) == 0


KEEP: list[tuple[Size, Size, Box]] = [
    ((47, 33), (32, 32), (0, 7, 32, 39)),
    ((48, 32), (48, 32), (0, 0, 32, 48)),
    ((49, 31), (48, 16), (7, 0, 23, 48)),
    ((1, 1), (16, 16), (0, 0, 1, 1)),
    ((4, 4), (16, 16), (0, 0, 4, 4)),
    ((8, 64), (16, 64), (16, 0, 48, 8)),
]


@pytest.mark.parametrize(("picture", "size", "box"), KEEP)
def test_keep_cuts_to_whole_steps(picture: Size, size: Size, box: Box) -> None:
    assert buckets.keep(picture, STEP) == Placed(size=size, box=box)


def test_kept_pixels_are_those_of_the_picture() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (47, 33, 3), dtype=np.uint8)
    fitted = images.fit(Image.fromarray(pixels), buckets.keep((47, 33), STEP))
    assert np.array_equal(np.asarray(fitted), pixels[7:39, 0:32])


@pytest.mark.parametrize(
    ("picture", "size", "share"),
    [((100, 100), (32, 32), 0), ((100, 100), (32, 64), 0.5), ((5000, 4), (16, 32), 0.9996)],
)
def test_share_that_is_cut(picture: Size, size: Size, share: float) -> None:
    assert buckets.cut_share(picture, buckets.cover(picture, size)) == pytest.approx(share)


PLAIN = Sizing(
    target=(32, 64), step=STEP, enable_bucket=False, no_upscale=False, controls=None, controls_resize="cover"
)
BUCKETS = replace(PLAIN, target=(64, 64), enable_bucket=True)
SMALL = replace(BUCKETS, no_upscale=True)
AREA_OF = replace(PLAIN, controls=(64, 64), controls_resize="area")
KEPT = replace(PLAIN, controls_resize="keep")

# sizing, target, controls; the target's final size, the controls'
PLACES: list[tuple[Sizing, Size | None, list[Size], Size, list[Size]]] = [
    (PLAIN, (33, 65), [(33, 65), (90, 20)], (32, 64), [(32, 64), (32, 64)]),
    (PLAIN, (33, 65), [], (32, 64), []),
    (replace(PLAIN, controls=(48, 48)), (33, 65), [(33, 65)], (32, 64), [(48, 48)]),
    (BUCKETS, (33, 65), [(33, 65), (90, 20)], (48, 80), [(48, 80), (48, 80)]),
    (BUCKETS, (47, 33), [(48, 32)], (80, 48), [(80, 48)]),
    (SMALL, (47, 33), [(48, 32)], (32, 32), [(32, 32)]),
    (SMALL, (48, 32), [(49, 31)], (48, 32), [(48, 32)]),
    (SMALL, (49, 31), [], (48, 16), []),
    (SMALL, (1, 1), [(1, 1)], (16, 16), [(16, 16)]),
    (replace(SMALL, enable_bucket=False), (48, 32), [], (64, 64), []),  # no_upscale is a rule of buckets
    # area: the control's own aspect, unless it lies over a target whose crop has another one
    (AREA_OF, (128, 128), [(100, 100)], (32, 64), [(64, 64)]),
    (AREA_OF, (128, 128), [(128, 128)], (32, 64), [(48, 80)]),
    (replace(AREA_OF, controls=None), (128, 128), [(100, 100)], (32, 64), [(64, 32)]),
    (replace(AREA_OF, controls=None), (128, 128), [(128, 128)], (32, 64), [(32, 64)]),
    (AREA_OF, (5000, 4), [(4, 5000), (1, 1), (7, 300)], (32, 64), [(16, 256), (64, 64), (16, 256)]),
    # keep
    (KEPT, (128, 128), [(47, 33), (7, 300), (1, 1)], (32, 64), [(32, 32), (16, 288), (16, 16)]),
    (replace(KEPT, controls=(64, 64)), (9, 9), [(64, 64), (64, 65)], (32, 64), [(64, 64), (64, 64)]),
    (replace(KEPT, controls=(64, 64)), (9, 9), [(65, 130), (32, 160)], (32, 64), [(48, 80), (32, 128)]),
    # a prompt to paint
    (PLAIN, None, [(33, 65)], (32, 64), [(32, 64)]),
    (BUCKETS, None, [(300, 150), (90, 90)], (80, 48), [(80, 48), (80, 48)]),
    (BUCKETS, None, [], (64, 64), []),
    (AREA_OF, None, [(128, 128)], (32, 64), [(48, 80)]),
]


@pytest.mark.parametrize(("sizing", "target", "controls", "size", "fitted"), PLACES)
def test_final_sizes(
    sizing: Sizing, target: Size | None, controls: list[Size], size: Size, fitted: list[Size]
) -> None:
    places = buckets.place(sizing, target, controls, None)
    assert places.size == size
    assert [control.size for control in places.controls] == fitted
    assert places.mask is None
    if target is None:
        assert places.target is None
    else:
        assert places.target is not None and places.target.size == size


VECTORS = json.loads(
    (Path(__file__).parents[3] / "schemas" / "vectors" / "sizes.json").read_text(encoding="utf-8")
)["sizes"]


@pytest.mark.parametrize("row", VECTORS, ids=[row["name"] for row in VECTORS])
def test_sizes_are_those_that_the_gates_expect(row: dict[str, Any]) -> None:
    stated = {
        name: tuple(value) if isinstance(value, list) else value for name, value in row["settings"].items()
    }
    sizing = buckets.sizing(Processor.model_validate(row["processor"]), Settings(**stated), row["step"])
    target = tuple(row["target"]) if row["target"] else None
    places = buckets.place(sizing, target, [tuple(control) for control in row["controls"]], None)
    found = {"target": list(places.size), "controls": [list(control.size) for control in places.controls]}
    assert found == row["final"]


SIZINGS = st.builds(
    Sizing,
    target=AREAS,
    step=st.just(STEP),
    enable_bucket=st.booleans(),
    no_upscale=st.booleans(),
    controls=st.none() | AREAS,
    controls_resize=st.sampled_from(["cover", "area", "keep"]),
)


@given(sizing=SIZINGS, target=PICTURES, control=PICTURES, mask=PICTURES)
def test_boxes_lie_in_their_pictures(sizing: Sizing, target: Size, control: Size, mask: Size) -> None:
    places = buckets.place(sizing, target, [control, target], mask)
    assert places.target is not None and places.mask is not None
    for placed, picture in zip(
        (places.target, *places.controls, places.mask), (target, control, target, mask), strict=True
    ):
        assert inside(placed.box, picture)
        assert all(side >= STEP and side % STEP == 0 for side in placed.size)


@given(sizing=SIZINGS, picture=PICTURES, other=PICTURES)
def test_a_control_over_its_target_shows_the_same_part(sizing: Sizing, picture: Size, other: Size) -> None:
    places = buckets.place(sizing, picture, [other, picture], picture)
    over = places.controls[1]
    assert places.target is not None
    assert places.mask == places.target
    if over.size == places.target.size:
        assert over == places.target
    if sizing.controls_resize == "area":
        assert over.box == places.target.box


B11 = [
    PLAIN,
    BUCKETS,
    SMALL,
    KEPT,
    replace(BUCKETS, controls_resize="area"),
    replace(SMALL, controls_resize="keep"),
    replace(PLAIN, controls_resize="area"),
]


@pytest.mark.parametrize("sizing", B11)
def test_identical_target_and_control_give_identical_pixels(sizing: Sizing) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (33, 65, 3), dtype=np.uint8)
    places = buckets.place(sizing, (33, 65), [(33, 65)], None)
    assert places.target is not None and places.controls[0].size == places.size
    target, control = (
        images.to_array(images.fit(Image.fromarray(pixels.copy()), placed))
        for placed in (places.target, *places.controls)
    )
    assert np.array_equal(target, control)


def test_mask_of_another_size_lies_over_the_same_part() -> None:
    """A quarter of the target is the subject; so is a quarter of the mask that is twice, or half, as large."""
    target = Image.new("RGB", (128, 64))
    target.paste((255, 255, 255), (48, 0, 80, 64))
    for scale in (0.5, 1, 2, 3):
        mask = target.resize((int(128 * scale), int(64 * scale)), Image.Resampling.NEAREST)
        places = buckets.place(replace(PLAIN, target=(64, 64)), (64, 128), [], (mask.height, mask.width))
        assert places.target is not None and places.mask is not None
        left, top, right, bottom = places.target.box
        assert places.mask.box == (left * scale, top * scale, right * scale, bottom * scale)
        white = np.asarray(images.fit(mask, places.mask))[:, :, 0] > 127
        assert np.array_equal(white, np.asarray(images.fit(target, places.target))[:, :, 0] > 127)


def test_mask_of_another_aspect_is_stretched_over_the_target() -> None:
    places = buckets.place(replace(PLAIN, target=(64, 64)), (64, 128), [], (50, 50))
    assert places.mask == Placed(size=(64, 64), box=(12.5, 0, 37.5, 50))


CONFIG = Processor(
    target_size=(32, 48),
    controls_size=(48, 64),
    controls_resize="area",
    enable_bucket=True,
    background=(1, 2, 3),
)


@pytest.mark.parametrize(
    ("name", "field", "dataset", "config"),
    [
        ("enable_bucket", "enable_bucket", dataset, config)
        for dataset, config in product([None, False, True], [False, True])
    ]
    + [
        ("bucket_no_upscale", "no_upscale", dataset, config)
        for dataset, config in product([None, False, True], [False, True])
    ]
    + [
        (name, "target", dataset, config)
        for name, dataset, config in product(["resolution"], [None, (64, 80)], [(32, 48)])
    ],
)
def test_the_dataset_file_wins(name: str, field: str, dataset: Any, config: Any) -> None:
    key = {"resolution": "target_size"}.get(name, name)
    processor = CONFIG.model_copy(update={key: config})
    found = buckets.sizing(processor, Settings(**{name: dataset}), STEP)
    assert getattr(found, field) == (config if dataset is None else dataset)


# dataset: no_resize_control, control_resolution; config: controls_resize; what holds
CONTROLS: list[tuple[bool | None, Size | None, str, str, Size | None]] = [
    (None, None, "cover", "cover", (48, 64)),
    (None, None, "area", "area", (48, 64)),
    (None, None, "keep", "keep", (48, 64)),
    (False, None, "cover", "cover", (48, 64)),
    (False, None, "area", "area", (48, 64)),
    (False, None, "keep", "cover", None),
] + [
    (no_resize, resolution, config, "keep" if no_resize else "area", resolution)
    for no_resize, resolution, config in [
        *product([None, False], [(80, 80)], ["cover", "area", "keep"]),
        *product([True], [None, (80, 80)], ["cover", "area", "keep"]),
    ]
]


@pytest.mark.parametrize(("no_resize", "resolution", "config", "resize", "size"), CONTROLS)
def test_controls_of_the_dataset_file_win(
    no_resize: bool | None, resolution: Size | None, config: str, resize: str, size: Size | None
) -> None:
    processor = CONFIG.model_copy(update={"controls_resize": config})
    settings = Settings(no_resize_control=no_resize, control_resolution=resolution)
    found = buckets.sizing(processor, settings, STEP)
    assert (found.controls_resize, found.controls) == (resize, size)


REFUSED: list[tuple[Processor, Settings, str, str]] = [
    (
        Processor(target_size=(60, 64)),
        Settings(),
        "data.processor.target_size is 60 x 64",
        "height 64, width 64",
    ),
    (
        Processor(),
        Settings(resolution=(64, 7)),
        "resolution of the dataset file is 64 x 7",
        "height 64, width 16",
    ),
    (Processor(controls_size=(32, 40)), Settings(), "controls_size is 32 x 40", "height 32, width 32"),
]


@pytest.mark.parametrize(("processor", "settings", "message", "remedy"), REFUSED)
def test_size_that_is_no_multiple_is_refused(
    processor: Processor, settings: Settings, message: str, remedy: str
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        buckets.sizing(processor, settings, STEP)
    assert remedy in caught.value.remedy


def test_an_area_needs_no_multiple() -> None:
    for settings in (Settings(enable_bucket=True, resolution=(60, 61)),):
        found = buckets.sizing(Processor(controls_size=(61, 61), controls_resize="area"), settings, STEP)
        places = buckets.place(found, (100, 100), [(50, 90)], None)
        assert all(
            gcd(side, STEP) == STEP for size in (places.size, places.controls[0].size) for side in size
        )


@pytest.mark.parametrize("picture", [(1, 1), (300, 7), (7, 300), (4, 5000)])
@pytest.mark.parametrize("resize", ["cover", "area", "keep"])
def test_extreme_pictures_are_fitted(tmp_path: Path, picture: Size, resize: Any) -> None:
    sizing = replace(BUCKETS, controls_resize=resize)
    image = Image.new("RGB", picture[::-1], (200, 10, 10))
    places = buckets.place(sizing, picture, [picture], picture)
    assert places.target is not None and places.mask is not None
    for placed in (places.target, *places.controls, places.mask):
        fitted = images.fit(image, placed)
        assert fitted.size == placed.size[::-1]
        assert fitted.getextrema() == ((200, 200), (10, 10), (10, 10))
