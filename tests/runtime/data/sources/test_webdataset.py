import io
import tarfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from runtime.data.sample import Scan
from runtime.data.sources import rows, webdataset
from runtime.data.sources.archives import Columns, open_archive
from runtime.data.sources.rows import Row
from runtime.errors import DataError

Member = tuple[str, bytes] | tarfile.TarInfo


def picture(shade: int) -> bytes:
    held = io.BytesIO()
    Image.new("RGB", (6, 4), (shade, 40, 90)).save(held, "PNG")
    return held.getvalue()


def write_tar(path: Path, members: Sequence[Member]) -> Path:
    with tarfile.open(path, "w") as tar:
        for member in members:
            if isinstance(member, tarfile.TarInfo):
                tar.addfile(member)
            else:
                info = tarfile.TarInfo(member[0])
                info.size = len(member[1])
                tar.addfile(info, io.BytesIO(member[1]))
    return path


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def sample(key: str, shade: int) -> list[Member]:
    return [(f"{key}.png", picture(shade)), (f"{key}.txt", b"edit")]


def unpack(path: Path, columns: Columns = Columns()) -> Scan:  # noqa: B008 (frozen)
    return open_archive("webdataset", path, path.parent / "into", columns)


def reasons(scan: Scan) -> dict[str, str]:
    return {note.path: note.reason for note in scan.dropped}


def test_all_parts_of_a_sample(tmp_path: Path) -> None:
    members = [
        ("x/0001.control_1.png", picture(3)),
        ("x/0001.json", b'{"caption": "long"}'),
        ("x/0001.target.png", picture(1)),
        ("x/0001.mask.png", picture(4)),
        ("x/0001.control.PNG", picture(2)),
        ("x/0002.png", picture(5)),
        ("x/0002.txt", "größer".encode()),
    ]
    scan = unpack(write_tar(tmp_path / "s.tar", members))
    first, second = scan.samples
    assert (first.id, second.id) == ("x_0001", "x_0002")
    assert first.mask is not None and first.caption is not None
    paths = (first.target, *first.controls, first.mask)
    assert [path.read_bytes() for path in paths] == [picture(1), picture(2), picture(3), picture(4)]
    assert [path.name for path in paths] == [
        "x_0001.png",
        "x_0001.png",
        "x_0001_control_1.png",
        "x_0001_mask.png",
    ]
    assert first.caption.read_text(encoding="utf-8") == "long"
    assert second.controls == () and second.mask is None
    assert (scan.dropped, scan.warnings) == ((), ())


def test_shards_of_a_folder_in_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    second = write_tar(folder / "s-1.tar", sample("b", 2) + sample("a", 3))
    first = write_tar(folder / "s-0.tar", sample("a", 1))
    (folder / "README.md").touch()
    scan = unpack(folder)
    assert scan.files == (first, second)
    assert {found.id: found.target.read_bytes() for found in scan.samples} == {
        "a": picture(1),
        "b": picture(2),
        "s-1-000001": picture(3),
    }


def test_dropped_samples_and_their_reasons(tmp_path: Path) -> None:
    members: list[Member] = [
        *sample("good", 1),
        ("a.png", picture(1)),
        ("b.txt", b"no picture"),
        ("c.png", picture(1)),
        ("c.txt", b" \n"),
        ("d.target.png", picture(1)),
        ("d.output.png", picture(2)),
        ("d.txt", b"x"),
        ("e.png", picture(1)),
        ("e.txt", b"\x81"),
        ("f.png", picture(1)),
        ("f.png", picture(2)),
        ("f.txt", b"x"),
        ("h.png", picture(1)),
        ("h.json", b'{"caption": "\\ud800"}'),
    ]
    scan = unpack(write_tar(tmp_path / "s.tar", members))
    assert [found.id for found in scan.samples] == ["good"]
    found = reasons(scan)
    assert list(found) == [f"s.tar/{key}" for key in "abcdefh"]
    expected = ("no caption", "no target picture", "no caption", "output and target could each",
                "can't be read as text", ".png is there twice", "half of a surrogate pair")  # fmt: skip
    for reason, part in zip(found.values(), expected, strict=True):
        assert part in reason
    assert "image_key" in found["s.tar/d"]


