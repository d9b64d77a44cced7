import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.captions import read_caption, with_trigger
from runtime.errors import DataError

# bytes, the text as one caption, the texts line by line, a part of the warning
GOOD = [
    (b"make it red", "make it red", ("make it red",), ""),
    ("größer 猫 🎨".encode(), "größer 猫 🎨", ("größer 猫 🎨",), ""),
    ("größer".encode("utf-8-sig"), "größer", ("größer",), ""),
    ("größer".encode("utf-16"), "größer", ("größer",), ""),
    ("\ufeffgrößer\r\nkleiner".encode("utf-16-be"), "größer\nkleiner", ("größer", "kleiner"), ""),
    (b"  first\r\nsecond\rthird \r\n\r\n", "first\nsecond\nthird", ("first", "second", "third"), ""),
    (b"\n a \n\n \t\n b", "a \n\n \t\n b", ("a", "b"), ""),
    ("a\u2028b\x0bc".encode(), "a\u2028b\x0bc", ("a\u2028b\x0bc",), ""),
    (b"the dog\x92s hat", "the dog\u2019s hat", ("the dog\u2019s hat",), "byte 0x92 at 7"),
    ("größer".encode("cp1252"), "größer", ("größer",), "Windows-1252"),
]


@pytest.mark.parametrize(("data", "text", "lines", "warning"), GOOD)
def test_text_of_any_editor(
    tmp_path: Path, data: bytes, text: str, lines: tuple[str, ...], warning: str
) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    whole, split = read_caption(path), read_caption(path, lines=True)
    assert whole.texts == (text,)
    assert split.texts == lines
    assert warning in whole.warning and whole.warning == split.warning
    assert bool(warning) == bool(whole.warning)


BAD = [
    (b"", "is empty"),
    (b" \r\n\t ", "is empty"),
    (b"\xef\xbb\xbf", "is empty"),
    ("\ufeff \r\n".encode("utf-16-le"), "is empty"),
    (b"a\x81\xff", "byte 0x81 at 1 is neither UTF-8 nor Windows-1252"),
    (b"caf\xe9 \x9d", "byte 0x9d at 5 is neither"),
    (b"\xef\xbb\xbfa\x92", "byte 0x92 in position 4"),
    (b"\xff\xfea", "can't be read as text"),
    (b"\xff\xfe\x00\xd8", "can't be read as text"),
    ("red".encode("utf-16-le"), "zero bytes"),
    ("red".encode("utf-32"), "zero bytes"),
    (bytes(8), "zero bytes"),
]


@pytest.mark.parametrize("lines", [False, True])
@pytest.mark.parametrize(("data", "reason"), BAD)
def test_unusable_caption_is_named(tmp_path: Path, data: bytes, reason: str, lines: bool) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=reason) as caught:
        read_caption(path, lines)
    assert "a.txt" in caught.value.message and caught.value.remedy


def test_caption_that_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    for name in ("a.txt", "gone.txt"):
        with pytest.raises(DataError, match=name):
            read_caption(tmp_path / name)


LINES = st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\0\r\n\ufeff")), min_size=1)
ENCODINGS = {
    "utf-8": b"",
    "utf-8-sig": b"",
    "utf-16-le": codecs.BOM_UTF16_LE,
    "utf-16-be": codecs.BOM_UTF16_BE,
}


@given(lines=LINES, encoding=st.sampled_from(list(ENCODINGS)), newline=st.sampled_from(["\n", "\r\n", "\r"]))
def test_any_text_in_any_encoding_reads_back(
    lines: list[str], encoding: str, newline: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("caption") / "a.txt"
    path.write_bytes(ENCODINGS[encoding] + newline.join(lines).encode(encoding))
    if not "".join(lines).strip():
        with pytest.raises(DataError, match="is empty"):
            read_caption(path)
        return
    assert read_caption(path).texts == ("\n".join(lines).strip(),)
    assert read_caption(path, lines=True).texts == tuple(line.strip() for line in lines if line.strip())


# The letters that cp1252 has and ASCII has not; one of them followed by ASCII is never UTF-8.
WESTERN = bytes(byte for byte in range(0x80, 0x100) if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D))


@given(words=st.lists(st.sampled_from(WESTERN.decode("cp1252")), min_size=1))
def test_windows_text_reads_back_with_a_warning(
    words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = "x".join(["", *words, ""])
    path = tmp_path_factory.mktemp("caption") / "a.txt"
    path.write_bytes(text.encode("cp1252"))
    caption = read_caption(path)
    assert caption.texts == (text,) and "Windows-1252" in caption.warning


TRIGGERS = [
    ("a cat", "", "a cat"),
    ("a [trigger]", "", "a [trigger]"),
    ("a cat", "  ", "a cat"),
    ("a cat", "sks", "sks, a cat"),
    ("a cat", " sks ", "sks, a cat"),
    ("[trigger] beside [Trigger]", "sks", "sks beside sks"),
    ("a [trigger], sks", "sks", "a sks, sks"),
    ("turn it into SKS style", "sks", "turn it into SKS style"),
    ("the desks", "sks", "sks, the desks"),
    ("sks_2", "sks", "sks, sks_2"),
    ("(sks)", "sks", "(sks)"),
    ("in my style, red", "My Style", "in my style, red"),
    ("as c++ would", "c++", "as c++ would"),
    ("red", r"\1", r"\1, red"),
    ("[trigger]", r"\1\g<0>", r"\1\g<0>"),
    ("把它变红", "猫风", "猫风, 把它变红"),
]


@pytest.mark.parametrize(("text", "trigger", "expected"), TRIGGERS)
def test_trigger_word(text: str, trigger: str, expected: str) -> None:
    assert with_trigger(text, trigger) == expected
    assert with_trigger(expected, trigger) == expected
