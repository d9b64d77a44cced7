"""From a caption's bytes to the prompts that its manifest must have."""

import codecs
import re
from collections.abc import Mapping
from typing import Any

from gates.evidence import EvidenceError

PLACEHOLDER = re.compile(r"\[trigger\]", re.IGNORECASE)


def decode(data: bytes, shown: str) -> str:
    """UTF-8, or UTF-16 that says so, its line ends made one kind. EvidenceError for anything else."""
    marked = data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    try:
        text = data.decode("utf-16" if marked else "utf-8-sig")
    except UnicodeDecodeError as error:
        encoding = "UTF-16" if marked else "UTF-8"
        raise EvidenceError(shown, f"is not {encoding} (byte {error.start}): save it as UTF-8") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def prompts(text: str, settings: Mapping[str, Any]) -> list[str]:
    """The prompt and its alternatives, of a caption that holds `text`; none of one without words."""
    captions = text.split("\n") if settings["caption_lines"] else [text]
    word = settings["trigger_word"].strip()
    return [_triggered(caption.strip(), word) for caption in captions if caption.strip()]


def _triggered(caption: str, word: str) -> str:
    if not word:
        return caption
    if PLACEHOLDER.search(caption):
        return PLACEHOLDER.sub(lambda _: word, caption)
    whole = rf"(?<!\w){re.escape(word)}(?!\w)"
    return caption if re.search(whole, caption, re.IGNORECASE) else f"{word}, {caption}"


def same(told: str, expected: str) -> bool:
    """Equal but for white space: editors and exports differ in it, and no model reads it."""
    return told.split() == expected.split()
