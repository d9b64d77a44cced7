import io
import json
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from runtime.data import images
from runtime.data.buckets import Placed, cover
from runtime.errors import DataError
from runtime.index import Index

RED, BLUE, WHITE = (255, 0, 0), (0, 0, 255), (255, 255, 255)
ORIENTATION = 0x0112
Image.init()
HAS_AVIF = "AVIF" in Image.SAVE
AVIF = pytest.param("avif", marks=pytest.mark.skipif(not HAS_AVIF, reason="this Pillow has no AVIF"))
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
@pytest.mark.parametrize("suffix", ["jpg", "png", "tif", "webp", AVIF])
def test_photo_comes_out_upright(tmp_path: Path, orientation: int, suffix: str) -> None:
    upright = quadrants()
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / f"photo.{suffix}"
    options = {"quality": 95} if suffix in ("jpg", "webp", "avif") else {}
    STORED[orientation](upright).save(path, exif=exif, **options)
    loaded = images.load(path)
    assert loaded.size == (64, 32)
    error = np.abs(np.asarray(loaded, float) - np.asarray(upright, float)).mean()
    assert error < 12


@pytest.mark.parametrize("orientation", STORED)
@pytest.mark.parametrize(
    "kind",
    [f"{mode}.png" for mode in ("RGBA", "LA", "P", "1", "L", "I;16")]
    + [f"{mode}.tif" for mode in ("RGB", "RGBA", "LA", "P", "1", "L", "I;16", "CMYK")],
)
def test_every_mode_comes_out_upright(tmp_path: Path, orientation: int, kind: str) -> None:
    """A pixel in one corner, which only one orientation brings back there."""
    mode = kind.split(".")[0]
    values = np.zeros((2, 3), np.uint8)
    values[0, 2] = 255
    upright = Image.fromarray(values)
    made = Image.fromarray(values.astype(np.uint16) * 257) if mode == "I;16" else upright.convert(mode)
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    path = tmp_path / kind.replace(";", "")
    STORED[orientation](made).save(path, exif=exif)
    assert np.array_equal(np.asarray(images.load(path)), np.asarray(upright.convert("RGB")))


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


def sixteen_bit_key() -> Image.Image:
    image = sixteen_bit()
    image.info["transparency"] = 65535
    return image


def deep(channels: int) -> bytes:
    """A PNG of 16 bits a channel, which Pillow reads but doesn't write: 65535, 25700, 257 and half alpha."""
    colour = {2: 4, 3: 2, 4: 6}[channels]
    values = {2: (25700, 32896), 3: (65535, 25700, 257), 4: (65535, 25700, 257, 32896)}[channels]
    rows = (b"\0" + struct.pack(f">{channels}H", *values) * 4) * 4
    return png(4, 4, 16, colour, zlib.compress(rows))


