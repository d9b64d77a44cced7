"""A dataset file, TOML or JSON: several sources, and what is done with each.

    [general]
    resolution = [960, 544]          # width, height

    [[datasets]]
    image_directory = "pictures"

It is the form of musubi-tuner's image datasets with keys of our own; `dataset_keys` lists them. A value in
[[datasets]] wins over one in [general]; where neither has one, config.yaml decides. Paths are relative to the
file's folder.
"""

import contextlib
import json
import tomllib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.data import captions
from runtime.data.sample import Kind, Note, Settings
from runtime.data.sources.dataset_keys import KEYS, RENAMED, SOURCES, Section, nearest, refusal
from runtime.data.sources.identifiers import fold, slug
from runtime.errors import DataError

SUFFIXES = (".toml", ".json")
_FILE_SUFFIXES = (".jsonl", ".csv", ".parquet", ".tar")
_SETTINGS = (
    "resolution",
    "enable_bucket",
    "bucket_no_upscale",
    "control_resolution",
    "no_resize_control",
    "batch_size",
    "max_samples",
    "weight",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One [[datasets]] table; nothing is known of what lies at its paths."""

    name: str
    """Unique in the file, whatever the case; a folder may have it on any system."""
    kind: Kind
    path: Path
    controls: Path | None = None
    caption_extension: str | None = None
    image_key: str | None = None
    control_keys: tuple[str, ...] = ()
    mask_key: str | None = None
    caption_key: str | None = None
    settings: Settings = field(default_factory=Settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetFile:
    entries: tuple[Entry, ...]
    holdout: int | None
    """Samples to set aside; None: the default rule."""
    cache_directories: tuple[str, ...]
    """As written. Not used: one cache holds all."""
    warnings: tuple[Note, ...]


@dataclass(slots=True, kw_only=True)
class _Report:
    file: Path
    problems: list[str] = field(default_factory=list)
    warnings: list[Note] = field(default_factory=list)

    def warn(self, text: str) -> None:
        self.warnings.append(Note(path=self.file.name, reason=text))


def read(file: Path) -> DatasetFile:
    """Raises DataError with one line for each thing that is wrong."""
    report = _Report(file=file)
    document = _document(file, report)
    general, tables = _sections(document, report)
    if report.problems:
        message = "\n".join([file.name, *dict.fromkeys(report.problems)])
        raise DataError(message, remedy=f"mend {file.name}, then finetune dataset")
    cache_directories = tuple(table["cache_directory"] for table in tables if "cache_directory" in table)
    if len(set(cache_directories)) > 1:
        report.warn(
            f"one cache holds all datasets: finetune recommend takes {cache_directories[0]}, the first "
            "cache_directory, as cache.cache_dir"
        )
    return DatasetFile(
        entries=_entries(general, tables, file.parent),
        holdout=general.get("holdout"),
        cache_directories=cache_directories,
        warnings=tuple(report.warnings),
    )


def _document(file: Path, report: _Report) -> Mapping[str, Any]:
    remedy = f"mend {file.name}, then finetune dataset"
    try:
        text, warning = captions.decode(file.read_bytes())
        document = (
            json.loads(text, object_pairs_hook=_once)
            if file.suffix.lower() == ".json"
            else tomllib.loads(text)
        )
    except OSError as error:
        raise DataError(f"{file} can't be read: {error.strerror}", remedy=remedy) from error
    except (ValueError, RecursionError) as error:
        kind = "JSON" if file.suffix.lower() == ".json" else "TOML"
        hint = "; in a path write / for \\" if "escape" in str(error) else ""
        raise DataError(f"{file.name} is not {kind}: {error}{hint}", remedy=remedy) from error
    if not isinstance(document, dict):
        raise DataError(
            f"{file.name}: saw a {type(document).__name__}, expected an object with datasets", remedy=remedy
        )
    if warning:
        report.warn(warning)
    return document


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = [name for name, count in Counter(name for name, _ in pairs).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)}: given twice in one object")
    return dict(pairs)


def _sections(document: Mapping[str, Any], report: _Report) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The values of [general] and of each [[datasets]] that are right, as they are used."""
    for name in document:
        if name not in ("general", "datasets"):
            report.problems.append(f"{name}: {_misplaced(name)}")
    general, tables = document.get("general", {}), document.get("datasets", [])
    if not isinstance(general, dict):
        report.problems.append(f"general: saw {_show(general)}, expected a table")
        general = {}
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        report.problems.append(f"datasets: saw {_show(tables)}, expected tables, each under [[datasets]]")
        tables = []
    elif not tables:
        report.problems.append("datasets: none, expected one [[datasets]] at least")
    values = []
    for index, table in enumerate(tables):
        values.append(_values(table, "datasets", f"datasets[{index}]", report))
        _check_sources(table, f"datasets[{index}]", report)
    _check_weights(tables, report)
    return _values(general, "general", "general", report), values


def _misplaced(name: str) -> str:
    if name in KEYS or name in RENAMED:
        sections = KEYS[RENAMED.get(name, name)].sections
        return "stands above the first table; it belongs in " + " or ".join(
            "[general]" if section == "general" else "[[datasets]]" for section in sections
        )
    return f"unknown table; {nearest(name, ['general', 'datasets'])}"


def _values(table: Mapping[str, Any], section: Section, where: str, report: _Report) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in _renamed(table, where, report).items():
        wrong = refusal(name, section)
        if wrong:
            report.problems.append(f"{where}.{name}: {wrong}")
            continue
        read = KEYS[name].read(value)
        if read is None:
            report.problems.append(f"{where}.{name}: saw {_show(value)}, expected {KEYS[name].expected}")
        else:
            values[name] = read
    if {"num_repeats", "repeats"} <= table.keys():
        report.problems.append(
            f"{where}.repeats: num_repeats says the same (repeats 0 is num_repeats 1); give one of them"
        )
    return values


def _renamed(table: Mapping[str, Any], where: str, report: _Report) -> dict[str, Any]:
    """Old names under their new ones; the value under the new name wins."""
    values = {name: value for name, value in table.items() if name not in RENAMED}
    for old, new in RENAMED.items():
        if old not in table:
            continue
        if new in values:
            report.warn(f"{where}.{old} is the old name of {new}, which is given too and wins")
        else:
            report.warn(f"{where}.{old} is the old name of {new}: rename it")
            values[new] = table[old]
    return values


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    text = text.encode("utf-8", "backslashreplace").decode()
    return (text if len(text) <= 60 else text[:57] + "...") + (" (text)" if isinstance(value, str) else "")


def _check_sources(table: Mapping[str, Any], where: str, report: _Report) -> None:
    sources = [name for name in SOURCES if name in table]
    if len(sources) != 1:
        seen = " and ".join(sources) or "no source"
        report.problems.append(f"{where}: saw {seen}, expected one of {', '.join(SOURCES)}")
        return
    kind = SOURCES[sources[0]]
    for name in table:
        kinds = KEYS[name].kinds if name in KEYS else ()
        if kinds and kind not in kinds:
            fitting = ", ".join(source for source, of in SOURCES.items() if of in kinds)
            report.problems.append(f"{where}.{name}: means nothing with {sources[0]}, only with {fitting}")
    if kind != "directory" and "caption_extension" in table:
        report.warn(f"{where}.caption_extension means nothing with {sources[0]}, only with image_directory")


def _check_weights(tables: list[dict[str, Any]], report: _Report) -> None:
    without = [f"datasets[{index}]" for index, table in enumerate(tables) if "weight" not in table]
    if 0 < len(without) < len(tables):
        report.problems.append(f"weight: missing in {', '.join(without)}; give it to all datasets or to none")


def _entries(general: Mapping[str, Any], tables: list[dict[str, Any]], folder: Path) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    taken: set[str] = set()
    for table in tables:
        source = next(name for name in SOURCES if name in table)
        path = _located(table[source], folder)
        controls = table.get("control_directory")
        entries.append(
            Entry(
                name=_name(table.get("name") or _stem(path), taken),
                kind=SOURCES[source],
                path=path,
                controls=_located(controls, folder) if controls is not None else None,
                caption_extension={**general, **table}.get("caption_extension"),
                image_key=table.get("image_key"),
                control_keys=table.get("control_keys", ()),
                mask_key=table.get("mask_key"),
                caption_key=table.get("caption_key"),
                settings=_settings(general, table),
            )
        )
    return tuple(entries)


def _settings(general: Mapping[str, Any], table: Mapping[str, Any]) -> Settings:
    chosen = {**general, **table}
    return Settings(
        **{name: chosen[name] for name in _SETTINGS if name in chosen},
        views=_views(table) or _views(general) or 1,
        regularisation=chosen.get("regularisation", False),
        trigger_word=chosen.get("trigger_word", ""),
        caption_lines=chosen.get("caption_lines", False),
    )


def _views(section: Mapping[str, Any]) -> int | None:
    """num_repeats counts the first time, repeats doesn't."""
    if "repeats" in section:
        return int(section["repeats"]) + 1
    return section.get("num_repeats")


def _located(written: str, folder: Path) -> Path:
    path = Path(written)
    with contextlib.suppress(RuntimeError):  # ~name of nobody here: a folder of that name, then
        path = path.expanduser()
    return folder / path


def _stem(path: Path) -> str:
    path = path.resolve()
    return path.stem if path.suffix.lower() in _FILE_SUFFIXES else path.name


def _name(wished: str, taken: set[str]) -> str:
    # The second try is for names that are not free as they are, such as `con` and `face_mask`.
    second = slug(f"{wished}-set") if any(sign.isalnum() for sign in wished) else ""
    base = slug(wished) or second or "dataset"
    name, count = base, 1
    while fold(name) in taken:
        count += 1
        name = f"{base}-{count}"
    taken.add(fold(name))
    return name
