from pathlib import Path

import pytest

from runtime.data.captions import read_caption
from runtime.errors import DataError

GOOD = [
    (b"make it red", "make it red", ""),
    ("größer 猫 🎨".encode(), "größer 猫 🎨", ""),
    ("größer".encode("utf-8-sig"), "größer", ""),
    ("größer".encode("utf-16"), "größer", ""),
    ("\ufeffgrößer".encode("utf-16-be"), "größer", ""),
    (b"  first\r\nsecond\rthird \r\n\r\n", "first\nsecond\nthird", ""),
    (b"the dog\x92s hat", "the dog\u2019s hat", "byte 0x92 at 7"),
    ("größer".encode("cp1252"), "größer", "Windows-1252"),
]


@pytest.mark.parametrize(("data", "text", "warning"), GOOD)
def test_text_of_any_editor(tmp_path: Path, data: bytes, text: str, warning: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    caption = read_caption(path)
    assert caption.text == text
    assert warning in caption.warning
    assert bool(warning) == bool(caption.warning)


BAD = [
    (b"", "is empty"),
    (b" \r\n\t ", "is empty"),
    (b"\xef\xbb\xbf", "is empty"),
    (b"a\x81\xff", "can't be read as text"),
    (b"\xff\xfea", "can't be read as text"),
    ("red".encode("utf-16-le"), "zero bytes"),
    (bytes(8), "zero bytes"),
]


@pytest.mark.parametrize(("data", "reason"), BAD)
def test_unusable_caption_is_named(tmp_path: Path, data: bytes, reason: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    with pytest.raises(DataError, match=reason) as caught:
        read_caption(path)
    assert "a.txt" in caught.value.message and caught.value.remedy
