"""What travels from the sources of a dataset to the manifest, the sizes, the cache and the order.

    source --scan--> Found, Note --read--> Sample --> Manifest

A source knows files and names; only `manifest` opens pictures.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Split = Literal["train", "holdout"]
Size = tuple[int, int]
"""Height, width in pixels."""
Kind = Literal["folders", "directory", "jsonl", "csv", "huggingface", "parquet", "webdataset"]
"""folders: the recipe's layout; directory: pictures with captions beside them, controls in another folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Something about one file; `path` is relative to its source's root, POSIX."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The files of one complete sample. `id` is unique in its source, in NFC.

    The caption is a file, or `text` where a manifest holds it.
    """

    id: str
    target: Path
    controls: tuple[Path, ...]
    mask: Path | None
    caption: Path | None
    text: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """`samples` ordered by id; `files`: manifest files or archives that decided what they are."""

    samples: tuple[Found, ...]
    dropped: tuple[Note, ...]
    warnings: tuple[Note, ...] = ()
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the dataset file says of one source. None: config.yaml decides."""

    resolution: Size | None = None
    """Height and width (musubi-style files write width first)."""
    enable_bucket: bool | None = None
    bucket_no_upscale: bool | None = None
    control_resolution: Size | None = None
    no_resize_control: bool | None = None
    batch_size: int | None = None
    views: int = 1
    """How often an epoch sees each sample: num_repeats, or repeats + 1."""
    weight: float | None = None
    """Share of an epoch, relative to the other sources' weights. None: by its number of views."""
    max_samples: int | None = None
    """A fixed subset of this size, the same at every scan."""
    regularisation: bool = False
    """Samples that hold the base's behaviour; never held out."""
    trigger_word: str = ""
    caption_lines: bool = False
    """Each line of a caption is one caption, of which an epoch picks one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Opened:
    """One source as it was opened, nothing read of its pictures yet."""

    name: str
    kind: Kind
    root: Path
    """Folder that the paths of `scan` lie in."""
    scan: Scan
    settings: Settings = field(default_factory=Settings)
    archives: tuple[Path, ...] = ()
    """What `root` was unpacked from; empty where the files are used in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageFile:
    """`path` is relative to the source's root; width and height are those of the upright picture."""

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
    source: str
    split: Split
    prompt: str
    alternatives: tuple[str, ...]
    """Further captions of the same picture; an epoch picks one of all."""
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
class Source:
    """A source as the manifest records it.

    `root` is a reference as a workspace writes it. `files` are those that decided what the samples are
    (a JSONL, or archives), their paths relative to `origin`, which is `root` where nothing was unpacked.
    """

    name: str
    kind: Kind
    root: str
    origin: str
    files: tuple[TextFile, ...]
    settings: Settings
    dropped: int
