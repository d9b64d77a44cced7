import pytest

from runtime.data.sources.extensions import caption_of, roles
from runtime.data.sources.rows import Columns
from runtime.errors import DataError

Roles = tuple[str | None, tuple[str, ...], str | None]

ROLES: list[tuple[Columns, str, Roles]] = [
    (Columns(), "png", ("png", (), None)),
    (Columns(), "webp jpeg jpg png", ("png", (), None)),
    (Columns(), "tif webp", ("webp", (), None)),
    (Columns(), "png target.jpg", ("target.jpg", (), None)),
    (Columns(), "target.webp target.png", ("target.png", (), None)),
    (
        Columns(),
        "control_10.png control_2.png control.png mask.png jpg",
        ("jpg", ("control.png", "control_2.png", "control_10.png"), "mask.png"),
    ),
    (Columns(), "edited_image.jpg input_image.jpg", ("edited_image.jpg", ("input_image.jpg",), None)),
    (Columns(), "a.target.png", (None, (), None)),
    (Columns(), "control.png", (None, ("control.png",), None)),
    (Columns(image="jpg"), "png jpg", ("jpg", (), None)),
    (Columns(image="after"), "png after.png target.png", ("after.png", (), None)),
    (Columns(image="AFTER.png"), "after.jpg after.png", ("after.png", (), None)),
    (Columns(image="img"), "img png", ("img", (), None)),
    (Columns(image="after"), "png", (None, (), None)),
    (Columns(controls=("png",)), "png jpg", ("jpg", ("png",), None)),
    (Columns(controls=("y", "x")), "png x.png y.png", ("png", ("y.png", "x.png"), None)),
    (Columns(controls=("x", "y")), "png x.png control.png", ("png", ("x.png",), None)),
    (Columns(mask="matte"), "png matte.png mask.png", ("png", (), "matte.png")),
    (Columns(mask="matte"), "png mask.png", ("png", (), None)),
]


@pytest.mark.parametrize(("columns", "extensions", "expected"), ROLES)
def test_roles(columns: Columns, extensions: str, expected: Roles) -> None:
    assert roles(extensions.split(), columns) == expected
    assert roles(extensions.split()[::-1], columns) == expected


OPEN = [
    (Columns(), "target.png output.jpg", "output and target could each be the target"),
    (Columns(), "png control.png source.png", "control and source could each be the control"),
    (Columns(), "png mask.png mask_image.png", "mask and mask_image could each be the mask"),
    (Columns(controls=("x", "y")), "png y.png", "control x is missing"),
]


@pytest.mark.parametrize(("columns", "extensions", "message"), OPEN)
def test_what_is_open_is_not_guessed(columns: Columns, extensions: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        roles(extensions.split(), columns)


JSON = b'{"prompt": "p", "text": "t", "caption": null, "captions": {"long": "l"}, "n": 3}'
CAPTIONS = [
    ({}, None, None, ""),
    ({"txt": b"a\r\n"}, None, "a\r\n", ""),
    ({"txt": "größer".encode("utf-16")}, None, "größer", ""),
    ({"txt": b"dog\x92s"}, None, "dog\u2019s", "Windows-1252"),
    ({"txt": b"a", "json": JSON}, None, "a", ""),
    ({"json": JSON}, None, "t", ""),
    ({"json": b"[1]"}, None, None, ""),
    ({"json": JSON}, "json", "t", ""),
    ({"json": JSON}, "json.prompt", "p", ""),
    ({"json": JSON}, "json.captions.long", "l", ""),
    ({"json": JSON}, "json.captions", None, ""),
    ({"json": JSON}, "json.captions.short.x", None, ""),
    ({"json": JSON}, "json.n", None, ""),
    ({"meta.json": JSON}, "meta.json.caption", None, ""),
    ({"meta.json": JSON, "meta": b"{}"}, "meta.json.prompt", "p", ""),
    ({"long.txt": b"l"}, "long.txt", "l", ""),
]


@pytest.mark.parametrize(("texts", "asked", "expected", "warning"), CAPTIONS)
def test_caption(texts: dict[str, bytes], asked: str | None, expected: str | None, warning: str) -> None:
    caption, warned = caption_of(texts, asked)
    assert caption == expected
    assert warning in warned and bool(warning) == bool(warned)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"txt": b"a\x81\xff"}, "txt can't be read as text"),
        ({"json": b"{"}, "json is no JSON"),
        ({"json": b"[" * 100_000}, "json is no JSON"),
        ({"json": b"\xff\xfe\xff"}, "json is no JSON"),
    ],
)
def test_unreadable_caption(texts: dict[str, bytes], message: str) -> None:
    with pytest.raises(DataError, match=message):
        caption_of(texts, None)
