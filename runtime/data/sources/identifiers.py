"""From whatever an archive calls a row to a file name that every system takes."""

import re
import unicodedata
from collections.abc import Iterator

from runtime.data.sources.names import CONTROL, MASK, normal

LONGEST = 120  # bytes; with suffixes and the name of a temporary file it stays under the 255 of file systems

_FORBIDDEN = re.compile(r'[<>:"/\\|?*]')
# Windows opens a device for these, whatever extension follows.
_DEVICE = re.compile(r"(?:con|prn|aux|nul|conin\$|conout\$|(?:com|lpt)[0-9¹²³])", re.IGNORECASE)


def slug(name: str) -> str:
    """`name` in NFC where it is a safe file stem, else a likeness of it; empty where none is worth having.

    Names that mean a control or mask in the recipe's layout are not taken: `a_mask` would become that of `a`.
    """
    text = "".join("_" if unicodedata.category(sign) in ("Cc", "Cs") else sign for sign in normal(name))
    text = _FORBIDDEN.sub("_", text).strip(" .")
    if not text.strip("_. ") or len(text.encode()) > LONGEST:
        return ""
    if _DEVICE.fullmatch(text.partition(".")[0].rstrip()) or CONTROL.fullmatch(text) or MASK.fullmatch(text):
        return ""
    return text


def fold(identifier: str) -> str:
    """Equal for names that are one file on Windows or macOS."""
    return normal(identifier.casefold())


def candidates(name: str, archive: str, number: int) -> Iterator[str]:
    """Ids for a row, the best first, without end: its own name, else `<archive>-<row number>`."""
    if own := slug(name):
        yield own
    stem = slug(archive) or "row"
    base = f"{stem}-{number:06d}"
    yield base
    count = 2
    while True:
        yield f"{base}-{count}"
        count += 1