def test_links_devices_and_hidden_files_are_counted(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(picture(9))
    members: list[Member] = [
        special("a.control.png", tarfile.SYMTYPE, str(tmp_path / "secret.png")),
        special("a.mask.png", tarfile.LNKTYPE, "a.png"),
        special("a.target.png", tarfile.CHRTYPE),
        special("folder", tarfile.DIRTYPE),
        ("._a.png", b"mac"),
        ("README", b"no extension"),
        *sample("a", 1),
        ("a.cls", b"3"),
        ("a.depth.png", picture(3)),
    ]
    scan = unpack(write_tar(tmp_path / "s.tar", members))
    assert len(scan.samples) == 1 and scan.samples[0].controls == () and scan.samples[0].mask is None
    assert [(note.path, note.reason) for note in scan.warnings] == [
        (
            "s.tar",
            "not used: 1 *.cls, 1 *.depth.png, 1 devices or other special files, "
            "2 hidden files or files without extension, 2 links",
        )
    ]


def test_member_beyond_the_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert rows.LARGEST == 2**30
    monkeypatch.setattr(webdataset, "LARGEST", 500)
    read: list[str] = []
    content = webdataset._content

    def spy(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
        read.append(member.name)
        return content(tar, member)

    monkeypatch.setattr(webdataset, "_content", spy)
    members: list[Member] = [("a.png", bytes(501)), ("a.txt", b"x"), *sample("b", 1)]
    members += [("c.png", picture(1)), ("c.control.png", bytes(450)), ("c.txt", b"x")]
    scan = unpack(write_tar(tmp_path / "s.tar", members))
    assert [found.id for found in scan.samples] == ["b"]
    assert set(reasons(scan).values()) == {"more than 1 GiB of pictures in one row"}
    assert "a.png" not in read and "c.control.png" not in read


@pytest.mark.parametrize("claim", [2**31, 2**40, -1])
def test_header_that_claims_what_is_not_there(tmp_path: Path, claim: int) -> None:
    path = write_tar(tmp_path / "s.tar", sample("a", 1))
    info = tarfile.TarInfo("b.png")
    info.size = claim
    path.write_bytes(path.read_bytes()[: 4 * 512] + info.tobuf(tarfile.GNU_FORMAT) + bytes(512))
    scan = unpack(path)
    assert len(scan.samples) + len(scan.dropped) >= 1 and len(scan.warnings) >= 1
    assert not list(tmp_path.rglob("b.png"))


# Members are a.png a.txt b.png b.txt c.png c.txt, each a block of header and a block of content.
CUTS = [
    (4 * 512, ()),
    (5 * 512, ("a",)),
    (6 * 512 + 100, ("a",)),
    (7 * 512 + 2, ("a",)),
    (8 * 512, ("a",)),
    (8 * 512 + 300, ("a",)),
    (9 * 512, ("a", "b")),
    (10 * 512, ("a", "b")),
    (12 * 512, ("a", "b")),
]


@pytest.mark.parametrize(("end", "whole"), CUTS)
def test_cut_off_archive_gives_what_is_whole(tmp_path: Path, end: int, whole: tuple[str, ...]) -> None:
    path = write_tar(tmp_path / "s.tar", sample("a", 1) + sample("b", 2) + sample("c", 3))
    path.write_bytes(path.read_bytes()[:end])
    scan = unpack(path)
    assert tuple(found.id for found in scan.samples) == whole
    assert [note.path for note in scan.warnings] == ["s.tar"] and "cut off" in scan.warnings[0].reason
    assert {note.reason for note in scan.dropped} == {webdataset.CUT_OFF} and len(scan.dropped) == 1


def test_second_archive_behind_the_first_is_reported(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "s.tar", sample("a", 1))
    two = write_tar(tmp_path / "t.tar", sample("b", 2))
    one.write_bytes(one.read_bytes() + two.read_bytes())
    scan = unpack(one)
    assert [found.id for found in scan.samples] == ["a"]
    assert [note.reason for note in scan.warnings] == [webdataset.DOUBLED]


REFUSED = [
    ([("a.jpx", b"x"), ("a.txt", b"x")], Columns(), "has a target picture; extensions seen: jpx, txt"),
    ([("a.png", b"x"), ("a.cap", b"x")], Columns(), "none of 1 samples has a caption; extensions seen: cap, png"),
    (sample("a", 1), Columns(image="after"), "has a target picture"),
    (sample("a", 1), Columns(caption="json.long"), "has a caption"),
    ([("a.target.png", b"x"), ("a.image.png", b"x")], Columns(), "image and target could each be"),
    ([], Columns(), "none of 0 samples"),
]  # fmt: skip


@pytest.mark.parametrize(("members", "columns", "message"), REFUSED)
def test_wrong_key_is_an_error_not_a_row_of_drops(
    tmp_path: Path, members: list[Member], columns: Columns, message: str
) -> None:
    with pytest.raises(DataError) as caught:
        unpack(write_tar(tmp_path / "s.tar", members), columns)
    assert message in caught.value.message and "image_key" in caught.value.remedy


@pytest.mark.parametrize("data", [b"", b"no tar at all" * 100, b"\x1f\x8b\x08" + bytes(600)])
def test_what_is_no_tar_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "s.tar").write_bytes(data)
    with pytest.raises(DataError, match="none of 0 samples"):
        unpack(tmp_path / "s.tar")


def test_folder_without_shards_says_what_it_saw(tmp_path: Path) -> None:
    (tmp_path / "a.tar.gz").touch()
    with pytest.raises(DataError, match=r"no \.tar file in it; saw a\.tar\.gz") as caught:
        unpack(tmp_path)
    assert "unpack" in caught.value.remedy


def test_columns_by_key(tmp_path: Path) -> None:
    members = [
        ("0001.before.png", picture(1)),
        ("0001.after.png", picture(2)),
        ("0001.matte.png", picture(3)),
        ("0001.json", b'{"captions": {"long": "in full"}}'),
    ]
    columns = Columns(image="after.png", controls=("before",), mask="matte", caption="json.captions.long")
    scan = unpack(write_tar(tmp_path / "s.tar", members), columns)
    found = scan.samples[0]
    assert found.mask is not None and found.caption is not None
    assert [path.read_bytes() for path in (found.target, *found.controls, found.mask)] == [
        picture(2),
        picture(1),
        picture(3),
    ]
    assert found.caption.read_text(encoding="utf-8") == "in full"


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 6 * 512), st.binary(min_size=1, max_size=12)), min_size=1, max_size=4)
)
def test_damage_never_ends_in_another_error(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, bytes]]
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "s.tar"
    data = bytearray(write_tar(path, sample("a", 1) + sample("b", 2)).read_bytes())
    for place, patch in damage:
        data[place : place + len(patch)] = patch
        # A right checksum lets the header through to what reads its numbers.
        block = place // 512 * 512
        data[block + 148 : block + 156] = b" " * 8
        data[block + 148 : block + 155] = b"%06o\0" % sum(data[block : block + 512])
    path.write_bytes(data)
    try:
        found = list(webdataset.open_shards(path, Columns()).rows())
    except DataError:
        return
    assert any(isinstance(item, Row) for item in found)
