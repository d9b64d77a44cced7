"""A grid that a person looks at: for each sample control, base, adapter and target side by side."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image, ImageDraw

MARGIN, CELL, CAPTION, HEAD = 8, 192, 40, 20
INK, PAPER = (32, 32, 32), (255, 255, 255)


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
            page.paste(_fit(picture), (MARGIN + place * (CELL + MARGIN), top))
        text = textwrap.shorten(row.caption, width=width // 7, placeholder=" ...")
        draw.text((MARGIN, top + CELL + 4), _drawable(text), fill=INK)
    return page


def _fit(picture: Image.Image) -> Image.Image:
    """Scaled into the cell, small pictures without smoothing, so that pixels can be judged."""
    scale = CELL / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    cell = Image.new("RGB", (CELL, CELL), PAPER)
    cell.paste(picture.resize(size, how), ((CELL - size[0]) // 2, (CELL - size[1]) // 2))
    return cell


def _drawable(text: str) -> str:
    """Pillow's built-in font has Latin letters only."""
    return text.encode("latin-1", "replace").decode("latin-1")
