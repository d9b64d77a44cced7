"""What all kinds of archive share, shown with tar shards, which need no package."""

import hashlib
import io
import json
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from runtime import files
from runtime.data.sample import Scan
from runtime.data.sources import archives, unpacking
from runtime.data.sources.archives import Columns, open_archive
from runtime.errors import DataError


def picture(shade: int, form: str = "PNG") -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (6, 4), (shade % 256, shade // 256, 90)).save(held, form)
    return held.getvalue()


def write_tar(path: Path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))


def pair(key: str, shade: int, form: str = "PNG") -> dict[str, bytes]:
    return {
        f"{key}.{form.lower()}": picture(shade, form),
        f"{key}.control.png": picture(shade + 1),
        f"{key}.txt": f"edit {shade}".encode(),
    }


def unpack(source: Path, into: Path, columns: Columns = Columns()) -> Scan:  # noqa: B008 (frozen)
    return open_archive("webdataset", source, into, columns)


def content(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != archives.RECORD
    }


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "set.tar"
    write_tar(path, {**pair("b", 10, "JPEG"), **pair("a", 20), "c.txt": b"no picture"})
    return path


@pytest.fixture
def into(tmp_path: Path) -> Path:
    return tmp_path / "imports" / "set"


def test_recipe_layout_with_the_very_bytes(shard: Path, into: Path) -> None:
    scan = unpack(shard, into)
    assert content(into) == {
        "training_images/a.png": picture(20),
        "training_images/a.txt": b"edit 20",
        "control_images/a.png": picture(21),
        "training_images/b.jpg": picture(10, "JPEG"),
        "training_images/b.txt": b"edit 10",
        "control_images/b.png": picture(11),
    }
    assert [found.id for found in scan.samples] == ["a", "b"]
    second = scan.samples[1]
    assert second.target == into / "training_images" / "b.jpg" and second.mask is None and second.text is None
    assert second.controls == (into / "control_images" / "b.png",)
    assert second.caption == into / "training_images" / "b.txt"
    assert scan.files == (shard,)
    assert [note.path for note in scan.dropped] == ["set.tar/c"]
    assert "no target picture" in scan.dropped[0].reason


