"""What the dataset is: every sample with the digests of its files, and its split.

The manifest is evidence `.gates/evidence/02-dataset.json`; later phases read it, and refuse to go on
when the files have changed since.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime import files
from runtime.data.sample import ImageFile, Note, Sample, Settings, Source, Split, TextFile
from runtime.errors import DataError
from runtime.index import Index
from runtime.workspace import Workspace

EVIDENCE = "02-dataset"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    layout: str
    """How the dataset was given: folders, jsonl, csv, toml, ..."""
    root: str
    """The dataset as target.json refers to it."""
    dataset_file: TextFile | None
    """The TOML that lists the sources."""
    sources: tuple[Source, ...]
    holdout_rule: str
    dataset_digest: str
    samples: tuple[Sample, ...]
    """Ordered by id."""
    dropped: tuple[Note, ...]
    warnings: tuple[Note, ...]

    def of(self, split: Split) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if sample.split == split)

    @property
    def settings(self) -> dict[str, Settings]:
        """What the dataset file says, by source."""
        return {source.name: source.settings for source in self.sources}

    def to_json(self) -> dict[str, Any]:
        return dict(_plain(asdict(self)))

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Manifest":
        return cls(
            layout=document["layout"],
            root=document["root"],
            dataset_file=TextFile(**document["dataset_file"]) if document["dataset_file"] else None,
            sources=tuple(_source(item) for item in document["sources"]),
            holdout_rule=document["holdout_rule"],
            dataset_digest=document["dataset_digest"],
            samples=tuple(_sample(item) for item in document["samples"]),
            dropped=tuple(Note(**item) for item in document["dropped"]),
            warnings=tuple(Note(**item) for item in document["warnings"]),
        )


def _plain(value: Any) -> Any:
    """JSON has lists where a frozen dataclass has tuples."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _source(item: dict[str, Any]) -> Source:
    kept = item["settings"]
    sizes = {name: tuple(kept[name]) for name in ("resolution", "control_resolution") if kept[name]}
    listed = tuple(TextFile(**file) for file in item["files"])
    return Source(**{**item, "files": listed, "settings": Settings(**{**kept, **sizes})})


def _sample(item: dict[str, Any]) -> Sample:
    return Sample(
        id=item["id"],
        source=item["source"],
        split=item["split"],
        prompt=item["prompt"],
        alternatives=tuple(item["alternatives"]),
        caption=TextFile(**item["caption"]) if item["caption"] else None,
        target=ImageFile(**item["target"]),
        controls=tuple(ImageFile(**control) for control in item["controls"]),
        mask=ImageFile(**item["mask"]) if item["mask"] else None,
    )


def dataset_digest(samples: Sequence[Sample], sources: Sequence[Source]) -> str:
    """Of what is trained on and how often: `schemas/README.md`."""
    document = {
        "samples": [
            {
                "id": sample.id,
                "source": sample.source,
                "split": sample.split,
                "prompt": sample.prompt,
                "alternatives": list(sample.alternatives),
                "target": sample.target.sha256,
                "controls": [control.sha256 for control in sample.controls],
                "mask": sample.mask.sha256 if sample.mask is not None else None,
            }
            for sample in samples
        ],
        "sources": [{"name": source.name, "settings": _plain(asdict(source.settings))} for source in sources],
    }
    return files.document_digest(document)


def roots(workspace: Workspace, manifest: Manifest) -> dict[str, Path]:
    """The folder that a source's sample paths lie in, by name. Raises UserError where it isn't known here."""
    return {source.name: workspace.resolve(source.root) for source in manifest.sources}


def verify(workspace: Workspace, manifest: Manifest) -> list[Note]:
    """The files that are gone or differ from the manifest."""
    index = Index.open(workspace.index_path)
    folders = roots(workspace, manifest)
    references = {source.name: source.root for source in manifest.sources}
    entries = {(sample.source, entry.path): entry for sample in manifest.samples for entry in sample.files()}
    notes = []
    for (source, path), entry in sorted(entries.items(), key=lambda item: item[0]):
        reason = _difference(index, folders[source] / path, f"{references[source]}/{path}", entry)
        if reason:
            notes.append(Note(path=path if len(folders) == 1 else f"{source}/{path}", reason=reason))
    notes += _file_notes(workspace, manifest, index)
    index.save()
    return notes


def _file_notes(workspace: Workspace, manifest: Manifest, index: Index) -> list[Note]:
    """Of listings, archives and the dataset file itself."""
    listed = [
        (workspace.resolve(source.origin) / file.path, f"{source.origin}/{file.path}", file)
        for source in manifest.sources
        for file in source.files
    ]
    if manifest.dataset_file is not None:
        own = workspace.resolve(manifest.root)
        listed.append((own, manifest.root, manifest.dataset_file))
    return [
        Note(path=file.path, reason=reason)
        for path, name, file in listed
        if (reason := _difference(index, path, name, file))
    ]


def _difference(index: Index, path: Path, name: str, entry: ImageFile | TextFile) -> str:
    if not path.is_file():
        return "is gone"
    size = path.stat().st_size
    if size != entry.size:
        return f"has {size} bytes, had {entry.size}"
    return "" if index.digest(path, name) == entry.sha256 else "has other content"


def standing(workspace: Workspace) -> Manifest:
    """The manifest of the workspace, without a look at the files. Raises DataError."""
    document = workspace.evidence(EVIDENCE)
    if document is None:
        raise DataError("the dataset has not been scanned", remedy="finetune dataset")
    try:
        return Manifest.from_json(document)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"the evidence {EVIDENCE} is of another version: {error}", remedy="finetune dataset"
        ) from error


def load(workspace: Workspace) -> Manifest:
    """The manifest of the workspace, its files as recorded. Raises DataError."""
    manifest = standing(workspace)
    changed = verify(workspace, manifest)
    if changed:
        shown = [f"{note.path} {note.reason}" for note in changed[:5]]
        more = [f"and {len(changed) - 5} more"] if len(changed) > 5 else []
        raise DataError(
            "the dataset changed since it was scanned: " + "; ".join(shown + more), remedy="finetune dataset"
        )
    return manifest
