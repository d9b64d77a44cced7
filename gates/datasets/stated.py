"""What the dataset that target.json names says of itself: its sources, their places and their settings."""

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gates.datasets.directories import common_root
from gates.datasets.wording import decode
from gates.evidence import EvidenceError, MissingEvidenceError, parse_json, read_bytes
from gates.workspace import Workspace

REMEDY = "finetune init --dataset FOLDER_OR_FILE"
ARCHIVES = ("huggingface", "parquet", "webdataset")
LISTINGS = ("jsonl", "csv")
KINDS = {
    "image_directory": "directory",
    "image_jsonl_file": "jsonl",
    "folder": "folders",
    "csv_file": "csv",
    **{name: name for name in ARCHIVES},
}
OLD_NAMES = {
    "flux_kontext_no_resize_control": "no_resize_control",
    "qwen_image_edit_no_resize_control": "no_resize_control",
    "qwen_image_edit_control_resolution": "control_resolution",
}
UNSTATED: dict[str, Any] = {
    "resolution": None, "enable_bucket": None, "bucket_no_upscale": None, "control_resolution": None,
    "no_resize_control": None, "batch_size": None, "views": 1, "weight": None, "max_samples": None,
    "regularisation": False, "trigger_word": "", "caption_lines": False,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Stated:
    kind: str
    place: Path
    """the folder, or the file, that is named"""
    controls: Path | None = None
    extension: str = ".txt"
    settings: dict[str, Any] = field(default_factory=lambda: dict(UNSTATED))

    @property
    def folder(self) -> Path:
        """What the source's paths, or its archives', are relative to."""
        if self.kind == "directory":
            return common_root(self.place.resolve(), self.controls.resolve() if self.controls else None)
        return self.place if self.place.is_dir() else self.place.parent


def stated(place: Path, layout: str) -> list[Stated]:
    """The sources of the dataset at `place`. EvidenceError for a dataset file that is none."""
    if not place.exists():
        raise MissingEvidenceError(f"dataset {place.name}", "is missing", remedy=REMEDY)
    if layout != "toml":
        return [Stated(kind=layout, place=place)]
    document = _parse(place)
    general, datasets = document.get("general", {}), document.get("datasets", [])
    if not isinstance(general, dict) or not isinstance(datasets, list):
        raise EvidenceError(place.name, "has no [general] table and [[datasets]]")
    try:
        return [_stated(place, general, dataset) for dataset in datasets]
    except TypeError as error:
        raise EvidenceError(place.name, f"has a value of a wrong type ({error})") from error


def _parse(file: Path) -> dict[str, Any]:
    data = read_bytes(file, file.name)
    if file.suffix.lower() == ".json":
        document = parse_json(data, file.name)
    else:
        try:
            document = tomllib.loads(decode(data, file.name))
        except tomllib.TOMLDecodeError as error:
            raise EvidenceError(file.name, f"is no TOML: {error}") from error
    if not isinstance(document, dict):
        raise EvidenceError(file.name, "is no table")
    return document


def _stated(file: Path, general: dict[str, Any], dataset: Any) -> Stated:
    if not isinstance(dataset, dict):
        raise EvidenceError(file.name, "lists a dataset that is no table")
    own, shared = _present(dataset), _present(general)
    key = next((key for key in KINDS if key in own), None)
    if key is None:
        raise EvidenceError(file.name, f"has a dataset without any of {', '.join(KINDS)}")
    both = {**shared, **own}
    return Stated(
        kind=KINDS[key],
        place=_place(file, own[key]),
        controls=_place(file, own["control_directory"]) if "control_directory" in own else None,
        extension=both.get("caption_extension", ".txt"),
        settings=_settings(own, shared),
    )


def _present(section: Mapping[str, Any]) -> dict[str, Any]:
    """Its keys by their new names, of which one that is given beside an old one wins."""
    old = {OLD_NAMES[key]: value for key, value in section.items() if key in OLD_NAMES}
    new = {key: value for key, value in section.items() if key not in OLD_NAMES}
    return {key: value for key, value in {**old, **new}.items() if value is not None}


def _place(file: Path, value: Any) -> Path:
    if not isinstance(value, str):
        raise EvidenceError(file.name, f"has {json.dumps(value)} where a path is expected")
    return file.parent / Path(value).expanduser()


def _settings(own: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    both = {**shared, **own}
    settings = {name: both.get(name, value) for name, value in UNSTATED.items()}
    for name in ("resolution", "control_resolution"):
        if settings[name] is not None:
            settings[name] = _height_width(settings[name])
    # Two names of one thing: what a dataset says by one wins over what [general] says by the other.
    said = own if {"repeats", "num_repeats"} & set(own) else shared
    settings["views"] = said["repeats"] + 1 if "repeats" in said else said.get("num_repeats", 1)
    return settings


def _height_width(value: Any) -> Any:
    return [value, value] if isinstance(value, int) else value[::-1]


def faults(said: list[Stated], sources: list[dict[str, Any]], workspace: Workspace) -> Iterator[str]:
    """Where the recorded sources are not those that the dataset names."""
    if len(said) != len(sources):
        yield f"the dataset has {len(said)} sources, {len(sources)} were scanned"
    names = [source["name"] for source in sources]
    if len(set(names)) != len(names):
        yield "two sources have one name"
    for one, source in zip(said, sources, strict=False):
        yield from (f"{source['name']}: {fault}" for fault in _faults(one, source, workspace))


def _faults(said: Stated, source: dict[str, Any], workspace: Workspace) -> Iterator[str]:
    if source["kind"] != said.kind:
        yield f"is {said.kind} and was scanned as {source['kind']}"
        return
    root = workspace.resolve(source["root"]).resolve()
    origin = workspace.resolve(source["origin"]).resolve()
    if said.kind in ARCHIVES:
        right = origin.is_relative_to(said.folder.resolve()) and root.is_relative_to(workspace.root)
    else:
        right = origin == root == said.folder.resolve()
    if not right:
        yield f"another folder was scanned than {said.folder.name}"
    elif not root.is_dir():
        yield f"its folder {source['root']} is missing"
    if said.kind in (*ARCHIVES, *LISTINGS) and not source["files"]:
        yield "no file of it is recorded"
    yield from (
        f"{name} is {json.dumps(source['settings'][name])} in the manifest and {json.dumps(value)} in the dataset"
        for name, value in said.settings.items()
        if source["settings"][name] != value
    )
