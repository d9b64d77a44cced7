"""What the extension of a file in a WebDataset shard says: target, control, mask or caption."""

import json
from collections.abc import Iterable, Sequence

from runtime.data import captions
from runtime.data.sources.rows import MASKS, TARGETS, Columns, controls_among, one_of
from runtime.errors import DataError

PICTURES = ("png", "jpg", "jpeg", "webp", "bmp", "gif", "tif", "tiff", "avif")
"""Of `0001.png` and `0001.jpg` the first counts."""
CAPTION_FIELDS = ("caption", "text", "prompt")


def is_picture(extension: str, columns: Columns) -> bool:
    asked = (columns.image, *columns.controls, columns.mask)
    return extension.rpartition(".")[2] in PICTURES or any(_names(key, extension) for key in asked if key)


def is_text(extension: str, asked: str | None) -> bool:
    if asked is None:
        return extension in ("txt", "json")
    return f"{asked.lower()}.".startswith(f"{extension}.")


def _part(extension: str) -> str:
    """`target.png` is the target; `png` is nothing but a picture."""
    part, _, suffix = extension.rpartition(".")
    return part if suffix in PICTURES else extension


def _names(key: str, extension: str) -> bool:
    return key.lower() in (extension, _part(extension))


def _rank(extension: str) -> int:
    suffix = extension.rpartition(".")[2]
    return PICTURES.index(suffix) if suffix in PICTURES else len(PICTURES)


def roles(extensions: Iterable[str], columns: Columns) -> tuple[str | None, tuple[str, ...], str | None]:
    """The extensions of target, controls, mask. Raises DataError where it is open which are meant."""
    ordered = sorted(extensions, key=_rank)

    def asked(key: str | None) -> str | None:
        return next((name for name in ordered if key is not None and _names(key, name)), None)

    image, mask = asked(columns.image), asked(columns.mask)
    controls = _without_gap(columns.controls, [asked(key) for key in columns.controls])
    free: dict[str, str] = {}
    for name in ordered:
        if name not in (image, mask, *controls):
            free.setdefault(_part(name) if name not in PICTURES else "", name)
    if columns.image is None:
        part = one_of(free, TARGETS, "target picture", "image_key")
        image = free.pop(part or "", None)
    if not columns.controls:
        controls = tuple(free[part] for part in controls_among(free))
    if columns.mask is None and (part := one_of(free, MASKS, "mask", "mask_key")):
        mask = free[part]
    return image, controls, mask


def _without_gap(keys: Sequence[str], found: Sequence[str | None]) -> tuple[str, ...]:
    """A gap would give a control the place of another."""
    present = [name for name in found if name is not None]
    if tuple(present) != tuple(found[: len(present)]):
        missing = keys[found.index(None)]
        raise DataError(f"control {missing} is missing, but a later one isn't", remedy="complete the sample")
    return tuple(present)


def caption_of(texts: dict[str, bytes], asked: str | None) -> tuple[str | None, str]:
    """Caption, or None, and a warning. Raises DataError where it can't be read."""
    if asked is None:
        if "txt" in texts:
            return _decoded(texts["txt"], "txt")
        return _field(texts["json"], "json", "") if "json" in texts else (None, "")
    # `meta.json.caption` may be the extension `meta.json.caption`, a field of `meta.json`, or of `meta`.
    for extension in sorted(texts, key=len, reverse=True):
        place = asked[len(extension) + 1 :]
        if place or extension.endswith("json"):
            return _field(texts[extension], extension, place)
        return _decoded(texts[extension], extension)
    return None, ""


def _decoded(data: bytes, extension: str) -> tuple[str, str]:
    try:
        return captions.decode(data)
    except UnicodeError as error:
        raise DataError(f".{extension} can't be read as text: {error}", remedy=captions.REMEDY) from error


def _field(data: bytes, extension: str, place: str) -> tuple[str | None, str]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DataError(f".{extension} is no JSON: {error}", remedy="mend it") from error
    if not place:
        found = value if isinstance(value, dict) else {}
        return next((found[key] for key in CAPTION_FIELDS if isinstance(found.get(key), str)), None), ""
    for key in place.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, str) else None, ""
