"""A caption file -> its texts, whatever editor wrote it."""

import codecs
import re
from dataclasses import dataclass
from pathlib import Path

from runtime.errors import DataError

REMEDY = "save the caption as UTF-8, then finetune dataset"
PLACEHOLDER = re.compile(re.escape("[trigger]"), re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caption:
    texts: tuple[str, ...]
    """At least one; none is empty, spaces around each are gone."""
    warning: str
    """Why the texts may not be what was meant; empty when nothing is doubtful."""


def read_caption(path: Path, lines: bool = False) -> Caption:
    """The whole text as one caption, or with `lines` each line that isn't blank.

    Newlines inside a text are \\n. Raises DataError for a file that is empty or no text.
    """
    try:
        text, warning = decode(path.read_bytes())
    except (OSError, UnicodeError) as error:
        raise DataError(f"{path} can't be read as text: {_why(error)}", remedy=REMEDY) from error
    return from_text(text, str(path), lines=lines, warning=warning)


def from_text(text: str, where: str, *, lines: bool = False, warning: str = "") -> Caption:
    """As `read_caption`, of a text that stands at `where`, say in a line of a listing."""
    if "\0" in text:
        raise DataError(
            f"{where} holds zero bytes: UTF-16 without its mark, or no text at all", remedy=REMEDY
        )
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    parts = text.split("\n") if lines else [text]
    texts = tuple(stripped for part in parts if (stripped := part.strip()))
    if not texts:
        raise DataError(f"{where} is empty", remedy="write what the edit does, then finetune dataset")
    return Caption(texts=texts, warning=warning)


def decode(data: bytes) -> tuple[str, str]:
    """Text and warning. Raises UnicodeError."""
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return data.decode("utf-16"), ""
    if data.startswith(codecs.BOM_UTF8):  # it says what it is: no other reading
        return data.decode("utf-8").removeprefix("\ufeff"), ""
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError as error:
        byte, text = data[error.start], data.decode("cp1252")
        return text, f"not UTF-8 (byte 0x{byte:02x} at {error.start}): read as Windows-1252; save it as UTF-8"


def _why(error: Exception) -> str:
    # Python calls cp1252 `charmap`, which tells nobody what was tried.
    if isinstance(error, UnicodeDecodeError) and error.encoding == "charmap":
        byte = error.object[error.start]
        return f"byte 0x{byte:02x} at {error.start} is neither UTF-8 nor Windows-1252"
    return str(error)


def with_trigger(text: str, trigger: str) -> str:
    """`text` with the trigger word at each `[trigger]`, else in front, unless it already holds the word."""
    trigger = trigger.strip()
    if not trigger:
        return text
    if PLACEHOLDER.search(text):
        return PLACEHOLDER.sub(lambda _: trigger, text)
    held = re.search(rf"(?<!\w){re.escape(trigger)}(?!\w)", text, re.IGNORECASE)
    return text if held else f"{trigger}, {text}"