def png(width: int, height: int, depth: int, colour: int, data: bytes) -> bytes:
    def chunk(name: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))

    head = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    parts = (chunk(b"IHDR", head), chunk(b"IDAT", data), chunk(b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


GREY, GREEN = (100, 100, 100), (0, 200, 100)
# name, picture, its pixel at 0, 0 as RGBA (fully transparent: alpha alone counts), and at 3, 3
MODES: list[tuple[str, Callable[[], Image.Image], tuple[int, ...], tuple[int, ...]]] = [
    ("rgba.png", rgba, (0, 0, 0, 0), (*RED, 255)),
    ("rgba.webp", rgba, (0, 0, 0, 0), (*RED, 255)),
    ("rgba.tif", rgba, (0, 0, 0, 0), (*RED, 255)),
    ("la.png", grey_alpha, (0, 0, 0, 0), (*GREY, 255)),
    ("la.tif", grey_alpha, (0, 0, 0, 0), (*GREY, 255)),
    ("p.png", palette_with_transparency, (9, 9, 9, 0), (*RED, 255)),
    ("p.gif", palette_with_transparency, (9, 9, 9, 0), (*RED, 255)),
    ("opaque.gif", lambda: Image.new("RGB", (4, 4), RED).quantize(), (*RED, 255), (*RED, 255)),
    ("key.png", colour_key, (1, 2, 3, 0), (*RED, 255)),
    ("bit.png", one_bit, (*WHITE, 255), (0, 0, 0, 255)),
    ("bit.tif", one_bit, (*WHITE, 255), (0, 0, 0, 255)),
    ("bit.bmp", one_bit, (*WHITE, 255), (0, 0, 0, 255)),
    ("grey.png", lambda: Image.new("L", (4, 4), 100), (*GREY, 255), (*GREY, 255)),
    ("grey.jpg", lambda: Image.new("L", (4, 4), 100), (*GREY, 255), (*GREY, 255)),
    ("sixteen.png", sixteen_bit, (*WHITE, 255), (*GREY, 255)),
    ("sixteen.tif", sixteen_bit, (*WHITE, 255), (*GREY, 255)),
    ("sixteen-key.png", sixteen_bit_key, (255, 255, 255, 0), (*GREY, 255)),
    ("rgb.bmp", lambda: Image.new("RGB", (4, 4), GREEN), (*GREEN, 255), (*GREEN, 255)),
    ("cmyk.tif", lambda: Image.new("CMYK", (4, 4), (0, 255, 255, 0)), (*RED, 255), (*RED, 255)),
    ("cmyk-black.tif", lambda: Image.new("CMYK", (4, 4), (0, 0, 0, 155)), (*GREY, 255), (*GREY, 255)),
]


@pytest.mark.parametrize(("name", "make", "first", "last"), MODES, ids=[m[0] for m in MODES])
def test_every_mode_is_flattened_or_keeps_its_alpha(
    tmp_path: Path, name: str, make: Callable[[], Image.Image], first: tuple[int, ...], last: tuple[int, ...]
) -> None:
    options: dict[str, Any] = {"lossless": True} if name.endswith("webp") else {}
    path = tmp_path / name
    make().save(path, **options)
    kept = images.load(path, keep_alpha=True)
    assert kept.mode == "RGBA"
    alphas = [kept.getpixel(place)[3] for place in ((0, 0), (3, 3))]  # type: ignore[index]
    assert alphas == [first[3], last[3]] and kept.getpixel((3, 3)) == last
    for background in (WHITE, (0, 128, 255)):
        loaded = images.load(path, background=background)
        assert loaded.mode == "RGB"
        assert loaded.getpixel((0, 0)) == (first[:3] if first[3] else background)
        assert loaded.getpixel((3, 3)) == last[:3]
    assert images.load(path).tobytes() == images.load(path, background=WHITE).tobytes()


@pytest.mark.parametrize(
    ("channels", "pixel"), [(2, (100, 100, 100, 128)), (3, (255, 100, 1, 255)), (4, (255, 100, 1, 128))]
)
def test_sixteen_bits_a_channel(tmp_path: Path, channels: int, pixel: tuple[int, ...]) -> None:
    (tmp_path / "a.png").write_bytes(deep(channels))
    assert images.load(tmp_path / "a.png", keep_alpha=True).getpixel((2, 2)) == pixel
    flat = images.load(tmp_path / "a.png", background=(255, 0, 0)).getpixel((2, 2))
    mixed = [back + (value - back) * pixel[3] / 255 for value, back in zip(pixel, (255, 0, 0), strict=False)]
    assert flat == pytest.approx(mixed, abs=1)


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_sixteen_bits_of_grey_are_scaled_not_cut(tmp_path: Path, suffix: str) -> None:
    values = np.arange(0, 65536, 5, dtype=np.uint16).reshape(4, -1)
    Image.fromarray(values).save(tmp_path / f"a.{suffix}")
    found = np.asarray(images.load(tmp_path / f"a.{suffix}"))[..., 0]
    assert np.array_equal(found, np.rint(values / 257).astype(np.uint8))


def test_half_transparent_is_mixed_with_white(tmp_path: Path) -> None:
    rgba().save(tmp_path / "a.png")
    assert images.load(tmp_path / "a.png").getpixel((1, 0)) == (127, 127, 127)
    assert images.load(tmp_path / "a.png", background=BLUE).getpixel((1, 0)) == (0, 0, 127)
    assert images.load(tmp_path / "a.png", keep_alpha=True).getpixel((1, 0)) == (0, 0, 0, 128)


def test_cmyk_jpeg(tmp_path: Path) -> None:
    Image.new("CMYK", (16, 16), (0, 255, 255, 0)).save(tmp_path / "a.jpg", quality=95)
    assert images.load(tmp_path / "a.jpg").getpixel((8, 8)) == pytest.approx(RED, abs=6)


@pytest.mark.parametrize("suffix", ["gif", "webp", "png", "tif", "mpo", AVIF])
def test_first_frame_of_an_animation(tmp_path: Path, suffix: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in (RED, BLUE)]
    options: dict[str, Any] = {"webp": {"lossless": True}, "avif": {"subsampling": "4:4:4"}}.get(suffix, {})
    frames[0].save(tmp_path / f"a.{suffix}", save_all=True, append_images=frames[1:], **options)
    assert images.load(tmp_path / f"a.{suffix}").getpixel((4, 4)) == pytest.approx(RED, abs=3)


def wide_grey(path: Path) -> None:
    Image.fromarray(np.array([[0, 65536]], np.int32)).save(path)


BAD: list[tuple[str, Callable[[Path], object], str]] = [
    ("empty.png", lambda path: path.touch(), "the file is empty"),
    ("text.png", lambda path: path.write_text("hello"), "expected one of PNG, JPEG"),
    ("page.png", lambda path: path.write_text("%!PS-Adobe-3.0 EPSF-3.0\n"), "no known format"),
    ("icon.png", lambda path: Image.new("RGB", (16, 16)).save(path, "ICO"), "no known format"),
    ("gone.png", lambda path: None, "No such file"),
    ("folder.png", lambda path: path.mkdir(), "can't be read as a picture"),
    ("nothing.png", lambda path: path.write_bytes(png(0, 5, 8, 2, b"")), "can't be read as a picture"),
    ("float.tif", lambda path: Image.new("F", (4, 4)).save(path), "no agreed range"),
    ("lab.tif", lambda path: Image.new("LAB", (4, 4)).save(path), "colour mode LAB"),
    ("wide.tif", wide_grey, "grey values from 0 to 65536; expected 0 to 65535"),
    ("bomb.png", lambda path: path.write_bytes(png(20000, 20000, 8, 2, b"")), "more than 179 megapixels"),
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


def test_bomb_is_refused_before_its_pixels_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(self: Any) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", decode)
    (tmp_path / "a.png").write_bytes(png(100_000, 100_000, 1, 0, b""))
    with pytest.raises(DataError, match="megapixels"):
        images.load(tmp_path / "a.png")
    with pytest.raises(DataError, match="megapixels"):
        images.identify(tmp_path / "a.png", "a.png", Index(path=tmp_path / "index.json"))


WRITTEN: list[tuple[str, dict[str, Any]]] = [
    ("PNG", {}),
    ("JPEG", {"quality": 90}),
    ("JPEG", {"progressive": True}),
    ("GIF", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("BMP", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    *([("AVIF", {})] if HAS_AVIF else []),
]


@pytest.mark.parametrize(("name", "options"), WRITTEN, ids=[f"{name}{options}" for name, options in WRITTEN])
def test_truncated_anywhere_is_refused_or_whole(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """Half a picture never passes for a picture. What only lacks its end mark may."""
    pixels = np.random.default_rng(0).integers(0, 256, (24, 32, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, name, **options)
    data, path, refused = buffer.getvalue(), tmp_path / "a.img", 0
    path.write_bytes(data)
    whole = images.load(path).tobytes()
    for length in range(0, len(data), max(1, len(data) // 50)):
        path.write_bytes(data[:length])
        try:
            assert images.load(path).tobytes() == whole
        except DataError as error:
            assert "a.img" in error.message
            refused += 1
    assert refused > 40


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


def test_an_edit_in_one_place_stays_in_that_place() -> None:
    control = Image.new("RGB", (65, 33), WHITE)
    target = control.copy()
    target.paste(RED, (30, 14, 36, 20))
    placed = cover((33, 65), (32, 64))
    difference = images.to_array(images.fit(target, placed)) - images.to_array(images.fit(control, placed))
    rows, columns = np.nonzero(np.abs(difference).max(axis=0) > 0.5)
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == pytest.approx((13, 19, 29, 35), abs=1)


def test_picture_of_the_right_size_is_left_as_it_is() -> None:
    image = quadrants()
    fitted = images.fit(image, cover((32, 64), (32, 64)))
    assert np.array_equal(np.asarray(fitted), np.asarray(image))


def test_fit_takes_the_box_and_no_more() -> None:
    fitted = images.fit(quadrants(), Placed(size=(16, 48), box=(32, 0, 64, 16)))
    assert fitted.size == (48, 16)
    assert fitted.crop((6, 0, 48, 10)).getcolors() == [(42 * 10, BLUE)]  # the edge blends, as in the picture


def test_alpha_is_scaled_without_a_fringe() -> None:
    """What is invisible has a colour too; it must not bleed into what is seen."""
    image = Image.new("RGBA", (8, 8), (0, 255, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 4, 8))
    fitted = np.asarray(images.fit(image, cover((8, 8), (16, 16))))
    assert fitted[:, :6, 3].min() > 240 and fitted[:, 10:, 3].max() < 15
    assert fitted[..., 1][fitted[..., 3] > 0].max() == 0


@pytest.mark.parametrize(("grey", "value"), [(0, -1.0), (255, 1.0), (51, -0.6)])
def test_pixels_are_what_the_vae_wants(grey: int, value: float) -> None:
    pixels = images.to_array(Image.new("RGB", (6, 4), (grey,) * 3))
    assert pixels.shape == (3, 4, 6) and pixels.dtype == np.float32 and pixels.flags["C_CONTIGUOUS"]
    assert pixels == pytest.approx(value, abs=1e-6)


def test_alpha_is_a_fourth_channel() -> None:
    pixels = images.to_array(Image.new("RGBA", (6, 4), (255, 0, 0, 255)))
    assert pixels.shape == (4, 4, 6) and pixels[3].min() == 1.0


def test_channels_come_first_in_order() -> None:
    assert images.to_array(Image.new("RGB", (1, 1), RED)).ravel().tolist() == [1.0, -1.0, -1.0]


def test_identity_is_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, index = tmp_path / "a.jpg", Index(path=tmp_path / "index.json")
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    quadrants().save(path, exif=exif)
    os.utime(path, (1e9, 1e9))
    first = images.identify(path, "a.jpg", index)
    assert (first.width, first.height, first.size) == (32, 64, path.stat().st_size)
    assert len(first.sha256) == 64
    index.save()
    again = Index.open(tmp_path / "index.json")
    assert json.loads((tmp_path / "index.json").read_text(encoding="utf-8"))
    with monkeypatch.context() as patch:
        patch.setattr(images, "load", lambda path: pytest.fail("opened again"))
        assert images.identify(path, "a.jpg", again) == first
    path.write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"a\.jpg"):
        images.identify(path, "a.jpg", again)
    path.unlink()
    with pytest.raises(DataError, match=r"a\.jpg can't be read"):
        images.identify(path, "a.jpg", again)
