import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.sample import Found, Note, Scan
from runtime.data.sources import listing
from runtime.errors import DataError

PICTURES = ("a.png", "b.png", "c0.png", "c1.png", "c2.png", "m.png", "sub/a.png", "a.jpg", "猫 1.webp")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Empty pictures: only names are looked at."""
    folder = tmp_path / "data"
    for name in PICTURES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (tmp_path / "outside.png").touch()
    return folder.resolve()


def jsonl(root: Path, *rows: Any, encoding: str = "utf-8") -> Scan:
    """Rows that are text are lines as they stand."""
    lines = [row if isinstance(row, str) else json.dumps(row, ensure_ascii=False) for row in rows]
    (root / "m.jsonl").write_bytes("\n".join(lines).encode(encoding))
    return listing.scan(root / "m.jsonl")


def table(root: Path, text: str, encoding: str = "utf-8") -> Scan:
    (root / "m.csv").write_bytes(text.encode(encoding))
    return listing.scan(root / "m.csv")


def shape(item: Found, root: Path) -> tuple[str, str, tuple[str, ...], str | None, str | None]:
    def relative(path: Path) -> str:
        return path.relative_to(root).as_posix()

    mask = relative(item.mask) if item.mask else None
    return (item.id, relative(item.target), tuple(map(relative, item.controls)), mask, item.text)


def test_a_row_of_each_form(root: Path) -> None:
    found = jsonl(
        root,
        {"image_path": "a.png", "caption": "only a target"},
        {"image_path": "b.png", "caption": "one", "control_path": "c0.png", "mask_path": "m.png"},
        {"image_path": "sub/a.png", "caption": "two", "control_path_1": "c1.png", "control_path_0": "c0.png"},
        {"image_path": "猫 1.webp", "caption": "猫", "control_path": None, "mask_path": None},
        "",
    )
    assert [shape(item, root) for item in found.samples] == [
        ("a", "a.png", (), None, "only a target"),
        ("b", "b.png", ("c0.png",), "m.png", "one"),
        ("sub/a", "sub/a.png", ("c0.png", "c1.png"), None, "two"),
        ("猫 1", "猫 1.webp", (), None, "猫"),
    ]
    assert (found.dropped, found.warnings, found.files) == ((), (), (root / "m.jsonl",))
    assert [item.caption for item in found.samples] == [None] * 4


CONTROL_KEYS = [
    (
        ("control_path_2", "control_path_10", "control_path_9"),
        ("control_path_2", "control_path_9", "control_path_10"),
    ),
    (("control_path_0001", "control_path_0000"), ("control_path_0000", "control_path_0001")),
    (("control_path_1", "control_path"), ("control_path", "control_path_1")),
    (("control_path_007", "control_path_6"), ("control_path_6", "control_path_007")),
]


@pytest.mark.parametrize(("keys", "order"), CONTROL_KEYS)
def test_controls_come_by_number(root: Path, keys: tuple[str, ...], order: tuple[str, ...]) -> None:
    files = {key: f"c{index}.png" for index, key in enumerate(keys)}
    found = jsonl(root, {"image_path": "a.png", "caption": "x", **files})
    assert [path.name for path in found.samples[0].controls] == [files[key] for key in order]
    assert found.warnings == ()


OK = {"image_path": "b.png", "caption": "fine"}
BAD_ROWS = [
    ('{"image_path": "a.png"', "not JSON"),
    ("not json", "not JSON"),
    ("[1]", "saw a list, expected an object"),
    ("null", "saw a NoneType, expected an object"),
    ('{"image_path": "a.png", "caption": "x", "caption": "y"}', "caption: given twice in one row"),
    ("[" * 100_000, "not JSON"),
    ({"caption": "x"}, "image_path is missing or empty"),
    ({"image_path": "", "caption": "x"}, "image_path is missing or empty"),
    ({"image_path": None, "caption": "x"}, "image_path is missing or empty"),
    ({"image_path": "a.png"}, "caption is missing or empty"),
    ({"image_path": "a.png", "caption": " \n"}, "caption is missing or empty"),
    ({"image_path": 7, "caption": "x"}, "image_path: saw 7, expected text"),
    ({"image_path": "a.png", "caption": ["x", "y"]}, 'caption: saw ["x", "y"], expected text'),
    ({"image_path": "a.png", "caption": "x", "control_path": ["c0.png"]}, "control_path: saw"),
    ({"image_path": "a.png", "caption": "x", "mask_path": True}, "mask_path: saw true, expected text"),
    ({"image_path": "gone.png", "caption": "x"}, "image_path: gone.png is missing"),
    ({"image_path": "sub", "caption": "x"}, "image_path: sub is missing"),
    (
        {"image_path": "a.png", "caption": "x", "control_path": "gone.png"},
        "control_path: gone.png is missing",
    ),
    ({"image_path": "a.png", "caption": "x", "mask_path": "gone.png"}, "mask_path: gone.png is missing"),
    ({"image_path": "../outside.png", "caption": "x"}, "lies outside the manifest's folder"),
    ({"image_path": "sub/../../outside.png", "caption": "x"}, "lies outside the manifest's folder"),
    ({"image_path": "..\\outside.png", "caption": "x"}, "image_path: ..\\outside.png lies outside"),
    ({"image_path": "../data2/a.png", "caption": "x"}, "lies outside the manifest's folder"),
    ({"image_path": "/etc/passwd", "caption": "x"}, "lies outside the manifest's folder"),
    (
        {"image_path": "a.png", "caption": "x", "control_path": "../outside.png"},
        "control_path: ../outside.png lies",
    ),
    ({"image_path": "a\0.png", "caption": "x"}, "image_path: a\0.png is missing"),
    ({"image_path": "x" * 5000 + ".png", "caption": "x"}, "is no usable path"),
    ('{"image_path": "a.png", "caption": "\\ud83c"}', "caption holds half a surrogate pair"),
    ({"image_path": "m.jsonl", "caption": "x"}, "m.jsonl: not a picture that is read"),
    (
        {"image_path": "a.png", "caption": "x", "control_path": "c0.png", "control_path_0": "c1.png"},
        "both control 0",
    ),
    (
        {"image_path": "a.png", "caption": "x", "control_path_1": "c0.png", "control_path_01": "c1.png"},
        "both control 1",
    ),
    ({"image_path_0": "a.png", "image_path_1": "b.png", "caption": "x"}, "image_path_0: several targets"),
]


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS)
def test_a_bad_row_is_dropped_with_its_line_and_no_other(root: Path, row: Any, reason: str) -> None:
    found = jsonl(root, OK, "", row, {"image_path": "c0.png", "caption": "after"})
    assert [item.id for item in found.samples] == ["b", "c0"]
    assert [note.path for note in found.dropped] == ["m.jsonl:3"]
    assert reason in found.dropped[0].reason
    assert str(root) not in found.dropped[0].reason
    json.dumps(found.dropped[0].reason).encode()


def test_heic_is_told_apart(root: Path) -> None:
    (root / "phone.heic").touch()
    found = jsonl(root, {"image_path": "phone.heic", "caption": "x"})
    assert found.dropped == (
        Note(path="m.jsonl:1", reason="image_path: phone.heic: HEIC is not read: convert it to JPEG or PNG"),
    )


@pytest.mark.parametrize("written", ["{root}/a.png", "./a.png", "sub/../a.png", "sub//..//a.png"])
def test_other_spellings_of_a_path_inside_are_the_same_file(root: Path, written: str) -> None:
    found = jsonl(root, {"image_path": written.format(root=root.as_posix()), "caption": "x"})
    assert [shape(item, root)[:2] for item in found.samples] == [("a", "a.png")]


def test_paths_as_windows_writes_them(root: Path) -> None:
    found = jsonl(root, {"image_path": "sub\\a.png", "caption": "x", "control_path": ".\\c0.png"})
    assert [shape(item, root)[:3] for item in found.samples] == [("sub/a", "sub/a.png", ("c0.png",))]


def link(path: Path, target: Path) -> None:
    try:
        path.symlink_to(target, target_is_directory=target.is_dir())
    except OSError:
        pytest.skip("links need a privilege here")


def test_links_out_of_the_folder_are_not_followed_links_inside_are(root: Path) -> None:
    link(root / "out.png", root.parent / "outside.png")
    link(root / "away", root.parent)
    link(root / "in.png", root / "a.png")
    link(root / "loop.png", root / "loop.png")
    names = ("out.png", "away/outside.png", "in.png", "loop.png")
    rows = [{"image_path": name, "caption": "x"} for name in names]
    found = jsonl(root, *rows)
    assert [item.id for item in found.samples] == ["in"]
    assert [note.path for note in found.dropped] == ["m.jsonl:1", "m.jsonl:2", "m.jsonl:4"]
    assert all("lies outside" in note.reason for note in found.dropped[:2])
    assert found.dropped[2].reason.startswith("image_path: 'loop.png' is no usable path: ")
    assert str(root.parent) not in found.dropped[2].reason


def test_absolute_paths_through_another_spelling_of_the_folder(root: Path) -> None:
    link(root.parent / "alias", root)
    found = jsonl(root, {"image_path": str(root.parent / "alias" / "a.png"), "caption": "x"})
    assert [shape(item, root)[:2] for item in found.samples] == [("a", "a.png")]


IDENTITIES = [
    (("a.png", "b.png"), ("a", "b")),
    (("a.png", "a.jpg"), ("a.png", "a.jpg")),
    (("a.png", "sub/a.png"), ("a", "sub/a")),
    (("a.png", "a.png", "a.png"), ("a", "a#2", "a#3")),
    (("a.png", "a.jpg", "a.png"), ("a.png", "a.jpg", "a.png#2")),
    (("a.png", "a.png.jpg"), ("a", "a.png.jpg")),
    (("a.png", "a.jpg", "a.png.jpg"), ("a.png", "a.jpg", "a.png.jpg")),
    (("a.png", "a#2.png", "a.png"), ("a", "a#2", "a#3")),
    (("a.png", "a.png", "a#2.png"), ("a", "a#3", "a#2")),
    (("e\u0301.png", "b.png"), ("\u00e9", "b")),
    ((".x.png", "v1.2.png"), (".x", "v1.2")),
]


@pytest.mark.parametrize(("images", "ids"), IDENTITIES)
def test_ids_are_unique_and_say_the_path(root: Path, images: tuple[str, ...], ids: tuple[str, ...]) -> None:
    for name in images:
        (root / name).touch()
    rows = [{"image_path": name, "caption": str(index)} for index, name in enumerate(images)]
    found = jsonl(root, *rows)
    assert {item.text: item.id for item in found.samples} == {
        str(index): name for index, name in enumerate(ids)
    }
    assert [item.id for item in found.samples] == sorted(ids)


@given(
    st.lists(
        st.sampled_from(["a.png", "a.jpg", "a.png.jpg", "a#2.png", "a#2.jpg", "a.png#2.jpg", "a"]), max_size=9
    )
)
def test_ids_are_unique_whatever_the_names(images: list[str]) -> None:
    rows = [Found(id="", target=Path("/d") / name, controls=(), mask=None, caption=None) for name in images]
    ids = [item.id for item in listing._identified(rows, Path("/d"))]
    assert len(set(ids)) == len(images)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_encodings_and_line_ends(root: Path, encoding: str, end: str) -> None:
    line = json.dumps({"image_path": "猫 1.webp", "caption": "blue\u2028sky é"}, ensure_ascii=False)
    found = jsonl(root, line + end + json.dumps(OK) + end, encoding=encoding)
    assert [item.text for item in found.samples] == ["fine", "blue\u2028sky é"]
    assert (found.warnings, found.dropped) == ((), ())


def test_windows_1252_is_read_with_a_warning(root: Path) -> None:
    found = jsonl(root, '{"image_path": "a.png", "caption": "it\u2019s"}', encoding="cp1252")
    assert [item.text for item in found.samples] == ["it\u2019s"]
    assert [note.path for note in found.warnings] == ["m.jsonl"]
    assert "Windows-1252" in found.warnings[0].reason


def test_columns_that_are_not_read_are_named_once(root: Path) -> None:
    """A misspelt control would otherwise make a target-only sample unseen."""
    found = jsonl(root, *({**OK, "control_image": "c0.png", "width": 3, "empty": None} for _ in range(3)))
    assert len(found.warnings) == 1
    assert found.warnings[0].reason.startswith("ignored: control_image, width; read are image_path, ")


def test_an_empty_file_lists_nothing(root: Path) -> None:
    found = jsonl(root)
    assert (found.samples, found.dropped) == ((), ())


@pytest.mark.parametrize("name", ["gone.jsonl", "gone.csv", "sub"])
def test_a_manifest_that_can_not_be_read_is_refused(root: Path, name: str) -> None:
    with pytest.raises(DataError, match="can't be read as text"):
        listing.scan(root / name)


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_csv(root: Path, encoding: str) -> None:
    text = (
        "caption,image_path,control_path_1,control_path_0,mask_path,\r\n"
        '"one, with\r\na line ""more""",a.png,c1.png,c0.png,m.png,\r\n'
        "\r\n"
        " two ,b.png,, ,\r\n"
        "short,c2.png\r\n"
    )
    found = table(root, text, encoding)
    assert [shape(item, root) for item in found.samples] == [
        ("a", "a.png", ("c0.png", "c1.png"), "m.png", 'one, with\r\na line "more"'),
        ("b", "b.png", (), None, " two "),
        ("c2", "c2.png", (), None, "short"),
    ]
    assert (found.dropped, found.warnings, found.files) == ((), (), (root / "m.csv",))


