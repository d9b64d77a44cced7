"""What the dataset is: every sample with the digests of its files, and its split.

The record of `.gates/evidence/02-dataset.json`; later phases read it, and refuse to go
on when the files have changed since.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from runtime import files
from runtime.data import captions, images, layout
from runtime.data.layout import Found, Note
from runtime.errors import DataError
from runtime.workspace import Workspace

EVIDENCE = "02-dataset"
HOLDOUT_FROM, HOLDOUT_SHARE, HOLDOUT_LEAST, HOLDOUT_MOST = 10, 10, 3, 16
DEFAULT_RULE = (
    f"default from {HOLDOUT_FROM} samples on: one in {HOLDOUT_SHARE}, "
    f"at least {HOLDOUT_LEAST}, at most {HOLDOUT_MOST}"
)

Split = Literal["train", "holdout"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """`path` is relative to the dataset's root; width and height are those of the upright picture."""

    path: str
    size: int
    sha256: str
    width: int
    height: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFile:
    path: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    id: str
    split: Split
    prompt: str
    caption: TextFile | None
    target: ImageFile
    controls: tuple[ImageFile, ...]
    mask: ImageFile | None

    def files(self) -> Iterator[ImageFile | TextFile]:
        yield self.target
        yield from self.controls
        if self.mask is not None:
            yield self.mask
        if self.caption is not None:
            yield self.caption


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    layout: str
    root: str
    """As a workspace writes it: relative, or external:dataset."""
    holdout_rule: str
    dataset_digest: str
    samples: tuple[Sample, ...]
    """Ordered by id."""
    dropped: tuple[Note, ...]
    warnings: tuple[Note, ...]

    def of(self, split: Split) -> tuple[Sample, ...]:
        return tuple(sample for sample in self.samples if sample.split == split)

    def to_json(self) -> dict[str, Any]:
        document = asdict(self)
        for name in ("samples", "dropped", "warnings"):
            document[name] = list(document[name])
        for sample in document["samples"]:
            sample["controls"] = list(sample["controls"])
        return document

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> "Manifest":
        return cls(
            layout=document["layout"],
            root=document["root"],
            holdout_rule=document["holdout_rule"],
            dataset_digest=document["dataset_digest"],
            samples=tuple(_sample(item) for item in document["samples"]),
            dropped=tuple(Note(**item) for item in document["dropped"]),
            warnings=tuple(Note(**item) for item in document["warnings"]),
        )


def _sample(item: dict[str, Any]) -> Sample:
    return Sample(
        id=item["id"],
        split=item["split"],
        prompt=item["prompt"],
        caption=TextFile(**item["caption"]) if item["caption"] else None,
        target=ImageFile(**item["target"]),
        controls=tuple(ImageFile(**control) for control in item["controls"]),
        mask=ImageFile(**item["mask"]) if item["mask"] else None,
    )


def build(root: Path, holdout: int | None = None, *, reference: str | None = None) -> Manifest:
    """Read every file of the dataset once. `holdout`: samples to set aside, None for the default rule."""
    root = root.resolve()
    found = layout.scan(root)
    samples: list[Sample] = []
    dropped, warnings = list(found.dropped), []
    for item in found.samples:
        try:
            sample, notes = _read(item, root)
        except DataError as error:
            dropped.append(Note(path=_relative(item.target, root), reason=_inside(error.message, root)))
            continue
        samples.append(sample)
        warnings.extend(notes)
    warnings.extend(_mask_notes(samples))
    split, rule, notes = split_off(samples, _listed(root), holdout)
    return Manifest(
        layout="folders",
        root=reference if reference is not None else root.as_posix(),
        holdout_rule=rule,
        dataset_digest=dataset_digest(split),
        samples=tuple(split),
        dropped=tuple(dropped),
        warnings=(*warnings, *notes),
    )


def _relative(path: Path, root: Path) -> str:
    return path.relative_to(root).as_posix()


def _inside(message: str, root: Path) -> str:
    """Without this machine's part of the path: the manifest travels."""
    return message.replace(f"{root}/", "").replace(f"{root}\\", "")


def _read(item: Found, root: Path) -> tuple[Sample, list[Note]]:
    caption = captions.read_caption(item.caption)
    sample = Sample(
        id=item.id,
        split="train",
        prompt=caption.text,
        caption=_text_file(item.caption, root),
        target=_image_file(item.target, root),
        controls=tuple(_image_file(path, root) for path in item.controls),
        mask=_image_file(item.mask, root) if item.mask is not None else None,
    )
    notes = (
        [Note(path=sample.caption.path, reason=caption.warning)] if caption.warning and sample.caption else []
    )
    return sample, notes


