"""A grid that a person looks at: for each sample control, base, adapter and target side by side."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

from runtime.drawing import INK, PAPER, cell, drawable

MARGIN, CELL, CAPTION, HEAD = 8, 192, 40, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One sample; `pictures` in the order of the grid's columns."""

    caption: str
    pictures: tuple[Image.Image, ...]


def grid(columns: Sequence[str], rows: Sequence[Row]) -> Image.Image:
    """All rows under one line of column names, each picture fitted into a square cell."""
    width = MARGIN + len(columns) * (CELL + MARGIN)
    height = HEAD + MARGIN + len(rows) * (CELL + CAPTION)
    page = Image.new("RGB", (width, height), PAPER)
    draw = ImageDraw.Draw(page)
    for place, name in enumerate(columns):
        draw.text((MARGIN + place * (CELL + MARGIN), MARGIN), name, fill=INK)
    for index, row in enumerate(rows):
        top = HEAD + MARGIN + index * (CELL + CAPTION)
        for place, picture in enumerate(row.pictures):
            page.paste(cell(picture, CELL), (MARGIN + place * (CELL + MARGIN), top))
        text = textwrap.shorten(row.caption, width=width // 7, placeholder=" ...")
        draw.text((MARGIN, top + CELL + 4), drawable(text), fill=INK)
    return page
