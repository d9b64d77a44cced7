import json
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from safetensors.numpy import save_file

from gates import evidence, pictures, tensors
from gates.evidence import EvidenceError, MissingEvidenceError

# No time limit: on a busy machine a first example may take long. No database: tests leave nothing behind.
_quietly = settings(deadline=None, database=None)

BAD_JSON = {
    "duplicate key": b'{"verdict": "FAIL", "verdict": "PASS"}',
    "duplicate key inside": b'[{"a": {"b": 1, "b": 1}}]',
    "NaN": b'{"a": NaN}',
    "minus infinity": b"[-Infinity]",
    "beyond a float": b'{"a": 1e999}',
    "cut short": b'{"a": ',
    "two documents": b"{} {}",
    "no UTF-8": b'{"a": "\xff"}',
    "deep": b"[" * 65 + b"]" * 65,
    "far deeper": b"[" * 100_000,
    "a number of 5,000 digits": b"9" * 5_000,
    "empty": b"",
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_json_that_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(BAD_JSON[name])
    with pytest.raises(EvidenceError, match=r"^x\.json: "):
        evidence.read_json(tmp_path / "x.json", "x.json")


@pytest.mark.parametrize(
    "text", [b"{}", b"[]", b"1e3", b'{"a": [1, 2.5, null, true, "x"]}', b"[" * 63 + b"]" * 63]
)
def test_json_that_is_read(text: bytes) -> None:
    assert evidence.parse_json(text, "x") == json.loads(text)


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b" " * 101)
    with pytest.raises(EvidenceError, match="101 bytes, more than the 100"):
        evidence.read_bytes(tmp_path / "x", "x", limit=100)
    with pytest.raises(MissingEvidenceError, match="x: is missing"):
        evidence.read_bytes(tmp_path / "y", "x")


def test_jsonl_tolerates_a_torn_end_and_nothing_else() -> None:
    records, note = evidence.parse_jsonl(b'{"a": 1}\n\n{"a": 2}\n{"a": ', "x")
    assert [record["a"] for record in records] == [1, 2] and "torn (6 bytes)" in note
    assert evidence.parse_jsonl(b'{"a": 1}\n', "x")[1] == ""
    assert evidence.parse_jsonl(b"", "x") == ([], "")
    # A last line without its newline may be whole by chance: its writer did not finish it.
    assert evidence.parse_jsonl(b'{"a": 1}', "x")[0] == []
    with pytest.raises(EvidenceError, match="x line 1"):
        evidence.parse_jsonl(b'{"a": \n{"a": 2}\n', "x")


def test_jsonl_shows_nan_to_those_who_ask() -> None:
    records, _ = evidence.parse_jsonl(b'{"loss": NaN}\n{"loss": -Infinity}\n', "x", allow_nan=True)
    assert math.isnan(records[0]["loss"]) and records[1]["loss"] == -math.inf
    with pytest.raises(EvidenceError):
        evidence.parse_jsonl(b'{"loss": NaN}\n', "x")


@_quietly
@given(st.binary(max_size=300))
def test_any_bytes_as_lines(data: bytes) -> None:
    try:
        records, _ = evidence.parse_jsonl(data, "x")
    except EvidenceError:
        return
    assert all(json.loads(json.dumps(record, allow_nan=False)) == record for record in records)


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_tensor = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "I64", "F4", 7]) | _json,
        "shape": st.lists(st.integers(-1, 4), max_size=3) | _json,
        "data_offsets": st.lists(st.integers(-1, 64), min_size=1, max_size=3) | _json,
    }
)


@_quietly
@given(st.dictionaries(st.text(max_size=4), _tensor | _json, max_size=3) | _json, st.integers(0, 64))
def test_any_header(header: Any, body: int) -> None:
    try:
        entries = tensors.parse_header(json.dumps(header).encode(), body, "x")
    except EvidenceError:
        return
    assert sum(entry.size for entry in entries.values()) == body


@_quietly
@given(st.binary(max_size=200))
def test_any_bytes_as_safetensors(data: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(data)
        try:
            tensors.tensor_facts(path, "x")
        except EvidenceError as error:
            assert error.path.startswith("x")


def _file(header: dict[str, Any], body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def _one(
    dtype: str = "F32", shape: list[int] | None = None, offsets: list[int] | None = None
) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape or [1], "data_offsets": offsets or [0, 4]}


BAD_TENSORS = {
    "cut short": _file({"a": _one()}, b"abc"),
    "more than the header says": _file({"a": _one()}, b"abcde"),
    "outside of the file": _file({"a": _one(offsets=[4, 8])}, b"abcd"),
    "overlap": _file({"a": _one(), "b": _one()}, b"abcd"),
    "a hole": _file({"a": _one(), "b": _one(offsets=[8, 12])}, b"x" * 12),
    "another size than the shape": _file({"a": _one(shape=[2])}, b"abcd"),
    "unknown dtype": _file({"a": _one(dtype="F3")}, b"abcd"),
    "negative shape": _file({"a": _one(shape=[-1, -1])}, b"abcd"),
    "a header longer than the file": struct.pack("<Q", 10_000) + b"{}",
    "a header of exabytes": struct.pack("<Q", 2**63) + b"{}",
    "no header": b"abc",
    "a key twice": struct.pack("<Q", 16) + b'{"a": 1, "a": 2}',
    "a list": struct.pack("<Q", 2) + b"[]",
}


@pytest.mark.parametrize("name", BAD_TENSORS)
def test_safetensors_that_are_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD_TENSORS[name])
    with pytest.raises(EvidenceError, match=r"^x"):
        tensors.read_header(path, "x")


