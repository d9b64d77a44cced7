from pathlib import Path

import pytest

from gates.documents import read_yaml
from gates.evidence import EvidenceError

TRAPS = {
    "a: 1e-4": "write 1.0e-4",
    "a: 1E5": "write 1.0e+5",
    "a: 07": "is not the number that it looks like",
    "a: 0x10": "is not the number that it looks like",
    "a: 1_000": "is not the number that it looks like",
    "a: 1:30": "is not the number that it looks like",
    "a: on": "is read as true",
    "a: No": "is read as false",
    "a: 2026-11-30": "is read as a timestamp",
    "a: .nan": "is no finite number",
    "a: .inf": "is no finite number",
    "a: !!binary aGk=": "is read as a binary",
    "a: {b: [1, off]}": "a.b[1]: off is read as false",
}
PLAIN = [
    "a: 1.0e-4",
    "a: 7",
    "a: -7",
    "a: 0",
    "a: 1.5",
    "a: true",
    "a: ",
    "a: '07'",
    'a: "on"',
    "a: text",
    "a: null",
]
NONE = {
    "a: 1\na: 2": "the key a is given twice",
    "a:\n  b: 1\n  b: 1": "the key a.b is given twice",
    "a: &x 1\nb: *x": "aliases",
    "1: a": "keys are text",
    "on: a": "keys are text",
    "[1]: a": "keys are text",
    "- a": "no mapping",
    "": "no mapping",
    "a: [": "is not YAML: line",
    "a: b: c": "is not YAML: line 1",
    "a: !!python/object/apply:os.getcwd []": "is not YAML",
    "a: \x00": "is not YAML",
}


def _read(text: str, tmp_path: Path) -> tuple[object, list[str]]:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return read_yaml(path, "config.yaml")


@pytest.mark.parametrize("text", TRAPS)
def test_traps(text: str, tmp_path: Path) -> None:
    _, traps = _read(text, tmp_path)
    assert len(traps) == 1 and traps[0].startswith("line 1: a") and TRAPS[text] in traps[0]


@pytest.mark.parametrize("text", PLAIN)
def test_plain_values_are_no_traps(text: str, tmp_path: Path) -> None:
    assert _read(text, tmp_path)[1] == []


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_config(text: str, tmp_path: Path) -> None:
    with pytest.raises(EvidenceError, match=r"^config\.yaml: ") as caught:
        _read(text, tmp_path)
    assert NONE[text] in str(caught.value)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(b"a: \xff\xfe\x81")
    with pytest.raises(EvidenceError, match="is not YAML"):
        read_yaml(tmp_path / "config.yaml", "config.yaml")