def _text_file(path: Path, root: Path) -> TextFile:
    return TextFile(path=_relative(path, root), size=path.stat().st_size, sha256=files.file_digest(path))


def _image_file(path: Path, root: Path) -> ImageFile:
    picture = images.load(path)
    return ImageFile(
        path=_relative(path, root),
        size=path.stat().st_size,
        sha256=files.file_digest(path),
        width=picture.width,
        height=picture.height,
    )


def _mask_notes(samples: Sequence[Sample]) -> list[Note]:
    masks = [sample.mask.path for sample in samples if sample.mask is not None]
    reason = f"masks are recorded, but no loss of this version weighs by them ({len(masks)} in all)"
    return [Note(path=masks[0], reason=reason)] if masks else []


def _listed(root: Path) -> list[str] | None:
    """The lines of holdout.txt, or None where there is none."""
    path = root / layout.HOLDOUT_FILE
    if not path.is_file():
        return None
    try:
        text, _ = captions.decode(path.read_bytes())
    except UnicodeError as error:
        raise DataError(f"{path} can't be read as text: {error}", remedy="save it as UTF-8") from error
    return [layout.normal(line.strip()) for line in text.splitlines() if line.strip()]


def split_off(
    samples: Sequence[Sample], listed: Sequence[str] | None, holdout: int | None
) -> tuple[list[Sample], str, list[Note]]:
    """Samples with their split, the rule that gave it, and what in the list matched nothing."""
    notes: list[Note] = []
    if listed is not None:
        chosen = {sample.id for sample in samples} & set(listed)
        rule = f"{layout.HOLDOUT_FILE}: {len(chosen)} of {len(samples)}"
        unknown = [name for name in dict.fromkeys(listed) if name not in chosen]
        notes = [
            Note(path=layout.HOLDOUT_FILE, reason=f"{name}: no usable sample has this name")
            for name in unknown
        ]
    else:
        count, why = _count(len(samples), holdout)
        chosen = set(sorted((sample.id for sample in samples), key=_rank)[:count])
        rule = f"lowest sha256 of id: {count} of {len(samples)} ({why})"
    if samples and len(chosen) == len(samples):
        raise DataError(
            f"the holdout takes all {len(samples)} samples and leaves none to train on",
            remedy="finetune dataset --holdout N, or shorten holdout.txt",
        )
    return [replace(s, split="holdout" if s.id in chosen else "train") for s in samples], rule, notes


def _count(samples: int, holdout: int | None) -> tuple[int, str]:
    if holdout is not None:
        return min(holdout, samples), f"--holdout {holdout}"
    if samples < HOLDOUT_FROM:
        return 0, DEFAULT_RULE
    return min(HOLDOUT_MOST, max(HOLDOUT_LEAST, samples // HOLDOUT_SHARE)), DEFAULT_RULE


def _rank(identity: str) -> str:
    return hashlib.sha256(identity.encode("utf-8")).hexdigest()


def dataset_digest(samples: Sequence[Sample]) -> str:
    return files.document_digest(
        [
            {
                "id": sample.id,
                "split": sample.split,
                "prompt": sample.prompt,
                "target": sample.target.sha256,
                "controls": [control.sha256 for control in sample.controls],
                "mask": sample.mask.sha256 if sample.mask is not None else None,
            }
            for sample in samples
        ]
    )


def verify(manifest: Manifest, root: Path) -> list[Note]:
    """The files that are gone or differ from the manifest."""
    entries = {entry.path: entry for sample in manifest.samples for entry in sample.files()}
    checked = ((path, _difference(root / path, entry)) for path, entry in sorted(entries.items()))
    return [Note(path=path, reason=reason) for path, reason in checked if reason]


def _difference(path: Path, entry: ImageFile | TextFile) -> str:
    if not path.is_file():
        return "is gone"
    size = path.stat().st_size
    if size != entry.size:
        return f"has {size} bytes, had {entry.size}"
    return "" if files.file_digest(path) == entry.sha256 else "has other content"


def load(workspace: Workspace) -> tuple[Manifest, Path]:
    """The manifest of the workspace and the dataset's root, its files as recorded. Raises DataError."""
    document = workspace.evidence(EVIDENCE)
    if document is None:
        raise DataError("the dataset has not been scanned", remedy="finetune dataset")
    manifest = Manifest.from_json(document)
    root = workspace.resolve(manifest.root)
    changed = verify(manifest, root)
    if changed:
        shown = [f"{note.path} {note.reason}" for note in changed[:5]]
        more = [f"and {len(changed) - 5} more"] if len(changed) > 5 else []
        raise DataError(
            "the dataset changed since it was scanned: " + "; ".join(shown + more), remedy="finetune dataset"
        )
    return manifest, root
