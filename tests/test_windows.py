"""What can be seen from elsewhere of Windows: names that it refuses, and signs that its consoles lack."""

import ast
import re
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESERVED = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])\s*(\..*)?", re.IGNORECASE)
FORBIDDEN = re.compile(r'[<>:"|?*\\\x00-\x1f]|[. ]$')
LONGEST = (
    150  # characters below a checkout: with the folder that it lies in, 260 is the limit of old programs
)
# Signs that are looked for or matched, and never printed.
ONLY_READ = dict.fromkeys(map(ord, "\ufeff\ufffd\ud800\udfff"))
NOT_PRINTED = {
    ("gates/reports/junit.py", "[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]"),  # a pattern
    ("runtime/commands/monitor.py", "▁▂▃▄▅▆▇█"),  # chosen by marks_for, where stdout can show them
}


def refused(paths: Iterable[str]) -> list[str]:
    """Of paths with forward slashes, those that Windows can't hold, alone or beside each other."""
    known = list(paths)
    twice = Counter(path.lower() for path in known)
    return [
        path
        for path in known
        if any(RESERVED.fullmatch(part) or FORBIDDEN.search(part) for part in PurePosixPath(path).parts)
        or twice[path.lower()] > 1
        or len(path) > LONGEST
    ]


@pytest.mark.parametrize(
    "path",
    [
        "aux",
        "a/NUL.txt",
        "con.tar.gz",
        "COM1",
        "lpt9.log",
        "a:b",
        "what?.md",
        "a/end.",
        "a /b",
        "x" * 151,
        "a\\b",
    ],
)
def test_a_name_that_windows_refuses_is_seen(path: str) -> None:
    assert refused(["a/b.txt", path]) == [path]


def test_names_that_differ_in_case_only_are_seen() -> None:
    assert refused(["a/B.txt", "a/b.txt", "c"]) == ["a/B.txt", "a/b.txt"]


def test_windows_takes_the_names_that_are_near_the_refused_ones() -> None:
    assert not refused(
        ["console.py", "auxiliary/x", "com10", "nullable.md", ".gates/verdicts/07.json", "a b"]
    )


def test_windows_takes_every_name_of_the_repository() -> None:
    line = ["git", "-c", "core.quotePath=false", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        listed = subprocess.run(line, cwd=ROOT, check=True, capture_output=True).stdout.decode().splitlines()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no checkout: git does not know this folder")
    paths = [path for path in listed if (ROOT / path).exists()]
    assert len(paths) > 100
    assert not refused(paths)
    assert not [path for path in paths if (ROOT / path).is_symlink()]


def foreign(path: Path, shown: str) -> list[str]:
    """Text in a source, docstrings too, for they are the help, that a console in cp1252 can't show."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), shown)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if (shown, node.value) in NOT_PRINTED:
                continue
            try:
                node.value.translate(ONLY_READ).encode("cp1252")
            except UnicodeEncodeError as error:
                found.append(f"{shown}:{node.lineno}: {error.object[error.start : error.end]!a}")
    return found


SOURCES = [path for top in ("gates", "runtime", "skills") for path in sorted((ROOT / top).rglob("*.py"))]


def test_every_text_survives_a_cp1252_console() -> None:
    assert len(SOURCES) > 100
    assert not [line for path in SOURCES for line in foreign(path, path.relative_to(ROOT).as_posix())]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('print("done ✓")', 1), ('print(f"{1} → {2} ✗")', 2), ('def f():\n    """Größe 3 µm."""', 0),
        ('def f():\n    """a ≤ b"""', 1), ('x = "\\u2588"', 1), ('text.startswith("\\ufeff")', 0),
    ],
)  # fmt: skip
def test_a_foreign_sign_is_seen(source: str, count: int, tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text(source, encoding="utf-8")
    assert len(foreign(path, "x.py")) == count


def test_the_exceptions_are_still_there() -> None:
    for shown, text in NOT_PRINTED:
        nodes = ast.walk(ast.parse((ROOT / shown).read_text(encoding="utf-8")))
        assert any(isinstance(node, ast.Constant) and node.value == text for node in nodes), shown


@pytest.mark.parametrize("path", sorted((ROOT / "skills").rglob("*.bat")), ids=lambda path: path.name)
def test_batch_files_are_ascii(path: Path) -> None:
    assert path.read_bytes().isascii()  # cmd reads them in the console's code page
