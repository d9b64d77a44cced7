"""Any picture that Pillow reads -> upright 8-bit RGB or RGBA, then pixels of one size.

Alpha is flattened on a stated background or kept, 16-bit grey is scaled to 8, of an animation
the first frame counts, colour profiles are not applied.
"""

import warnings
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from runtime import files
from runtime.data.buckets import Placed
from runtime.errors import DataError
from runtime.index import Index

Colour = tuple[int, int, int]

REMEDY = "replace or remove the file, then finetune dataset"
BACKGROUND: Colour = (255, 255, 255)
# Whatever a file is called, no other reader gets its bytes: some of Pillow's start a program (EPS) or only
# stand for a picture that is elsewhere. MPO is what phones write as .jpg.
FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
MODES = frozenset(("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "I"))


def load(path: Path, background: Colour = BACKGROUND, keep_alpha: bool = False) -> Image.Image:
    """Upright RGB, or with `keep_alpha` RGBA, opaque where the file has no alpha. Raises DataError that names the file.

    A file that claims too many pixels is refused before any is decoded.
    """
    try:
        # Pillow only warns from 89 to 179 megapixels, which is a photo; above that it refuses, as it should.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            # By file, not by name: what Pillow maps into memory, some TIFFs, it doesn't turn upright right.
            with path.open("rb") as file, Image.open(file, formats=_formats()) as image:
                image.load()
                upright = _to_8_bit(ImageOps.exif_transpose(image))
    except DataError as error:
        raise DataError(f"{path}: {error.message}", remedy=error.remedy) from error
    except Exception as error:  # Pillow's readers raise whatever a damaged file leads them into
        raise DataError(
            f"{path} can't be read as a picture: {_why(error, path)}",
            remedy=REMEDY,
        ) from error
    return upright.convert("RGBA") if keep_alpha else flatten(upright, background)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """A file's size in bytes and digest; width and height are those of the upright picture."""

    size: int
    sha256: str
    width: int
    height: int


def identify(path: Path, name: str, index: Index) -> Identity:
    """Decoded whole, so that a damaged file is found; not opened where `index` knows it under `name`.

    Raises DataError that names the file.
    """
    try:
        known = index.get(path, name)
        if not known.keys() >= {"sha256", "width", "height"}:
            before = path.stat()
            picture = load(path)
            found = {"sha256": files.file_digest(path), "width": picture.width, "height": picture.height}
            index.put(path, name, before.st_size, before.st_mtime_ns, found)
            known = {"size": before.st_size, **found}
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}", remedy=REMEDY) from error
    return Identity(**{field: known[field] for field in ("size", "sha256", "width", "height")})


@lru_cache(maxsize=1)
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)  # AVIF from Pillow 11.3 on


def _why(error: Exception, path: Path) -> str:
    if path.is_file() and path.stat().st_size == 0:
        return "the file is empty"
    if isinstance(error, Image.DecompressionBombError):
        return "it claims more than 179 megapixels"
    if isinstance(error, UnidentifiedImageError):
        return f"no known format; expected one of {', '.join(_formats())}"
    return str(error) or type(error).__name__


def flatten(image: Image.Image, background: Colour = BACKGROUND) -> Image.Image:
    """RGB, `background` where the picture is transparent."""
    if not image.has_transparency_data:
        return image.convert("RGB")
    layer = image.convert("RGBA")
    page = Image.new("RGBA", layer.size, (*background, 255))
    return Image.alpha_composite(page, layer).convert("RGB")


def _to_8_bit(image: Image.Image) -> Image.Image:
    """Of a mode that Pillow converts to RGB and RGBA without loss of meaning."""
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bit(image)
    if image.mode not in MODES:
        kind = "float pixels have no agreed range" if image.mode == "F" else f"colour mode {image.mode}"
        raise DataError(f"{kind}; expected grey, RGB, palette or CMYK", remedy="save the picture as PNG")
    return image


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Pillow's own conversion clips at 255 instead of scaling, and forgets the transparent value."""
    wide = np.asarray(image).astype(np.int32)
    least, most = int(wide.min()), int(wide.max())
    if least < 0 or most > 65535:
        raise DataError(
            f"grey values from {least} to {most}; expected 0 to 65535", remedy="save the picture as PNG"
        )
    grey = Image.fromarray(((wide + 128) // 257).astype(np.uint8))  # 65535 / 255 is 257
    key = image.info.get("transparency")
    if key is not None:
        grey.putalpha(Image.fromarray(np.where(wide == key, 0, 255).astype(np.uint8)))
    return grey


def fit(image: Image.Image, placed: Placed) -> Image.Image:
    """The part of `image` in the box, scaled to the size."""
    height, width = placed.size
    return image.resize((width, height), Image.Resampling.LANCZOS, box=placed.box)


def to_array(image: Image.Image) -> NDArray[np.float32]:
    """float32 [3, H, W], or [4, H, W] of RGBA, in -1..1, which is what the VAE was trained on."""
    pixels = np.asarray(image, dtype=np.float32) / np.float32(127.5) - np.float32(1)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