def test_record_names_the_archive_and_all_that_was_made(shard: Path, into: Path) -> None:
    unpack(shard, into, Columns(caption="txt"))
    record = files.read_json(into / archives.RECORD)
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    stat = shard.stat()
    assert record["archives"] == [
        {"name": "set.tar", "size": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": digest}
    ]
    assert record["columns"] == {"image": None, "controls": [], "mask": None, "caption": "txt"}
    assert record["kind"] == "webdataset"
    assert record["files"] == {name: len(data) for name, data in content(into).items()}
    assert str(into) not in json.dumps(record)


def refuse(*_: Any) -> Any:
    raise AssertionError("must not be called")


def test_second_call_opens_nothing(shard: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = unpack(shard, into)
    before = times(into)
    monkeypatch.setattr(tarfile, "open", refuse)
    monkeypatch.setattr(files, "file_digest", refuse)
    assert unpack(shard, into) == first
    assert times(into) == before


def test_touched_archive_is_hashed_once_and_not_read(
    shard: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = unpack(shard, into)
    os.utime(shard, ns=(1, 1_000_000_000))
    with monkeypatch.context() as patched:
        patched.setattr(tarfile, "open", refuse)
        assert unpack(shard, into) == first
        patched.setattr(files, "file_digest", refuse)
        assert unpack(shard, into) == first


def test_changed_archive_is_unpacked_and_what_it_lost_is_removed(shard: Path, into: Path) -> None:
    unpack(shard, into)
    kept = times(into)[into / "training_images" / "a.png"]
    (into / "training_images" / "mine.png").write_bytes(b"foreign")
    (into / "notes.md").write_bytes(b"foreign")
    write_tar(shard, {**pair("a", 20), **pair("d", 30)})
    scan = unpack(shard, into)
    assert [found.id for found in scan.samples] == ["a", "d"]
    assert set(content(into)) == {
        *(f"training_images/{name}" for name in ("a.png", "a.txt", "d.png", "d.txt", "mine.png")),
        "control_images/a.png",
        "control_images/d.png",
        "notes.md",
    }
    assert times(into)[into / "training_images" / "a.png"] == kept


def test_change_of_same_size_and_other_time_is_seen(shard: Path, into: Path) -> None:
    unpack(shard, into)
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b"edit 20", b"edit 29"))
    os.utime(shard, ns=(1, 1))
    unpack(shard, into)
    assert content(into)["training_images/a.txt"] == b"edit 29"


@pytest.mark.parametrize("change", ["columns", "lost", "cut", "record", "list", "older"])
def test_anything_else_than_the_recorded_state_is_unpacked_anew(shard: Path, into: Path, change: str) -> None:
    unpack(shard, into)
    expected = content(into)
    columns = Columns(caption="txt") if change == "columns" else Columns()
    if change == "lost":
        (into / "control_images" / "a.png").unlink()
    if change == "cut":
        (into / "control_images" / "a.png").write_bytes(b"")
    if change in ("record", "list"):
        (into / archives.RECORD).write_text({"record": "{", "list": "[]"}[change], encoding="utf-8")
    if change == "older":
        record = files.read_json(into / archives.RECORD)
        files.write_json(into / archives.RECORD, record | {"schema": "import/0"})
    assert [found.id for found in unpack(shard, into, columns).samples] == ["a", "b"]
    assert content(into) == expected
    assert files.read_json(into / archives.RECORD)["schema"] == archives.SCHEMA


@pytest.mark.parametrize("calls", range(1, 8))
def test_killed_anywhere_a_rerun_completes(
    shard: Path, into: Path, monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    """The journal is the first file that is written, import.json the eighth."""
    whole = into.parent / "whole"
    unpack(shard, whole)
    write = files.write_with
    done = 0

    def dying(path: Path, writer: Any) -> None:
        nonlocal done
        if done == calls:
            raise KeyboardInterrupt
        done += 1
        write(path, writer)

    with monkeypatch.context() as patched:
        patched.setattr(files, "write_with", dying)
        with pytest.raises(KeyboardInterrupt):
            unpack(shard, into)
    assert not (into / archives.RECORD).exists()
    assert len([path for path in into.rglob("*") if path.is_file()]) == calls
    unpack(shard, into)
    assert content(into) == content(whole)
    assert files.read_json(into / archives.RECORD) == files.read_json(whole / archives.RECORD)


def test_what_a_killed_unpacking_left_is_removed_when_no_longer_wanted(
    shard: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between two states of the archive; its files are neither in the old record nor in the new."""
    unpack(shard, into)
    write_tar(shard, {**pair("c", 40), **pair("d", 50)})
    with monkeypatch.context() as patched:
        patched.setattr(
            unpacking.Unpacker, "remove_unwanted", lambda _: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            unpack(shard, into)
    assert not (into / archives.RECORD).exists()
    with (into / unpacking.JOURNAL).open("ab") as torn:
        torn.write(b'["training_images/x')
    write_tar(shard, pair("e", 60))
    unpack(shard, into)
    assert set(content(into)) == {"training_images/e.png", "training_images/e.txt", "control_images/e.png"}


def test_file_of_the_user_is_not_written_over(shard: Path, into: Path) -> None:
    mine = into / "control_images" / "a.png"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine")
    scan = unpack(shard, into)
    assert mine.read_bytes() == b"mine"
    assert [found.id for found in scan.samples] == ["b", "set-000001"]
    assert (into / "control_images" / "set-000001.png").read_bytes() == picture(21)
    write_tar(shard, pair("b", 10, "JPEG"))
    unpack(shard, into)
    assert set(content(into)) == {
        "control_images/a.png",
        "control_images/b.png",
        "training_images/b.jpg",
        "training_images/b.txt",
    }


@pytest.mark.parametrize(
    "name", ["../outside.txt", "training_images/../../outside.txt", "notes.md", "training_images/.."]
)
def test_edited_record_removes_nothing_that_we_could_not_have_made(
    shard: Path, into: Path, name: str
) -> None:
    unpack(shard, into)
    outside = into.parent / "outside.txt"
    outside.write_bytes(b"")
    (into / "notes.md").write_bytes(b"")
    record = files.read_json(into / archives.RECORD)
    files.write_json(into / archives.RECORD, record | {"files": {**record["files"], name: 5}})
    unpack(shard, into)
    assert outside.is_file() and (into / "notes.md").is_file()


def test_archive_that_changes_while_it_is_read_is_refused(
    shard: Path, into: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = unpacking.Unpacker.take

    def slow(self: unpacking.Unpacker, rows: Any) -> None:
        take(self, rows)
        os.utime(shard, ns=(1, 1))

    monkeypatch.setattr(unpacking.Unpacker, "take", slow)
    with pytest.raises(DataError, match="was changed while it was read"):
        unpack(shard, into)
    assert not (into / archives.RECORD).exists()


def test_rows_are_streamed(tmp_path: Path, into: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first sample is on the disk before the second is read."""
    write_tar(tmp_path / "set.tar", {**pair("a", 1), **pair("b", 2), **pair("c", 3)})
    seen: list[int] = []
    parts_of = unpacking.parts_of

    def spy(row: Any) -> Any:
        seen.append(len(list(into.glob("training_images/*.txt"))))
        return parts_of(row)

    monkeypatch.setattr(unpacking, "parts_of", spy)
    unpack(tmp_path / "set.tar", into)
    assert seen == [0, 1, 2]


BROKEN = [
    (b"", "the target picture is empty"),
    (b"no picture", "the target picture has no known format"),
    (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 5\n%%EndComments\n",
        "the target picture has no known format",
    ),
    (b"P6 3 2 255 " + bytes(18), "the target picture has no known format"),
    (picture(1)[:12], "the target picture has no known format"),
]


@pytest.mark.parametrize(("data", "reason"), BROKEN)
def test_broken_picture_drops_its_row_only(tmp_path: Path, into: Path, data: bytes, reason: str) -> None:
    write_tar(tmp_path / "set.tar", {"a.png": data, "a.txt": b"x", **pair("b", 1)})
    scan = unpack(tmp_path / "set.tar", into)
    assert [found.id for found in scan.samples] == ["b"]
    assert [(note.path, note.reason) for note in scan.dropped] == [("set.tar/a", reason)]


def test_bomb_broken_control_and_mask_are_named(tmp_path: Path, into: Path) -> None:
    bomb = bytearray(picture(1))
    bomb[16:24] = (40000).to_bytes(4, "big") * 2
    large = bytearray(picture(1))
    large[16:24] = (10000).to_bytes(4, "big") * 2  # Pillow warns of it; that is for the decoder to judge
    import zlib

    for data in (bomb, large):
        data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    write_tar(
        tmp_path / "set.tar",
        {
            "a.png": bytes(bomb), "a.txt": b"x",
            "b.png": picture(1), "b.control.png": picture(1), "b.control_1.png": b"?", "b.txt": b"x",
            "c.png": picture(1), "c.mask.png": b"", "c.txt": b"x",
            "d.png": bytes(large), "d.txt": b"x",
        },
    )  # fmt: skip
    scan = unpack(tmp_path / "set.tar", into)
    assert [found.id for found in scan.samples] == ["d"]
    assert [note.reason for note in scan.dropped] == [
        "the target picture claims more than 179 megapixels",
        "control 2 has no known format",
        "the mask is empty",
    ]


FORMATS = {
    "PNG": ".png",
    "JPEG": ".jpg",
    "WEBP": ".webp",
    "BMP": ".bmp",
    "GIF": ".gif",
    "TIFF": ".tif",
    "MPO": ".jpg",
}


@pytest.mark.parametrize(("form", "suffix"), FORMATS.items())
def test_suffix_is_that_of_the_format(form: str, suffix: str) -> None:
    assert unpacking.suffix_of(picture(7, form)) == suffix


def test_ids_that_are_one_file_on_windows_are_told_apart(tmp_path: Path, into: Path) -> None:
    keys = ("a", "A", "x/a", "a_control_1", "x\\a", "../a", "nul", "a", "b_mask")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        for number, key in enumerate(keys):
            for name, data in pair(key, number * 3).items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    scan = unpack(tmp_path / "set.tar", into)
    by_number = {found.target.read_bytes(): found.id for found in scan.samples}
    assert [by_number[picture(number * 3)] for number in range(len(keys))] == [
        "a", "set-000001", "x_a", "set-000003", "set-000004", "_a", "set-000006", "set-000007", "set-000008",
    ]  # fmt: skip


NAMES = st.text(
    alphabet=st.one_of(
        st.sampled_from('./\\:aAéCON1_ *?"<>|\udc80'),
        st.characters(exclude_categories=("Cs",), exclude_characters="\0"),
    ),
    min_size=1,
    max_size=24,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(NAMES, min_size=1, max_size=5))
def test_no_key_leads_out_of_the_folder(tmp_path_factory: pytest.TempPathFactory, keys: list[str]) -> None:
    root = tmp_path_factory.mktemp("hostile")
    members = {**pair("good", 1)}
    for number, key in enumerate(keys):
        members |= pair(key, 10 * number)
    with tarfile.open(root / "set.tar", "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    into = root / "in" / "to"
    scan = unpack(root / "set.tar", into)
    assert {path.name for path in root.iterdir()} == {"set.tar", "in"}
    assert [path.name for path in (root / "in").iterdir()] == ["to"]
    assert {path.name for path in into.iterdir()} == {"training_images", "control_images", archives.RECORD}
    made = [path for folder in ("training_images", "control_images") for path in (into / folder).iterdir()]
    assert all(path.is_file() for path in made)
    assert len({path.relative_to(into).as_posix().casefold() for path in made}) == len(made)
    assert sorted(files.read_json(into / archives.RECORD)["files"]) == sorted(
        path.relative_to(into).as_posix() for path in made
    )
    assert "good" in {found.id for found in scan.samples}


@pytest.mark.parametrize(("kind", "message"), [("webdataset", "doesn't exist"), ("csv", "csv is no archive")])
def test_what_is_no_archive_is_refused(tmp_path: Path, into: Path, kind: Any, message: str) -> None:
    path = tmp_path / "nowhere" if kind == "webdataset" else tmp_path
    with pytest.raises(DataError, match=message):
        open_archive(kind, path, into, Columns())