BAD_LINES = [
    ("gone.png,x\n", 4, "image_path: gone.png is missing"),
    ("a.png,\n", 4, "caption is missing or empty"),
    (",x\n", 4, "image_path is missing or empty"),
    ("a.png,one, two\n", 4, "3 cells for 2 columns: a text with commas needs quotes"),
    ('a.png,"one" two\n', 4, "not CSV: "),
    ("../outside.png,x\n", 4, "lies outside"),
]


@pytest.mark.parametrize(("line", "number", "reason"), BAD_LINES)
def test_a_bad_line_is_dropped_and_no_other(root: Path, line: str, number: int, reason: str) -> None:
    """It begins on the fourth line: the row before spans two."""
    found = table(root, f'image_path,caption\nb.png,"over\ntwo"\n{line}c0.png,after\n')
    assert [item.text for item in found.samples] == ["over\ntwo", "after"]
    assert [note.path for note in found.dropped] == [f"m.csv:{number}"]
    assert reason in found.dropped[0].reason


def test_an_open_quote_does_not_swallow_the_rest_unseen(root: Path) -> None:
    found = table(root, 'image_path,caption\nb.png,fine\na.png,"open\nc0.png,lost\nc1.png,lost\n')
    assert [item.id for item in found.samples] == ["b"]
    assert [(note.path, note.reason) for note in found.dropped] == [
        ("m.csv:3", "not CSV: unexpected end of data (lines 3 to 5)")
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"saw the first line \(empty\)"),
        ("a.png,x\n", r"saw the first line a.png,x; expected column names"),
        ("image_path;caption\na.png;x\n", r"saw the first line image_path;caption"),
        ("image_path,text\n", "expected column names, separated by commas, of image_path, caption"),
        ("image_path,caption,caption\n", "column caption twice"),
    ],
)
def test_a_csv_needs_its_header(root: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        table(root, text)


def test_a_csv_names_the_columns_that_it_ignores(root: Path) -> None:
    found = table(root, "image_path,caption,source\na.png,x,web\nb.png,y,\n")
    assert [note.reason.split(";")[0] for note in found.warnings] == ["ignored: source"]


CELLS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(str.strip)


@given(st.lists(CELLS, min_size=1, max_size=6))
def test_captions_survive_both_forms(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    root = tmp_path_factory.mktemp("listed")
    names = [f"p{index}.png" for index in range(len(texts))]
    for name in names:
        (root / name).touch()
    sheet = io.StringIO(newline="")
    csv.writer(sheet).writerows([("image_path", "caption"), *zip(names, texts, strict=True)])
    lines = (
        json.dumps({"image_path": name, "caption": text}) for name, text in zip(names, texts, strict=True)
    )
    for found in (table(root, sheet.getvalue()), jsonl(root, *lines)):
        assert [item.text for item in found.samples] == texts
        assert found.dropped == ()
