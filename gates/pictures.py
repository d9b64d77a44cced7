"""Pictures: whether they decode, their pixels, and how far two of them are apart, in 0..255."""

import contextlib
import io
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gates.evidence import EvidenceError, MissingEvidenceError, Reading, attempt, read_bytes

if TYPE_CHECKING:
    import numpy as np

MAX_PICTURE_BYTES = 256 * 2**20
MAX_IMAGE_PIXELS = 100_000_000  # a 100-megapixel photograph; above that it is a decompression bomb
DECODERS = 4  # threads; as many of the largest pictures take a little over 1 GiB
ORIENTATION, TURNED = 0x0112, (5, 6, 7, 8)  # EXIF: the values at which width and height change places


def picture_size(path: Path, shown: str) -> tuple[int, int]:
    """Width and height as displayed, after decoding every pixel. Raises EvidenceError if one can't be."""
    with _without_warnings():
        return _size(path, shown)


def picture_sizes(places: Sequence[tuple[Path, str]]) -> list[Reading[tuple[int, int]]]:
    """`picture_size` of each (path, shown). Decoding is most of what judging a dataset takes, so side by side."""
    with _without_warnings(), ThreadPoolExecutor(max_workers=DECODERS) as pool:
        return list(pool.map(lambda place: attempt(lambda: _size(*place)), places))


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """What matters raises; the rest is about metadata. Not within a thread: warnings are the process's."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _size(path: Path, shown: str) -> tuple[int, int]:
    from PIL import Image

    try:
        with Image.open(path) as image:
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise EvidenceError(shown, f"has {image.width}x{image.height} pixels, too many")
            image.load()
            turned = image.getexif().get(ORIENTATION) in TURNED
            return (image.height, image.width) if turned else (image.width, image.height)
    except FileNotFoundError:
        raise MissingEvidenceError(shown, "is missing") from None
    except EvidenceError:
        raise
    except Exception as error:  # Pillow's plugins raise all kinds: struct, Syntax, Value, OS, its bomb error
        reason = str(error).replace(str(path), shown).splitlines()
        raise EvidenceError(
            shown, f"does not decode ({reason[0] if reason else type(error).__name__})"
        ) from error


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
