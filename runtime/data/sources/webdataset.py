"""WebDataset tar shards: the files of one sample follow each other and share a name up to its first dot.

    0001.target.png  or  0001.png                  target; also the other names of `rows.TARGETS`
    0001.control.png 0001.control_1.png            controls, in this order; also the other names of `rows.CONTROLS`
    0001.mask.png
    0001.txt                                       caption; without it `caption`, `text` or `prompt` of 0001.json

A key of the dataset file is an extension (`target.png`, `txt`), with or without the picture's own (`target`), or,
of a caption, a field of a JSON file (`json.captions.long`). A shard is read as a stream, from start to end, once.
"""

import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runtime.data.sample import Note
from runtime.data.sources.extensions import caption_of, is_picture, is_text, roles
from runtime.data.sources.names import listed
from runtime.data.sources.rows import LARGEST, TOO_LARGE, Archive, Columns, Row, printable
from runtime.errors import DataError

KEYS = "set image_key, control_keys, mask_key or caption_key in the dataset file, then finetune dataset"
DOUBLED = "more data behind its end mark, which is not read: two archives in one file?"
CUT_OFF = "the archive is cut off here: files of this sample may be missing"
# What tarfile raises for headers that lie: its own errors, and those of the numbers in them.
DAMAGE = (tarfile.TarError, EOFError, ValueError, OverflowError)


def open_shards(path: Path, columns: Columns) -> Archive:
    """A .tar file, or all in a folder by their names."""
    if path.is_file():
        found, root = [path], path.parent
    else:
        found, root = (
            [file for file in listed(path) if file.suffix.lower() == ".tar" and file.is_file()],
            path,
        )
    if not found:
        seen = ", ".join(printable(entry.name) for entry in listed(path)[:10]) or "nothing"
        raise DataError(
            f"{path}: no .tar file in it; saw {seen}", remedy="unpack .tar.gz to .tar, or mend the path"
        )
    return Archive(root=root, files=tuple(found), rows=lambda: _rows(path, found, columns))


def _rows(path: Path, shards: Sequence[Path], columns: Columns) -> Iterator[Row | Note]:
    tally = _Tally()
    for shard in shards:
        yield from _Shard(path=shard, columns=columns, tally=tally).rows()
    tally.check(path)


@dataclass(slots=True)
class _Tally:
    """Of all shards, so that a wrong key is an error and not ten thousand dropped rows."""

    samples: int = 0
    targets: int = 0
    captions: int = 0
    extensions: set[str] = field(default_factory=set)
    problem: str = ""

    def check(self, path: Path) -> None:
        if self.targets and self.captions:
            return
        what = "target picture" if not self.targets else "caption"
        why = f": {self.problem}" if self.problem else ""
        seen = ", ".join(sorted(self.extensions)[:30]) or "none"
        raise DataError(
            f"{path}: none of {self.samples} samples has a {what}{why}; extensions seen: {seen}", remedy=KEYS
        )


@dataclass(slots=True, kw_only=True)
class _Group:
    """The files of one sample, by extension."""

    key: str
    pictures: dict[str, bytes] = field(default_factory=dict)
    texts: dict[str, bytes] = field(default_factory=dict)
    size: int = 0
    problem: str = ""


