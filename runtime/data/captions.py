"""A caption file -> text, whatever editor wrote it."""

import codecs
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import DataError

REMEDY = "save the caption as UTF-8, then finetune dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    text: str
    warning: str
    """Why the text may not be what was meant; empty when nothing is doubtful."""


def read_caption(path: Path) -> Caption:
    """The stripped text. Raises DataError for an empty or undecodable file."""
    try:
        text, warning = decode(path.read_bytes())
    except (OSError, UnicodeError) as error:
        raise DataError(f"{path} can't be read as text: {error}", remedy=REMEDY) from error
    if "\0" in text:
        raise DataError(f"{path} holds zero bytes: UTF-16 without its mark, or no text at all", remedy=REMEDY)
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    if not text:
        raise DataError(f"{path} is empty", remedy="write what the edit does, then finetune dataset")
    return Caption(text=text, warning=warning)


def decode(data: bytes) -> tuple[str, str]:
    """Text and warning. Raises UnicodeError."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16"), ""
    try:
        return data.decode("utf-8-sig"), ""
    except UnicodeDecodeError as error:
        byte = data[error.start]
        text = data.decode("cp1252")
        return text, f"not UTF-8 (byte 0x{byte:02x} at {error.start}): read as Windows-1252; save it as UTF-8"
