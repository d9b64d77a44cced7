from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from runtime.data import images
from runtime.errors import DataError

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
ORIENTATION = 0x0112
# What each orientation does to the picture that is stored.
STORED: dict[int, Callable[[Image.Image], Image.Image]] = {
    1: lambda image: image,
    2: lambda image: image.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
    3: lambda image: image.transpose(Image.Transpose.ROTATE_180),
    4: lambda image: image.transpose(Image.Transpose.FLIP_TOP_BOTTOM),
    5: lambda image: image.transpose(Image.Transpose.TRANSPOSE),
    6: lambda image: image.transpose(Image.Transpose.ROTATE_90),
    7: lambda image: image.transpose(Image.Transpose.TRANSVERSE),
    8: lambda image: image.transpose(Image.Transpose.ROTATE_270),
}


def quadrants() -> Image.Image:
    """64 wide, 32 high, a colour in each corner."""
    pixels = np.zeros((32, 64, 3), np.uint8)
    pixels[:16, :32], pixels[:16, 32:], pixels[16:, :32], pixels[16:, 32:] = (
        RED,
        BLUE,
        (0, 200, 0),
        (250, 220, 0),
    )
    return Image.fromarray(pixels)


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp"])
def test_photo_comes_out_upright(tmp_path: Path, orientation: int, suffix: str) -> None:
    upright = quadrants()
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / f"photo.{suffix}"
    options = {"quality": 95} if suffix in ("jpg", "webp") else {}
    STORED[orientation](upright).save(path, exif=exif, **options)
    loaded = images.load(path)
    assert loaded.size == (64, 32)
    error = np.abs(np.asarray(loaded, float) - np.asarray(upright, float)).mean()
    assert error < 12


def rgba() -> Image.Image:
    image = Image.new("RGBA", (4, 4), (*RED, 255))
    image.putpixel((0, 0), (0, 0, 0, 0))
    image.putpixel((1, 0), (0, 0, 0, 128))
    return image


def palette_with_transparency() -> Image.Image:
    image = Image.new("P", (4, 4), 1)
    image.putpalette([9, 9, 9, *RED])
    image.putpixel((0, 0), 0)
    image.info["transparency"] = 0
    return image


def grey_alpha() -> Image.Image:
    image = Image.new("LA", (4, 4), (100, 255))
    image.putpixel((0, 0), (0, 0))
    return image


def colour_key() -> Image.Image:
    image = Image.new("RGB", (4, 4), RED)
    image.putpixel((0, 0), (1, 2, 3))
    image.info["transparency"] = (1, 2, 3)
    return image


def sixteen_bit() -> Image.Image:
    values = np.full((4, 4), 25700, np.uint16)
    values[0, 0] = 65535
    return Image.fromarray(values)


def one_bit() -> Image.Image:
    image = Image.new("1", (4, 4), 0)
    image.putpixel((0, 0), 1)
    return image


GREY = (100, 100, 100)
MODES = [
    ("rgba.png", rgba, WHITE, RED),
    ("rgba.webp", rgba, WHITE, RED),
    ("la.png", grey_alpha, WHITE, GREY),
    ("p.png", palette_with_transparency, WHITE, RED),
    ("p.gif", palette_with_transparency, WHITE, RED),
    ("key.png", colour_key, WHITE, RED),
    ("bit.png", one_bit, WHITE, (0, 0, 0)),
    ("bit.tif", one_bit, WHITE, (0, 0, 0)),
    ("grey.png", lambda: Image.new("L", (4, 4), 100), GREY, GREY),
    ("grey.jpg", lambda: Image.new("L", (4, 4), 100), GREY, GREY),
    ("sixteen.png", sixteen_bit, WHITE, GREY),
    ("sixteen.tif", sixteen_bit, WHITE, GREY),
    ("rgb.bmp", lambda: Image.new("RGB", (4, 4), RED), RED, RED),
    ("cmyk.tif", lambda: Image.new("CMYK", (4, 4), (0, 255, 255, 0)), RED, RED),
]


@pytest.mark.parametrize(("name", "make", "first", "last"), MODES, ids=[m[0] for m in MODES])
def test_every_mode_becomes_rgb_on_white(
    tmp_path: Path, name: str, make: Callable[[], Image.Image], first: tuple[int, ...], last: tuple[int, ...]
) -> None:
    options = {"lossless": True} if name.endswith("webp") else {}
    make().save(tmp_path / name, **options)
    loaded = images.load(tmp_path / name)
    assert loaded.mode == "RGB"
    assert loaded.getpixel((0, 0)) == pytest.approx(first, abs=1)
    assert loaded.getpixel((3, 3)) == pytest.approx(last, abs=1)


def test_half_transparent_is_mixed_with_white(tmp_path: Path) -> None:
    rgba().save(tmp_path / "a.png")
    assert images.load(tmp_path / "a.png").getpixel((1, 0)) == pytest.approx((127, 127, 127), abs=1)


