"""The grid of pictures."""

import numpy as np
from PIL import Image

from runtime.inference import comparison
from runtime.inference.comparison import CELL, HEAD, MARGIN, Row


def flat(colour: tuple[int, int, int], size: tuple[int, int] = (64, 64)) -> Image.Image:
    return Image.new("RGB", size, colour)


def test_each_picture_stands_in_its_column_and_row() -> None:
    colours = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (9, 9, 9)]
    rows = [
        Row(caption="one", pictures=(flat(colours[0]), flat(colours[1]))),
        Row(caption="two", pictures=(flat(colours[2]), flat(colours[3]))),
    ]
    page = comparison.grid(["base", "adapter"], rows)
    assert page.size == (MARGIN + 2 * (CELL + MARGIN), HEAD + MARGIN + 2 * (CELL + comparison.CAPTION))
    for index, colour in enumerate(colours):
        row, column = divmod(index, 2)
        x = MARGIN + column * (CELL + MARGIN) + CELL // 2
        y = HEAD + MARGIN + row * (CELL + comparison.CAPTION) + CELL // 2
        assert page.getpixel((x, y)) == colour


def test_shape_of_a_picture_is_kept() -> None:
    page = comparison.grid(["a"], [Row(caption="", pictures=(flat((255, 0, 0), (100, 50)),))])
    red = np.all(np.asarray(page) == (255, 0, 0), axis=-1)
    assert (red.any(0).sum(), red.any(1).sum()) == (CELL, CELL // 2)


def test_small_pictures_are_enlarged_without_smoothing() -> None:
    pixels = np.array([[[255, 0, 0], [0, 0, 255]]], dtype=np.uint8)
    page = comparison.grid(["a"], [Row(caption="", pictures=(Image.fromarray(pixels),))])
    x, y = MARGIN, HEAD + MARGIN + CELL // 2
    seen = {page.getpixel((x + place, y)) for place in range(CELL)}
    assert seen == {(255, 0, 0), (0, 0, 255)}


def test_captions_of_any_script_and_length() -> None:
    caption = "\u628a\u5706\u5708\u6d82\u6210\u7ea2\u8272 \U0001f600 " + "long " * 200
    comparison.grid(["a"], [Row(caption=caption, pictures=(flat((1, 2, 3)),))])
    comparison.grid(["a"], [])