@dataclass(slots=True, kw_only=True)
class _Shard:
    path: Path
    columns: Columns
    tally: _Tally
    ignored: Counter[str] = field(default_factory=Counter)
    number: int = -1
    group: _Group | None = None

    @property
    def name(self) -> str:
        return printable(self.path.name)

    def rows(self) -> Iterator[Row | Note]:
        damage = ""
        try:
            with tarfile.open(self.path, "r|") as tar:
                yield from self._members(tar)
                damage = _ending(self.path, tar.offset)
        except DAMAGE as error:
            damage = f"damaged or cut off, what lies before it is used: {error}"
            self.tally.problem = self.tally.problem or f"{self.name}: {error}"
        if self.group is not None:
            self.group.problem = self.group.problem or ("" if damage in ("", DOUBLED) else CUT_OFF)
            yield self._finish(self.group)
        if damage:
            yield Note(path=self.name, reason=damage)
        if self.ignored:
            counts = ", ".join(f"{count} {what}" for what, count in sorted(self.ignored.items())[:20])
            yield Note(path=self.name, reason=f"not used: {counts}")

    def _members(self, tar: tarfile.TarFile) -> Iterator[Row]:
        size = self.path.stat().st_size
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header until the end
            key, extension = _split(member.name)
            what = _not_a_file(member, key, extension)
            if not what and (self.group is None or self.group.key != key):
                if self.group is not None:
                    yield self._finish(self.group)
                self.group, self.number = _Group(key=key), self.number + 1
            if tar.offset > size:  # tarfile would go there in small steps, for hours if the header says so
                raise tarfile.ReadError(f"{printable(member.name)} claims more bytes than there are")
            if member.isdir():
                continue
            if what:
                self.ignored[what] += 1
            elif self.group is not None:
                self._add(tar, member, self.group, extension)

    def _add(self, tar: tarfile.TarFile, member: tarfile.TarInfo, group: _Group, extension: str) -> None:
        if len(self.tally.extensions) < 100:
            self.tally.extensions.add(printable(extension))
        texts = is_text(extension, self.columns.caption)
        if not texts and not is_picture(extension, self.columns):
            self.ignored[f"*.{printable(extension)}"] += 1
            return
        group.size += member.size
        if group.size > LARGEST:
            group.problem, group.pictures, group.texts = TOO_LARGE, {}, {}
            return
        kept = group.texts if texts else group.pictures
        if extension in kept:
            group.problem = f".{printable(extension)} is there twice"
        kept[extension] = _content(tar, member)

    def _finish(self, group: _Group) -> Row:
        self.tally.samples += 1
        shown: dict[str, Any] = {
            "archive": self.name,
            "number": self.number,
            "key": printable(group.key),
            "name": group.key,
        }
        try:
            image, controls, mask = roles(group.pictures, self.columns)
            self.tally.targets += image is not None
            caption, warning = caption_of(group.texts, self.columns.caption)
            self.tally.captions += caption is not None
        except DataError as error:
            self.tally.problem = self.tally.problem or error.message
            return Row(**shown, problem=group.problem or f"{error.message}: {error.remedy}")
        chosen = {image, *controls, mask}
        self.ignored.update(f"*.{printable(name)}" for name in group.pictures if name not in chosen)
        return Row(
            **shown,
            target=group.pictures[image] if image is not None else None,
            controls=tuple(group.pictures[name] for name in controls),
            mask=group.pictures[mask] if mask is not None else None,
            caption=caption,
            problem=group.problem,
            warning=warning,
        )


def _split(name: str) -> tuple[str, str]:
    """Key and extension: `a/b.c/0001.target.PNG` is `a/b.c/0001` and `target.png`."""
    folder, slash, file = name.rpartition("/")
    stem, _, extension = file.partition(".")
    return (folder + slash + stem, extension.lower()) if stem else ("", "")


def _not_a_file(member: tarfile.TarInfo, key: str, extension: str) -> str:
    """Why a member is no file of a sample, as the plural that a note counts."""
    if member.isdir():
        return "folders"
    if member.issym() or member.islnk():
        return "links"
    if member.issparse():
        return "sparse files"
    if not member.isreg() or member.size < 0:
        return "devices or other special files"
    return "" if key and extension else "hidden files or files without extension"


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member)
    data = file.read() if file is not None else b""
    if len(data) != member.size:
        raise tarfile.ReadError("unexpected end of data")
    return data


def _ending(path: Path, offset: int) -> str:
    """What is wrong behind the last member: a tar ends in blocks of zeros, and nothing follows them."""
    with path.open("rb") as handle:
        handle.seek(offset)
        rest = handle.read(tarfile.BLOCKSIZE)
        if len(rest) < tarfile.BLOCKSIZE:
            return "no end mark: it may be cut off"
        while rest:
            if rest.strip(b"\0"):
                return DOUBLED
            rest = handle.read(2**20)
    return ""