def test_tensor_facts(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file(
        {"a": np.array([3.0, 4.0], np.float32), "n": np.array([np.nan, 1.0], np.float16), "i": np.arange(3)},
        path,
        {"format": "np"},
    )
    facts = tensors.tensor_facts(path, "x")
    assert facts["a"].norm == 5.0 and facts["a"].finite and facts["a"].elements == 2
    assert not facts["n"].finite and facts["n"].norm == 1.0
    assert facts["i"].dtype == "I64"


def test_bf16_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    values = np.array([1.5, -2.0, 0.0], np.float32)
    path.write_bytes(
        _file({"a": _one("BF16", [3], [0, 6])}, (values.view(np.uint32) >> 16).astype("<u2").tobytes())
    )
    entry = tensors.read_header(path, "x")["a"]
    assert tensors.read_tensor(path, entry, "x").tolist() == values.tolist()


@pytest.mark.parametrize(
    "path",
    ["", "..", "../x", "a/../../x", "/etc/passwd", "\\\\host\\x", "C:/x", "c:x", "a\\..\\..\\x", "a\0b"],
)
def test_paths_that_leave_their_root(path: str, tmp_path: Path) -> None:
    with pytest.raises(EvidenceError):
        evidence.inside(tmp_path, path)


def test_a_link_that_leaves_its_root(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("x", encoding="utf-8")
    try:
        (root / "link").symlink_to(tmp_path / "secret")
    except OSError:
        pytest.skip("no right to make links here")
    with pytest.raises(EvidenceError, match="by a link"):
        evidence.inside(root, "link")
    assert evidence.inside(root, "a/b.png") == root / "a" / "b.png"


def test_pictures(tmp_path: Path) -> None:
    Image.new("RGB", (40, 20)).save(tmp_path / "a.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(tmp_path / "b.jpg", exif=exif)
    assert pictures.picture_size(tmp_path / "a.png", "a") == (40, 20)
    assert pictures.picture_size(tmp_path / "b.jpg", "b") == (20, 40)


def test_a_bomb_is_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.new("1", (2000, 2000)).save(tmp_path / "a.png")
    monkeypatch.setattr(pictures, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(EvidenceError, match="a: has 2000x2000 pixels, too many"):
        pictures.picture_size(tmp_path / "a.png", "a")


def test_differences(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    good = {"size": 3, "sha256": evidence.file_digest(tmp_path / "a")}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"a": good}, ""),
        ({"a": {**good, "size": 4}}, "run/a has 3 bytes, recorded were 4"),
        ({"a": {**good, "sha256": "0" * 64}}, "run/a has other bytes than were recorded"),
        ({"b": good}, "run/b is missing"),
    ]
    for recorded, expected in cases:
        assert "".join(evidence.differences(tmp_path, recorded, "run")) == expected


def test_weights_fingerprint_samples_large_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import hashlib

    monkeypatch.setattr(evidence, "SAMPLED_ABOVE", 10)
    monkeypatch.setattr(evidence, "PIECE", 2)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "big").write_bytes(bytes(range(11)))
    (tmp_path / "small").write_bytes(b"x")
    digest = hashlib.sha256(bytes([0, 1, 5, 6, 9, 10])).hexdigest()
    small = hashlib.sha256(b"x").hexdigest()
    assert evidence.weights_fingerprint(tmp_path) == evidence.document_digest(
        {"small": {"size": 1, "sha256": small}, "sub/big": {"size": 11, "sha256": digest, "sampled": True}}
    )


def test_document_digest_is_of_canonical_json() -> None:
    import hashlib

    expected = hashlib.sha256('{"a":[1,"ü"],"b":null}'.encode()).hexdigest()
    assert evidence.document_digest({"b": None, "a": [1, "ü"]}) == expected
    with pytest.raises(ValueError, match="JSON"):
        evidence.document_digest({"a": math.nan})


VECTORS = Path(__file__).resolve().parents[2] / "schemas" / "vectors" / "digests.json"


def _vectors(kind: str) -> list[Any]:
    cases: list[Any] = evidence.read_json(VECTORS, VECTORS.name)[kind]
    return cases


@pytest.mark.parametrize("case", _vectors("documents"), ids=lambda case: case["canonical"][:30])
def test_document_vectors(case: dict[str, Any]) -> None:
    assert evidence.canonical_json(case["value"]).decode("utf-8") == case["canonical"]
    assert evidence.document_digest(case["value"]) == case["digest"]


@pytest.mark.parametrize("case", _vectors("datasets"), ids=lambda case: case["name"])
def test_dataset_vectors(case: dict[str, Any]) -> None:
    assert evidence.dataset_digest(case) == case["digest"]


@pytest.mark.parametrize("case", _vectors("fingerprints"), ids=lambda case: case["name"])
def test_fingerprint_vectors(case: dict[str, Any], tmp_path: Path) -> None:
    for path, content in case["files"].items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content["text"].encode("utf-8") * content["times"])
    assert evidence.weights_fingerprint(tmp_path) == case["digest"]