def test_cmyk_jpeg(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=95)
    assert images.load(tmp_path / "a.jpg").getpixel((8, 8)) == pytest.approx(RED, abs=6)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif"])
def test_first_frame_of_an_animation(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    options = {"lossless": True} if suffix == "webp" else {}
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:], **options)
    assert images.load(tmp_path / f"a.{suffix}").getpixel((4, 4)) == RED


def damaged(path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(path)
    path.write_bytes(path.read_bytes()[:400])


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("cut.png", damaged, "can't be read as a picture"),
    ("cut.jpg", damaged, "can't be read as a picture"),
    ("empty.png", lambda path: path.touch(), "the file is empty"),
    ("text.png", lambda path: path.write_text("hello"), "no known format"),
    ("gone.png", lambda path: None, "No such file"),
    ("float.tif", lambda path: Image.new("F", (4, 4)).save(path), "no agreed range"),
]


@pytest.mark.parametrize(("name", "make", "reason"), BAD, ids=[b[0] for b in BAD])
def test_bad_picture_is_named(tmp_path: Path, name: str, make: Callable[[Path], object], reason: str) -> None:
    make(tmp_path / name)
    with pytest.raises(DataError) as caught:
        images.load(tmp_path / name)
    assert name in caught.value.message
    assert reason in caught.value.message
    assert caught.value.remedy


def test_bomb_is_refused_and_a_large_photo_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("1", (100, 100)).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 6000)  # 10000 is between once and twice that
    assert images.load(tmp_path / "a.png").size == (100, 100)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(DataError, match="megapixels"):
        images.load(tmp_path / "a.png")


@settings(deadline=None, max_examples=60)
@given(position=st.integers(0, 300), value=st.integers(0, 255))
def test_flipped_byte_gives_a_picture_or_a_data_error(
    position: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("flip") / "a.png"
    rgba().save(path)
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    path.write_bytes(bytes(data))
    try:
        assert images.load(path).mode == "RGB"
    except DataError as error:
        assert "a.png" in error.message


SIDES = st.integers(1, 4000)


@given(width=SIDES, height=SIDES, target_height=SIDES, target_width=SIDES)
def test_crop_box_is_centred_inside_and_of_the_right_aspect(
    width: int, height: int, target_height: int, target_width: int
) -> None:
    left, top, right, bottom = images.crop_box((width, height), (target_height, target_width))
    assert left >= -1e-6 and right <= width + 1e-6
    assert top >= -1e-6 and bottom <= height + 1e-6
    assert left == pytest.approx(width - right) and top == pytest.approx(height - bottom)
    assert (right - left) * target_height == pytest.approx((bottom - top) * target_width, rel=1e-9)
    assert min(left, top) == pytest.approx(0, abs=1e-6)


SIZES = [(33, 65), (47, 33), (48, 32), (49, 31), (1, 1), (3, 400)]


@pytest.mark.parametrize("source", SIZES)
@pytest.mark.parametrize("size", [(32, 64), (64, 64), (16, 48)])
def test_identical_target_and_control_give_identical_pixels(
    source: tuple[int, int], size: tuple[int, int]
) -> None:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (*source, 3), dtype=np.uint8)
    target, control = (images.fit_cover(Image.fromarray(pixels.copy()), size) for _ in range(2))
    assert target.size == (size[1], size[0])
    assert np.array_equal(images.to_array(target), images.to_array(control))


def test_an_edit_in_one_place_stays_in_that_place() -> None:
    control = Image.new("RGB", (65, 33), WHITE)
    target = control.copy()
    target.paste(RED, (30, 14, 36, 20))
    difference = images.to_array(images.fit_cover(target, (32, 64))) - images.to_array(
        images.fit_cover(control, (32, 64))
    )
    rows, columns = np.nonzero(np.abs(difference).max(axis=0) > 0.5)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == pytest.approx((13, 19, 29, 35), abs=1)


def test_picture_of_the_right_size_is_left_as_it_is() -> None:
    image = quadrants()
    assert np.array_equal(np.asarray(images.fit_cover(image, (32, 64))), np.asarray(image))


@pytest.mark.parametrize(("grey", "value"), [(0, -1.0), (255, 1.0), (51, -0.6)])
def test_pixels_are_what_the_vae_wants(grey: int, value: float) -> None:
    pixels = images.to_array(Image.new("RGB", (6, 4), (grey,) * 3))
    assert pixels.shape == (3, 4, 6) and pixels.dtype == np.float32 and pixels.flags["C_CONTIGUOUS"]
    assert pixels == pytest.approx(value, abs=1e-6)


def test_channels_come_first_in_order() -> None:
    assert images.to_array(Image.new("RGB", (1, 1), RED)).ravel().tolist() == [1.0, -1.0, -1.0]
