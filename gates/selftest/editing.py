"""A workspace that may be spoilt: its places, and edits of its documents that leave the rest as it is."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gates.evidence import dataset_digest, document_digest, file_digest


@dataclass(frozen=True)
class Made:
    root: Path
    folder: str = "data"
    """of the dataset"""
    runs: str = "outputs/edit-lora"

    @property
    def dataset(self) -> Path:
        return self.root / self.folder

    @property
    def project(self) -> Path:
        return self.root / self.runs

    def run(self, kind: str) -> Path:
        return self.project / ("v0" if kind == "smoke" else "v1")

    def evidence(self, name: str) -> Path:
        return self.root / ".gates" / "evidence" / f"{name}.json"

    def edit(self, path: Path | str, change: Callable[[Any], Any]) -> None:
        """Change a JSON document in place; what `change` returns replaces it, None keeps it."""
        place = self.root / path
        document = json.loads(place.read_text(encoding="utf-8"))
        result = change(document)
        write_json(place, document if result is None else result)

    def edit_lines(self, path: Path | str, change: Callable[[list[Any]], Any]) -> None:
        place = self.root / path
        lines = [json.loads(line) for line in place.read_text(encoding="utf-8").splitlines()]
        result = change(lines)
        lines = lines if result is None else result
        place.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8", newline="\n")

    def edit_config(self, change: Callable[[dict[str, Any]], Any]) -> None:
        """Change config.yaml, and make the plan one of the new config."""
        path = self.root / "config.yaml"
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        change(config)
        write_yaml(path, config)
        digest = document_digest(config)
        self.edit(self.evidence("04-plan"), lambda document: document["data"].update(config_digest=digest))

    def resave(self, run: str, path: Path) -> None:
        """Record the files of a checkpoint as they are now, as if they had been saved so."""
        folder = self.run(run)

        def change(lines: list[Any]) -> None:
            for line in lines:
                if line["path"] == path.name:
                    line["files"] = recorded(path)

        self.edit_lines(folder / "saves.jsonl", change)

    def rescan(self) -> None:
        """Let the dataset's digest be that of its listed samples, in all that names it."""
        document = json.loads(self.evidence("02-dataset").read_text(encoding="utf-8"))
        digest = dataset_digest(document["data"])
        document["data"]["dataset_digest"] = digest
        write_json(self.evidence("02-dataset"), document)
        self.edit(self.evidence("04-plan"), lambda d: d["data"].update(dataset_digest=digest))


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, sort_keys=True, indent=1) + "\n", encoding="utf-8", newline="\n")


def write_lines(path: Path, lines: list[Any]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8", newline="\n")


def write_yaml(path: Path, value: Any) -> None:
    path.write_text(yaml.safe_dump(value, sort_keys=False), encoding="utf-8", newline="\n")


def recorded(folder: Path) -> dict[str, Any]:
    return {
        path.name: {"size": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted(folder.iterdir())
    }
