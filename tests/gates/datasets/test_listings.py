from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.datasets import listings

# line of a JSONL, then (target, controls, mask, text) or the start of its fault
ROWS: dict[str, tuple[str, Any]] = {
    "target only": ('{"image_path": "a.png", "caption": "x"}', ("a.png", [], None, "x")),
    "controls by number, the plain one is 0": (
        '{"control_path_10": "c.png", "control_path": "a.png", "control_path_2": "d/b.png", '
        '"image_path": "a.png", "caption": "x", "mask_path": "c.png", "more": NaN}',
        ("a.png", ["a.png", "d/b.png", "c.png"], "c.png", "x"),
    ),
    "backslashes, dots": (
        '{"image_path": "d\\\\b.png", "control_path": "./d/../c.png", "caption": " x "}',
        ("d/b.png", ["c.png"], None, " x "),
    ),
    "null is none": (
        '{"image_path": "a.png", "control_path": null, "caption": "x"}',
        ("a.png", [], None, "x"),
    ),
    "no JSON": ("{", "l.jsonl:2: is no row"),
    "no object": ("[1]", "l.jsonl:2: is no object"),
    "a key twice": ('{"image_path": "a.png", "image_path": "c.png"}', "l.jsonl:2: is no row"),
    "no picture": ('{"caption": "x"}', "l.jsonl:2: has no image_path"),
    "no caption": ('{"image_path": "a.png"}', "l.jsonl:2: has no caption"),
    "a blank caption": ('{"image_path": "a.png", "caption": " "}', "l.jsonl:2: has no caption"),
    "a caption that is no text": ('{"image_path": "a.png", "caption": 7}', "l.jsonl:2: has no caption"),
    "a path that is no text": ('{"image_path": 7, "caption": "x"}', "l.jsonl:2: has a image_path"),
    "control 0 twice": (
        '{"image_path": "a.png", "caption": "x", "control_path": "a.png", "control_path_0": "c.png"}',
        "l.jsonl:2: has control 0 twice",
    ),
    "missing": ('{"image_path": "e.png", "caption": "x"}', "l.jsonl:2: names e.png, which is missing"),
    "a missing control": (
        '{"image_path": "a.png", "caption": "x", "control_path": "e.png"}',
        "l.jsonl:2: names e.png, which is missing",
    ),
    "outside": ('{"image_path": "../o.png", "caption": "x"}', "l.jsonl:2: image_path ../o.png: leaves"),
}


def _files(root: Path) -> Path:
    folder = root / "set"
    (folder / "d").mkdir(parents=True)
    for name in ("a.png", "c.png", "d/b.png", "../o.png"):
        (folder / name).touch()
    return folder


def _seen(found: Any) -> Any:
    if found.faults:
        return found.faults[0]
    (pair,) = found.pairs
    return pair.target, list(pair.controls), pair.mask, pair.text


@pytest.mark.parametrize("case", ROWS)
def test_a_row(case: str, tmp_path: Path) -> None:
    line, expected = ROWS[case]
    listing = _files(tmp_path) / "l.jsonl"
    listing.write_bytes(
        b"\xef\xbb\xbf\r\n" + line.encode("utf-8")
    )  # a mark, a blank line, no newline at the end
    found = listings.count(listing, "jsonl")
    seen = _seen(found)
    assert seen.startswith(expected) if isinstance(expected, str) else seen == expected
    assert len(found.pairs) + len(found.faults) == 1


def test_an_absolute_path_inside_the_folder(tmp_path: Path) -> None:
    folder = _files(tmp_path)
    inside, outside = (folder / "d" / "b.png").as_posix(), (tmp_path / "o.png").as_posix()
    lines = [f'{{"image_path": "{path}", "caption": "x"}}\n' for path in (inside, outside)]
    (folder / "l.jsonl").write_text("".join(lines), encoding="utf-8")
    found = listings.count(folder / "l.jsonl", "jsonl")
    assert [pair.target for pair in found.pairs] == ["d/b.png"] and len(found.faults) == 1


def test_csv_rows_know_their_first_line(tmp_path: Path) -> None:
    listing = _files(tmp_path) / "l.csv"
    listing.write_text(
        'caption, image_path ,control_path_0\n"two\nlines",a.png,c.png\n\nx,d/b.png,  \na,b,c,d\n"x"y,a.png\n',
        encoding="utf-16",
    )
    found = listings.count(listing, "csv")
    assert [(p.text, p.target, p.controls, p.where) for p in found.pairs] == [
        ("two\nlines", "a.png", ("c.png",), "l.csv:2"),
        ("x", "d/b.png", (), "l.csv:5"),
    ]
    assert found.faults == (
        "l.csv:6: has 4 cells for 3 columns",
        "l.csv:7: is no CSV (',' expected after '\"')",
    )
    assert found.found == "2 rows in l.csv"


def test_rows_may_share_a_picture(tmp_path: Path) -> None:
    listing = _files(tmp_path) / "l.jsonl"
    listing.write_text(
        '{"image_path": "a.png", "caption": "x"}\n{"image_path": "a.png", "caption": "y"}\n', encoding="utf-8"
    )
    assert [pair.text for pair in listings.count(listing, "jsonl").pairs] == ["x", "y"]


def test_a_listing_that_is_none(tmp_path: Path) -> None:
    assert listings.count(tmp_path / "l.csv", "csv").unrecognised == "l.csv is not a file"


_cell = (
    st.none() | st.integers() | st.text(max_size=8) | st.sampled_from(["a.png", "../o.png", "d\\b.png", "/"])
)
_names = st.sampled_from(["image_path", "caption", "control_path", "control_path_1", "mask_path", "x"])


@settings(deadline=None, database=None)
@given(rows=st.lists(st.dictionaries(_names, _cell, max_size=5), max_size=4))
def test_every_row_is_a_pair_or_a_fault(rows: list[Any], tmp_path_factory: pytest.TempPathFactory) -> None:
    import json

    listing = _files(tmp_path_factory.mktemp("rows")) / "l.jsonl"
    listing.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    found = listings.count(listing, "jsonl")
    assert len(found.pairs) + len(found.faults) == len(rows)
