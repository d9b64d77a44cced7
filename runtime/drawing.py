"""Words and small pictures on a page for a person to look at."""

import unicodedata
from functools import lru_cache

from PIL import Image, ImageFont

INK, PAPER = (32, 32, 32), (255, 255, 255)
MORE = " ..."
PLAIN = str.maketrans(
    {"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-", "ß": "ss"}
)

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@lru_cache
def font(size: float) -> Font:
    """Pillow's own, which is there on every system; `size` in pixels."""
    return ImageFont.load_default(size)


def drawable(text: str) -> str:
    """One line of what Pillow's built-in font can show, which is ASCII: letters lose their accents, others are ?."""
    parts = unicodedata.normalize("NFKD", text.translate(PLAIN))
    kept = "".join(letter for letter in parts if not unicodedata.combining(letter))
    return " ".join(kept.encode("ascii", "replace").decode("ascii").split())


def cell(picture: Image.Image, side: int, paper: tuple[int, int, int] = PAPER) -> Image.Image:
    """Scaled into a square, small pictures without smoothing, so that pixels can be judged."""
    scale = side / max(picture.size)
    size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
    how = Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS
    square = Image.new("RGB", (side, side), paper)
    square.paste(picture.resize(size, how), ((side - size[0]) // 2, (side - size[1]) // 2))
    return square


def wrap(text: str, face: Font, width: float, lines: int) -> list[str]:
    """`text` in at most `lines` lines of `width` pixels; what doesn't fit is cut and ends in dots."""
    left, found = drawable(text), list[str]()
    while left and len(found) < lines:
        if face.getlength(left) <= width:
            return [*found, left]
        last = len(found) == lines - 1
        count = _fitting(left, face, width - (face.getlength(MORE) if last else 0))
        space = left.rfind(" ", 0, count + 1)
        count = space if space > 0 else count  # a word longer than a line is broken
        found.append(left[:count].rstrip() + (MORE if last else ""))
        left = left[count:].lstrip()
    return found


def _fitting(text: str, face: Font, width: float) -> int:
    """How many characters fit, at least one."""
    low, high = 1, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if face.getlength(text[:middle]) <= width else (low, middle - 1)
    return low
