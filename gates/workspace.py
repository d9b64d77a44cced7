"""The user's directory as the judge reads it: target, config, evidence, runs. Nothing is written here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gates import documents, schema
from gates.evidence import (
    EvidenceError,
    MissingEvidenceError,
    document_digest,
    file_digest,
    inside,
    legible,
    read_json,
    read_jsonl,
)
from gates.verdict import Input

EXTERNAL = "external:"
REMEDY_INIT = "finetune init --model MODEL --dataset FOLDER"
# which command makes a piece of evidence
MADE_BY = {
    "01-host": "finetune probe --host",
    "02-dataset": "finetune dataset",
    "03-environment": "finetune probe --environment",
    "04-plan": "finetune plan",
    "05-adaptation": "finetune adapt",
    "06-quantize": "finetune quantize",
    "07-cache-roundtrip": "finetune cache",
    "08-validation": "finetune validate",
}


class NotAWorkspaceError(Exception):
    pass


@dataclass(kw_only=True)
class Workspace:
    """Reads are remembered in `inputs`: the verdict names every file that it rests on."""

    root: Path
    chosen_run: Path | None = None
    """judge this run instead of the newest of its kind"""
    require_device: str | None = None
    inputs: dict[str, Input] = field(default_factory=dict)

    @classmethod
    def open(
        cls, root: Path, *, chosen_run: Path | None = None, require_device: str | None = None
    ) -> "Workspace":
        if not (root / ".gates" / "target.json").is_file():
            raise NotAWorkspaceError(
                f"{root} is not a workspace: .gates/target.json is missing; make one with {REMEDY_INIT}"
            )
        return cls(root=root.resolve(), chosen_run=chosen_run, require_device=require_device)

    def again(self) -> "Workspace":
        """The same workspace with nothing read yet."""
        return Workspace(root=self.root, chosen_run=self.chosen_run, require_device=self.require_device)

    # ---- places

    @cached_property
    def externals(self) -> dict[str, str]:
        path = self.root / ".gates" / "local.json"
        if not path.is_file():
            return {}
        try:
            document = read_json(path, ".gates/local.json")
        except EvidenceError as error:
            raise EvidenceError(error.path, error.message, remedy=REMEDY_INIT) from error
        external = document.get("external") if isinstance(document, dict) else None
        if not isinstance(external, dict) or not all(isinstance(item, str) for item in external.values()):
            raise EvidenceError(
                ".gates/local.json", 'is no {"external": {"NAME": "/path"}}', remedy=REMEDY_INIT
            )
        return external

    def resolve(self, reference: str) -> Path:
        """The path that the user's config or target means: external:NAME, absolute, or inside."""
        if not reference.startswith(EXTERNAL):
            return self.root / Path(reference).expanduser()
        name, _, rest = reference.removeprefix(EXTERNAL).partition("/")
        if name not in self.externals:
            raise MissingEvidenceError(
                ".gates/local.json", f"has no path for {reference}", remedy=f"finetune init --{name} PATH"
            )
        base = Path(self.externals[name])
        return inside(base, rest, reference) if rest else base

    def shown(self, path: Path) -> str:
        """How a verdict writes `path`: no absolute path ever travels."""
        return legible(self._shown(path))

    def _shown(self, path: Path) -> str:
        if path.is_relative_to(self.root):
            return path.relative_to(self.root).as_posix()
        for name, base in self.externals.items():
            if path.is_relative_to(base):
                rest = path.relative_to(base).as_posix()
                return f"{EXTERNAL}{name}/{rest}" if rest != "." else f"{EXTERNAL}{name}"
        return f"{EXTERNAL}{path.name}"

    # ---- reading

    def note(self, path: Path) -> None:
        name = self.shown(path)
        try:
            self.inputs[name] = Input(path=name, sha256=file_digest(path), size=path.stat().st_size)
        except OSError as error:
            raise EvidenceError(name, f"vanished while it was judged ({error.strerror})") from error

    def json(self, path: Path, schema_name: str, *, remedy: str = "") -> dict[str, Any]:
        name = self.shown(path)
        try:
            document: dict[str, Any] = schema.require(read_json(path, name), schema_name, name)
        except EvidenceError as error:
            raise type(error)(name, error.message, remedy=remedy) from error
        self.note(path)
        return document

    def lines(self, path: Path, schema_name: str, *, allow_nan: bool = False) -> tuple[list[Any], str]:
        """Whole lines, each valid, and a note on a torn last one."""
        name = self.shown(path)
        records, torn = read_jsonl(path, name, allow_nan=allow_nan)
        for number, record in enumerate(records, 1):
            schema.require(record, schema_name, f"{name} record {number}")
        self.note(path)
        return records, torn

    # ---- documents

    @cached_property
    def target(self) -> dict[str, Any]:
        return self.json(self.root / ".gates" / "target.json", "target", remedy=REMEDY_INIT)

    def evidence(self, name: str) -> dict[str, Any]:
        """The data of complete evidence. MissingEvidenceError if there is none, or only begun."""
        data: dict[str, Any] = self.record(name)["data"]
        return data

    def record(self, name: str) -> dict[str, Any]:
        """Complete evidence with its envelope, which holds the inputs that it depends on."""
        remedy = MADE_BY[name]
        try:
            path = inside(self.root, f".gates/evidence/{name}.json")
        except EvidenceError as error:  # a link: whatever lies there is of another workspace
            raise EvidenceError(error.path, error.message, remedy=remedy) from error
        document = self.json(path, "evidence", remedy=remedy)
        if document["name"] != name:
            raise EvidenceError(self.shown(path), f"is evidence of {document['name']}", remedy=remedy)
        if not document["complete"]:
            raise MissingEvidenceError(
                self.shown(path),
                "was begun and not finished: the command that writes it did not end",
                remedy=remedy,
            )
        return document

    @cached_property
    def _config(self) -> tuple[dict[str, Any], list[str]]:
        path = self.root / "config.yaml"
        try:
            read = documents.read_yaml(path, "config.yaml")
        except MissingEvidenceError as error:
            raise MissingEvidenceError("config.yaml", error.message, remedy="finetune recommend") from error
        self.note(path)
        return read

    @property
    def config(self) -> dict[str, Any]:
        """config.yaml as parsed, before defaults."""
        return self._config[0]

    @property
    def config_traps(self) -> list[str]:
        return self._config[1]

    def config_digest(self) -> str:
        try:
            return document_digest(self.config)
        except (TypeError, ValueError) as error:
            raise EvidenceError("config.yaml", "holds values that are not JSON (a date?)") from error

    @property
    def settings(self) -> dict[str, Any]:
        """The config with defaults. EvidenceError if it is not one."""
        found = setting_problems(self.config)
        if found:
            raise EvidenceError("config.yaml", found[0], remedy="gate check 04")
        return schema.with_defaults(self.config)

    # ---- runs

    def runs_folder(self) -> Path:
        logging = self.settings["logging"]
        return self.resolve(logging["output_dir"]) / str(logging["tracker_project_name"])

    def run_folders(self) -> list[Path]:
        """The v<N> that hold a run.json, newest launch first."""
        folder = self.runs_folder()
        found = [path for path in folder.glob("v*") if re.fullmatch(r"v\d+", path.name)]
        found = [path for path in found if (path / "run.json").is_file()]
        return sorted(found, key=lambda path: int(path.name[1:]), reverse=True)


# Judged by checks of their own, `cache-mandatory` and `checkpoint-within-steps`, which tell why.
_JUDGED_ELSEWHERE = (("cache.use_cache", "const"), ("cache.use_cache", "type"), ("train", "oneOf"))


def setting_problems(config: Mapping[str, Any]) -> list[str]:
    """What the published config schema forbids in `config`, one line each."""
    return [
        line
        for error in schema.errors(config, "config")
        if (schema.dotted(error.absolute_path), error.validator) not in _JUDGED_ELSEWHERE
        for line in schema.describe(error)
    ]
