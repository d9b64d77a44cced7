"""From a dataset's files to its manifest: every picture is opened once, and again only where it changed."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from runtime import files
from runtime.data import captions, holdout, images
from runtime.data.manifest import Manifest, dataset_digest
from runtime.data.sample import Found, ImageFile, Note, Opened, Sample, Source, TextFile
from runtime.data.sources.opening import Dataset, open_dataset
from runtime.errors import DataError
from runtime.index import Index
from runtime.progress import Progress
from runtime.workspace import Workspace

IMPORTS = "imported"
READERS = 4  # decoding and hashing leave Python's lock; more threads only hold more pictures at once


def build(
    workspace: Workspace, reference: str, count: int | None = None, *, progress: Progress | None = None
) -> Manifest:
    """Read every file of the dataset. `count`: samples to set aside, None for the dataset's or default rule."""
    path = workspace.resolve(reference)
    dataset = open_dataset(path, workspace.root / IMPORTS)
    single = len(dataset.opened) == 1 and dataset.file is None
    index = Index.open(workspace.index_path)
    readers = [_Reader(workspace, opened, reference, index, single=single) for opened in dataset.opened]
    samples: list[Sample] = []
    for reader in readers:
        samples += reader.read_all(progress or Progress(quiet=True))
    samples.sort(key=lambda sample: sample.id)
    wished = holdout.listed(path if path.is_dir() else path.parent)
    split, rule, notes = holdout.split_off(
        samples,
        wished,
        count if count is not None else dataset.holdout,
        never={reader.opened.name for reader in readers if reader.opened.settings.regularisation},
    )
    sources = tuple(reader.source() for reader in readers)
    index.save()
    return Manifest(
        layout=dataset.layout,
        root=reference,
        dataset_file=_dataset_file(dataset),
        sources=sources,
        holdout_rule=rule,
        dataset_digest=dataset_digest(split, sources),
        samples=tuple(split),
        dropped=tuple(note for reader in readers for note in sorted(reader.dropped, key=_by_path)),
        warnings=(*dataset.warnings, *(note for reader in readers for note in reader.warnings), *notes),
    )


def _by_path(note: Note) -> tuple[str, str]:
    return note.path, note.reason


def _dataset_file(dataset: Dataset) -> TextFile | None:
    return _text_file(dataset.file, dataset.file.parent) if dataset.file is not None else None


class _Reader:
    """One source, from found files to samples."""

    def __init__(
        self, workspace: Workspace, opened: Opened, reference: str, index: Index, *, single: bool
    ) -> None:
        self.opened, self.index = opened, index
        self.prefix = "" if single else opened.name + "/"
        self.root = opened.root.resolve()
        alone = single and workspace.resolve(reference).resolve() == self.root
        self.reference = reference if alone else workspace.refer(self.root, f"dataset.{opened.name}")
        self.origin = self.reference
        if opened.archives:
            self.origin = workspace.refer(_folder_of(opened.archives), f"dataset.{opened.name}.origin")
        self.dropped = [self._note(note.path, note.reason) for note in opened.scan.dropped]
        self.warnings = [self._note(note.path, note.reason) for note in opened.scan.warnings]

    def _note(self, path: str, reason: str) -> Note:
        return Note(path=self.prefix + path, reason=reason)

    def source(self) -> Source:
        opened = self.opened
        listed = opened.archives or opened.scan.files
        folder = _folder_of(listed) if opened.archives else self.root
        return Source(
            name=opened.name,
            kind=opened.kind,
            root=self.reference,
            origin=self.origin,
            files=tuple(self._listed(path, folder) for path in listed),
            settings=opened.settings,
            dropped=len(self.dropped),
        )

    def _listed(self, path: Path, folder: Path) -> TextFile:
        """A listing or an archive; one of many GiB is hashed again only where it has changed."""
        place = _place(path, folder)
        digest = self.index.digest(path, f"{self.origin}/{place}")
        return TextFile(path=place, size=path.stat().st_size, sha256=digest)

    def read_all(self, progress: Progress) -> list[Sample]:
        """All usable samples, or the fixed subset of them; what is left out is in `dropped`."""
        with ThreadPoolExecutor(READERS) as pool:
            results = pool.map(self._read, self.opened.scan.samples)
            label = f"reading {self.prefix.rstrip('/') or 'dataset'}"
            found = list(progress.counted(results, label, len(self.opened.scan.samples), unit="sample"))
        samples = []
        for sample, notes in found:
            if sample is not None:
                samples.append(sample)
                self.warnings.extend(notes)
            else:
                self.dropped.extend(notes)
        return self._subset(samples)

    def _subset(self, samples: list[Sample]) -> list[Sample]:
        limit = self.opened.settings.max_samples
        if limit is None or len(samples) <= limit:
            return samples
        kept = {sample.id for sample in sorted(samples, key=lambda sample: holdout.rank(sample.id))[:limit]}
        reason = f"beyond max_samples, {limit} of {len(samples)} are taken"
        beyond = [sample for sample in samples if sample.id not in kept]
        self.dropped += [self._note(sample.target.path, reason) for sample in beyond]
        return [sample for sample in samples if sample.id in kept]

    def _read(self, item: Found) -> tuple[Sample | None, list[Note]]:
        try:
            return self._sample(item)
        except DataError as error:
            where = self._note(item.target.relative_to(self.root).as_posix(), self._inside(error.message))
            return None, [where]

    def _sample(self, item: Found) -> tuple[Sample, list[Note]]:
        texts, notes = self._texts(item)
        sample = Sample(
            id=self.prefix + item.id,
            source=self.opened.name,
            split="train",
            prompt=texts[0],
            alternatives=texts[1:],
            caption=_text_file(item.caption, self.root) if item.caption is not None else None,
            target=self._image(item.target),
            controls=tuple(self._image(path) for path in item.controls),
            mask=self._image(item.mask) if item.mask is not None else None,
        )
        return sample, notes

    def _texts(self, item: Found) -> tuple[tuple[str, ...], list[Note]]:
        settings = self.opened.settings
        if item.caption is None:
            read = captions.from_text(
                item.text or "", f"the caption of {item.id}", lines=settings.caption_lines
            )
        else:
            read = captions.read_caption(item.caption, lines=settings.caption_lines)
        where = (item.caption or item.target).relative_to(self.root).as_posix()
        notes = [self._note(where, read.warning)] if read.warning else []
        texts = tuple(captions.with_trigger(text, settings.trigger_word) for text in read.texts)
        return texts, notes

    def _image(self, path: Path) -> ImageFile:
        place = path.relative_to(self.root).as_posix()
        known = images.identify(path, f"{self.reference}/{place}", self.index)
        return ImageFile(
            path=place, size=known.size, sha256=known.sha256, width=known.width, height=known.height
        )

    def _inside(self, message: str) -> str:
        """Without this machine's part of the path: the manifest travels."""
        return message.replace(f"{self.root}/", "").replace(f"{self.root}\\", "")


def _folder_of(archives: Sequence[Path]) -> Path:
    return min((path.parent for path in archives), key=lambda folder: len(folder.parts))


def _text_file(path: Path, root: Path) -> TextFile:
    return TextFile(path=_place(path, root), size=path.stat().st_size, sha256=files.file_digest(path))


def _place(path: Path, root: Path) -> str:
    """Relative to `root`; the last part may be a link, as in a hub's snapshot."""
    return (path.parent.resolve() / path.name).relative_to(root.resolve()).as_posix()
