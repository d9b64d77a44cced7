"""Pixels of pictures, and how far two of them are apart, in 0..255."""

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gates.evidence import picture_size, read_bytes

if TYPE_CHECKING:
    import numpy as np

MAX_PICTURE_BYTES = 256 * 2**20


def pixels(path: Path, shown: str) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """[H, W, 3] of a picture that decodes. Raises EvidenceError for any other."""
    import numpy as np
    from PIL import Image

    picture_size(path, shown)  # refuses what does not decode, with its reason
    data = read_bytes(path, shown, limit=MAX_PICTURE_BYTES)
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert("RGB"), dtype=np.float64)


def distance(one: "np.ndarray[Any, Any]", other: "np.ndarray[Any, Any]") -> float:
    """Mean absolute difference; NaN, which passes no threshold, where the sizes differ."""
    if one.shape != other.shape:
        return float("nan")
    return float(abs(one - other).mean())


def spread(one: "np.ndarray[Any, Any]") -> float:
    """Standard deviation over all pixels of the channel that varies most: 0 is a blank sheet."""
    return float(one.std(axis=(0, 1)).max())
