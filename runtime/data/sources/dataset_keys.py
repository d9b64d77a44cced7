"""The keys of a dataset file: what each takes, and where it may stand.

Those of musubi-tuner's image datasets, with its names and meanings, and our own.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from runtime.data.sample import Kind, Size
from runtime.data.sources.names import IMAGE_SUFFIXES

Section = Literal["general", "datasets"]

SOURCES: Mapping[str, Kind] = MappingProxyType(
    {
        "image_directory": "directory",
        "image_jsonl_file": "jsonl",
        "folder": "folders",
        "csv_file": "csv",
        "huggingface": "huggingface",
        "parquet": "parquet",
        "webdataset": "webdataset",
    }
)
ARCHIVES: tuple[Kind, ...] = ("huggingface", "parquet", "webdataset")

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "qwen_image_edit_no_resize_control": "no_resize_control",
        "qwen_image_edit_control_resolution": "control_resolution",
        "flux_kontext_no_resize_control": "no_resize_control",
    }
)

_VIDEO = "is for video models; this trainer takes pictures"
_VIDEO_KEYS = (
    "target_frames",
    "frame_extraction",
    "frame_stride",
    "frame_sample",
    "max_frames",
    "source_fps",
)
_LARGEST = 16384  # pixels a side, as in config.yaml


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    expected: str
    read: Callable[[Any], Any]
    """The value as it is used, None where the type or range is wrong."""
    sections: tuple[Section, ...] = ("general", "datasets")
    """With both, a dataset's own value wins over the general one."""
    kinds: tuple[Kind, ...] = ()
    """Sources that it means something for; empty: all."""


def _text(value: Any) -> str | None:
    if not isinstance(value, str) or not value.strip() or "\0" in value or not _encodable(value):
        return None
    return value


def _phrase(value: Any) -> str | None:
    return value if value == "" else _text(value)


def _encodable(value: str) -> bool:
    """JSON may hold half a surrogate pair."""
    return not any("\ud800" <= sign <= "\udfff" for sign in value)


def _texts(value: Any) -> tuple[str, ...] | None:
    if not isinstance(value, list) or not value or None in (read := tuple(map(_text, value))):
        return None
    return read if len(set(read)) == len(read) else None  # type: ignore[return-value]


def _extension(value: Any) -> str | None:
    text = _text(value)
    wrong = text is None or len(text) < 2 or text[0] != "." or "/" in text or "\\" in text
    return None if wrong or text is None or text.lower() in IMAGE_SUFFIXES else text


def _flag(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def _whole(least: int) -> Callable[[Any], int | None]:
    return lambda value: value if type(value) is int and value >= least else None


def _share(value: Any) -> float | None:
    number = type(value) in (int, float) and math.isfinite(value) and value > 0
    return float(value) if number else None


def _size(value: Any) -> Size | None:
    """Written width first; Size is height, width."""
    sides = [value, value] if type(value) is int else value
    if not isinstance(sides, list) or len(sides) != 2:
        return None
    if not all(type(side) is int and 0 < side <= _LARGEST for side in sides):
        return None
    return (sides[1], sides[0])


def _source(what: str) -> Key:
    return Key(expected=f"the path of {what}", read=_text, sections=("datasets",))


_SIZE = f"[width, height], or one number for a square, in pixels up to {_LARGEST}"
_FLAG = "true or false"
_COLUMN = "the name of a column"

KEYS: Mapping[str, Key] = MappingProxyType(
    {
        "resolution": Key(expected=_SIZE, read=_size),
        "caption_extension": Key(expected='a suffix with its dot, as ".txt"', read=_extension),
        "batch_size": Key(expected="a whole number from 1", read=_whole(1)),
        "num_repeats": Key(expected="a whole number from 1 (1: seen once)", read=_whole(1)),
        "repeats": Key(expected="a whole number from 0 (0: seen once)", read=_whole(0)),
        "enable_bucket": Key(expected=_FLAG, read=_flag),
        "bucket_no_upscale": Key(expected=_FLAG, read=_flag),
        "control_resolution": Key(expected=_SIZE, read=_size),
        "no_resize_control": Key(expected=_FLAG, read=_flag),
        "max_samples": Key(expected="a whole number from 1", read=_whole(1)),
        "trigger_word": Key(expected="text", read=_phrase),
        "caption_lines": Key(expected=_FLAG, read=_flag),
        "holdout": Key(expected="a whole number from 0", read=_whole(0), sections=("general",)),
        "name": Key(expected="text", read=_text, sections=("datasets",)),
        "weight": Key(expected="a number above 0", read=_share, sections=("datasets",)),
        "regularisation": Key(expected=_FLAG, read=_flag, sections=("datasets",)),
        "cache_directory": Key(expected="a path", read=_text, sections=("datasets",)),
        "control_directory": Key(
            expected="the path of a folder", read=_text, sections=("datasets",), kinds=("directory",)
        ),
        "image_key": Key(expected=_COLUMN, read=_text, sections=("datasets",), kinds=ARCHIVES),
        "caption_key": Key(expected=_COLUMN, read=_text, sections=("datasets",), kinds=ARCHIVES),
        "mask_key": Key(expected=_COLUMN, read=_text, sections=("datasets",), kinds=ARCHIVES),
        "control_keys": Key(
            expected='a list of different columns, as ["control"]',
            read=_texts,
            sections=("datasets",),
            kinds=ARCHIVES,
        ),
        "image_directory": _source("a folder of pictures with captions beside them"),
        "image_jsonl_file": _source("a JSONL file"),
        "folder": _source("a folder with training_images/ and control_images/"),
        "csv_file": _source("a CSV file"),
        "huggingface": _source("a folder that datasets' save_to_disk wrote"),
        "parquet": _source("a parquet file or a folder of them"),
        "webdataset": _source("a tar file or a folder of them"),
    }
)


def refusal(name: str, section: Section) -> str:
    """Why a key of this name can't stand in this section; empty where it can."""
    if name.startswith("video_") or name in _VIDEO_KEYS:
        return _VIDEO
    if name.startswith("fp_"):
        return "is for FramePack; no model of this trainer reads it"
    if name == "multiple_target":
        return "is for layered models; a sample has one target here"
    if name in KEYS:
        return "" if section in KEYS[name].sections else f"belongs in {_title(KEYS[name].sections[0])}"
    return f"unknown key; {nearest(name, [key for key in KEYS if section in KEYS[key].sections])}"


def nearest(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else "known here: " + ", ".join(known)


def _title(section: Section) -> str:
    return "[general]" if section == "general" else "[[datasets]]"
