import itertools
import re
from pathlib import PureWindowsPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.data.sources.identifiers import LONGEST, candidates, fold, slug

SLUGS = [
    ("0001", "0001"),
    ("a.b c-d", "a.b c-d"),
    ("-dash", "-dash"),
    ("猫の写真 🎨", "猫の写真 🎨"),
    ("e\u0301", "\u00e9"),
    ("train/0001", "train_0001"),
    ("../../etc/passwd", "_.._etc_passwd"),
    ("/abs", "_abs"),
    ("C:\\x", "C__x"),
    ("a.", "a"),
    (" .a . ", "a"),
    ("a\nb\0c", "a_b_c"),
    ("a\udcff", "a_"),
    ('<>:"|?*x', "_______x"),
    ("..", ""),
    ("", ""),
    ("/", ""),
    ("nul", ""),
    ("COM1", ""),
    ("LPT³.tar", ""),
    ("con .x", ""),
    ("console", "console"),
    ("com10", "com10"),
    ("a_mask", ""),
    ("a_control_12", ""),
    ("a_control_x", "a_control_x"),
    ("_mask", "_mask"),
    ("x" * LONGEST, "x" * LONGEST),
    ("x" * (LONGEST + 1), ""),
    ("猫" * 41, ""),
]


@pytest.mark.parametrize(("name", "expected"), SLUGS)
def test_slug(name: str, expected: str) -> None:
    assert slug(name) == expected


def takes(name: str) -> bool:
    """What Microsoft's "Naming Files, Paths, and Namespaces" allows for a file's stem."""
    devices = r"(?i)(con|prn|aux|nul|conin\$|conout\$|com[0-9¹²³]|lpt[0-9¹²³])"
    return (
        bool(name)
        and not re.search(r'[<>:"/\\|?*\x00-\x1f]', name)
        and name[-1] not in " ."
        and not re.fullmatch(devices, name.split(".")[0].rstrip())
        and PureWindowsPath(name).parts == (name,)
    )


HOSTILE = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="./\\:CNUL con\0_mask1ptr*?\udc80e\u0301", max_size=20),
    st.sampled_from([name for name, _ in SLUGS]),
)


@given(HOSTILE, HOSTILE, st.integers(0, 2_000_000))
def test_every_candidate_is_a_name_that_windows_takes(name: str, archive: str, number: int) -> None:
    found = list(itertools.islice(candidates(name, archive, number), 4))
    assert all(takes(item) and len(item.encode("utf-8")) <= LONGEST + 16 for item in found)
    assert len({fold(item) for item in found[-3:]}) == 3


@given(HOSTILE)
def test_slug_is_its_own_slug(name: str) -> None:
    assert slug(slug(name)) == slug(name)


def test_candidates_in_order() -> None:
    assert list(itertools.islice(candidates("a/b", "shard-7", 12), 4)) == [
        "a_b",
        "shard-7-000012",
        "shard-7-000012-2",
        "shard-7-000012-3",
    ]
    assert next(candidates("..", "..", 3)) == "row-000003"


@pytest.mark.parametrize(("one", "other"), [("A", "a"), ("É", "e\u0301"), ("straße", "STRASSE")])
def test_names_that_are_one_file_somewhere_fold_together(one: str, other: str) -> None:
    assert fold(one) == fold(other)
