import pytest

from gates.datasets.wording import decode, prompts, same
from gates.evidence import EvidenceError

TEXTS = {
    "UTF-8": ("sch\u00f6n\n".encode(), "sch\u00f6n\n"),
    "with a mark": (b"\xef\xbb\xbfblue", "blue"),
    "CRLF and CR": (b"a\r\nb\rc", "a\nb\nc"),
    "UTF-16 of either order": ("\u7532".encode("utf-16"), "\u7532"),
    "UTF-16 BE": (b"\xfe\xff\x00a", "a"),
}
BROKEN = {
    "cp1252": ("sch\u00f6n".encode("cp1252"), r"is not UTF-8 \(byte 3\)"),
    "half of UTF-16": (b"\xff\xfea\x00b", r"is not UTF-16"),
}
# text, trigger word, lines, prompts
PROMPTS = [
    (" make it blue \n", "", False, ["make it blue"]),
    ("one\n\n two \n", "", True, ["one", "two"]),
    ("one\ntwo", "", False, ["one\ntwo"]),
    (" \n", "", True, []),
    ("", "zxc", False, []),
    ("a cat", "zxc", False, ["zxc, a cat"]),
    ("a ZXC cat", "zxc", False, ["a ZXC cat"]),
    ("a zxcs cat", "zxc", False, ["zxc, a zxcs cat"]),
    ("a zxc", " zxc ", False, ["a zxc"]),
    ("[trigger] and [Trigger]", "a\\1", False, ["a\\1 and a\\1"]),
    ("[trigger] cat", "", False, ["[trigger] cat"]),
    ("a cat\nzxc dog\n[trigger]", "zxc", True, ["zxc, a cat", "zxc dog", "zxc"]),
    ("a (zxc+) cat", "(zxc+)", False, ["a (zxc+) cat"]),
]


@pytest.mark.parametrize("case", TEXTS)
def test_text(case: str) -> None:
    assert decode(TEXTS[case][0], "x.txt") == TEXTS[case][1]


@pytest.mark.parametrize("case", BROKEN)
def test_no_text(case: str) -> None:
    with pytest.raises(EvidenceError, match=f"x.txt: {BROKEN[case][1]}"):
        decode(BROKEN[case][0], "x.txt")


@pytest.mark.parametrize(("text", "word", "lines", "expected"), PROMPTS)
def test_prompts(text: str, word: str, lines: bool, expected: list[str]) -> None:
    assert prompts(text, {"caption_lines": lines, "trigger_word": word}) == expected


def test_white_space_is_no_difference() -> None:
    assert same("a\n b", " a b") and not same("a b", "ab")
