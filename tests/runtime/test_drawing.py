"""Words that fit, in letters that Pillow's font has."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageDraw

from runtime import drawing

FACE = drawing.font(13)

SHOWN = [
    ("plain", "plain"),
    ("größer, Straße, café", "grosser, Strasse, cafe"),
    ("the dog\u2019s \u201chat\u201d \u2013 \u2026", 'the dog\'s "hat" - ...'),
    ("把圆 red 🎨", "?? red ?"),
    (" two\r\n lines\t", "two lines"),
    ("\ud800", "?"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "shown"), SHOWN)
def test_text_in_letters_of_the_font(text: str, shown: str) -> None:
    assert drawing.drawable(text) == shown


def test_the_font_has_every_letter_that_is_left() -> None:
    missing = bytes(FACE.getmask("\ue000"))
    assert not [chr(code) for code in range(33, 127) if bytes(FACE.getmask(chr(code))) == missing]
    assert bytes(FACE.getmask("ö")) == missing  # else `drawable` could keep it


def test_wrapped_at_spaces() -> None:
    width = FACE.getlength("one two three") + 1
    assert drawing.wrap("one two three four five", FACE, width, 5) == ["one two three", "four five"]
    assert drawing.wrap("one two three", FACE, width, 1) == ["one two three"]
    cut = drawing.wrap("one two three four five six seven", FACE, width, 2)
    assert cut == ["one two three", "four five six ..."]
    assert drawing.wrap("", FACE, width, 2) == []


def test_a_word_longer_than_a_line_is_broken() -> None:
    lines = drawing.wrap("x" * 40, FACE, FACE.getlength("x" * 16) + 0.1, 9)
    assert [len(line) for line in lines] == [16, 16, 8]


@given(text=st.text(), width=st.integers(40, 300), lines=st.integers(1, 4))
def test_every_line_of_any_text_fits_and_can_be_drawn(text: str, width: int, lines: int) -> None:
    found = drawing.wrap(text, FACE, width, lines)
    assert len(found) <= lines and all(FACE.getlength(line) <= width for line in found)
    whole = "".join(drawing.drawable(text).split())
    seen = "".join("".join(found).split())
    assert seen == whole or (len(found) == lines and whole.startswith(seen.removesuffix("...")))
    pen = ImageDraw.Draw(Image.new("RGB", (300, 20)))
    for line in found:
        pen.text((0, 0), line, font=FACE)


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((100, 50), (0, 16, 64, 48)),
        ((50, 100), (16, 0, 48, 64)),
        ((5000, 4), (0, 31, 64, 32)),
        ((1, 1), (0, 0, 64, 64)),
    ],
)
def test_a_picture_is_scaled_into_its_cell(size: tuple[int, int], box: tuple[int, int, int, int]) -> None:
    cell = drawing.cell(Image.new("RGB", size, (255, 0, 0)), 64, (0, 0, 0))
    assert cell.size == (64, 64) and cell.getbbox() == box
