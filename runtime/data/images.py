"""Any picture that Pillow reads -> upright 8-bit RGB, then pixels of one size.

Alpha is flattened on white, 16-bit grey is scaled to 8, of an animation the first frame
counts, colour profiles are not applied. Target and control of the same size get the same
crop box, since the box is a function of the two sizes alone.
"""

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from runtime.errors import DataError

Box = tuple[float, float, float, float]
BACKGROUND = (255, 255, 255)


def load(path: Path) -> Image.Image:
    """Upright RGB. Raises DataError that names the file."""
    try:
        # Pillow only warns from 89 to 179 megapixels, which is a photo; above that it refuses, as it should.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                image.load()
                return to_rgb(ImageOps.exif_transpose(image))
    except DataError as error:
        raise DataError(f"{path}: {error.message}", remedy=error.remedy) from error
    except Exception as error:  # Pillow's readers raise whatever a damaged file leads them into
        raise DataError(
            f"{path} can't be read as a picture: {_why(error, path)}",
            remedy="replace or remove the file, then finetune dataset",
        ) from error


def _why(error: Exception, path: Path) -> str:
    if path.is_file() and path.stat().st_size == 0:
        return "the file is empty"
    if isinstance(error, Image.DecompressionBombError):
        return "it claims more than 179 megapixels"
    if isinstance(error, UnidentifiedImageError):
        return "no known format"
    return str(error) or type(error).__name__


def to_rgb(image: Image.Image) -> Image.Image:
    if image.mode == "F":
        raise DataError("float pixels have no agreed range", remedy="save the picture with 8 or 16 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        return _from_16_bit(image)
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        page = Image.new("RGBA", layer.size, (*BACKGROUND, 255))
        return Image.alpha_composite(page, layer).convert("RGB")
    return image.convert("RGB")


def _from_16_bit(image: Image.Image) -> Image.Image:
    """Pillow's own conversion clips at 255 instead of scaling."""
    wide = np.asarray(image).astype(np.float64)
    return Image.fromarray(np.clip(np.rint(wide / 257), 0, 255).astype(np.uint8)).convert("RGB")


def crop_box(source: tuple[int, int], size: tuple[int, int]) -> Box:
    """The largest centred part of `source` (W, H) with the aspect of `size` (H, W)."""
    width, height = source
    scale = min(width / size[1], height / size[0])
    left, top = (width - size[1] * scale) / 2, (height - size[0] * scale) / 2
    return (left, top, width - left, height - top)


def fit_cover(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """`image` covering `size` (H, W), what stands over cut off evenly."""
    box = crop_box(image.size, size)
    return image.resize((size[1], size[0]), Image.Resampling.LANCZOS, box=box)


def to_array(image: Image.Image) -> NDArray[np.float32]:
    """float32 [3, H, W] in -1..1, which is what the VAE was trained on."""
    pixels = np.asarray(image, dtype=np.float32) / np.float32(127.5) - np.float32(1)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))
