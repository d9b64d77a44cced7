"""The reader of event files: against TensorBoard's own writer where it is installed, and against damage."""

import importlib.util
import math
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gates.evidence import EvidenceError, MissingEvidenceError
from gates.qflux.events import masked_crc, read_scalars


def _conftest() -> Any:
    """What writes event files, under a name of its own: tests are no package."""
    name = "qflux_conftest"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("conftest.py"))
        assert spec and spec.loader
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


made = _conftest()
CALM = settings(deadline=None, max_examples=50)
FLOATS = st.floats(width=32, allow_nan=False)
ROWS = st.lists(
    st.tuples(st.sampled_from(["loss", "lr", "é/fps"]), st.integers(0, 2**40), FLOATS), max_size=20
)


def _read(path: Path) -> dict[str, list[tuple[int, float]]]:
    scalars, torn = read_scalars(path, "e")
    assert torn == ""
    return scalars


def _expected(rows: list[tuple[str, int, float]]) -> dict[str, list[tuple[int, float]]]:
    expected: dict[str, list[tuple[int, float]]] = {}
    for tag, step, value in rows:
        expected.setdefault(tag, []).append((step, value))
    return expected


def _write(path: Path, rows: list[tuple[str, int, float]]) -> bytes:
    data = b"".join(made.record(made.event(*row)) for row in rows)
    path.write_bytes(data)
    return data


def test_the_checksum_is_that_of_the_standard() -> None:
    crc = ((masked_crc(b"123456789") - 0xA282EAD8) & 0xFFFFFFFF) << 15
    assert (crc | crc >> 32) & 0xFFFFFFFF == 0xE3069283  # CRC-32C's check value


@CALM
@given(rows=ROWS)
def test_what_tensorboard_writes_is_read(rows: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    writer = pytest.importorskip("tensorboard.summary.writer.event_file_writer")
    from tensorboard.compat.proto import event_pb2, summary_pb2

    folder = tmp_path_factory.mktemp("events")
    out = writer.EventFileWriter(str(folder))
    for tag, step, value in rows:
        summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag=tag, simple_value=value)])
        out.add_event(event_pb2.Event(wall_time=1.0, step=step, summary=summary))
    out.close()
    (path,) = folder.iterdir()
    assert _read(path) == _expected(rows)


@CALM
@given(rows=ROWS, cut=st.integers(0, 10**6))
def test_a_torn_file_gives_its_whole_records(rows: Any, cut: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("events") / "e"
    data = _write(path, rows)
    cut = cut % (len(data) + 1)
    path.write_bytes(data[:cut])
    scalars, torn = read_scalars(path, "e")
    ends = [0]
    for row in rows:
        ends.append(ends[-1] + len(made.record(made.event(*row))))
    whole = sum(end <= cut for end in ends) - 1
    assert scalars == _expected(rows[:whole])
    assert torn == (f"e: the last record is torn ({cut - ends[whole]} bytes)" if cut > ends[whole] else "")


@CALM
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(at: int, bit: int, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("events") / "e"
    data = bytearray(_write(path, [("loss", 3, 0.5), ("loss", 4, 0.25)]))
    data[at % len(data)] ^= 1 << bit
    path.write_bytes(bytes(data))
    with pytest.raises(EvidenceError):
        read_scalars(path, "e")


@CALM
@given(data=st.binary(max_size=200))
def test_any_record_is_read_or_refused(data: bytes, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("events") / "e"
    path.write_bytes(made.record(data))
    try:
        read_scalars(path, "e")
    except EvidenceError:
        return


def test_pictures_are_passed_over_and_negative_steps_read(tmp_path: Path) -> None:
    path = tmp_path / "e"
    picture = made.field(5, made.field(1, made.field(1, b"loss") + made.field(4, b"\0" * 10_000)))
    path.write_bytes(made.record(picture) + made.record(made.event("loss", -1, math.inf)))
    assert _read(path) == {"loss": [(-1, math.inf)]}


def test_nan_is_read(tmp_path: Path) -> None:
    _write(tmp_path / "e", [("loss", 0, math.nan)])
    ((step, value),) = _read(tmp_path / "e")["loss"]
    assert step == 0 and math.isnan(value)


BAD = {
    "text": (b"no event file at all, but longer than a head", "is no event file, or damaged at byte 0"),
    "a wire type of groups": (made.record(b"\x2b\x00"), "holds a record that is no event (wire type 3)"),
    "a field beyond its end": (made.record(b"\x2a\x7f"), "a field beyond its end"),
    "an endless number": (made.record(b"\x10" + b"\xff" * 11), "more than ten bytes"),
    "a tag that is no UTF-8": (
        made.record(made.field(5, made.field(1, made.field(1, b"\xff") + b"\x15" + struct.pack("<f", 1.0)))),
        "holds a record that is no event",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_event_file_is_refused(name: str, tmp_path: Path) -> None:
    data, message = BAD[name]
    (tmp_path / "e").write_bytes(data)
    with pytest.raises(EvidenceError) as caught:
        read_scalars(tmp_path / "e", "e")
    assert message in str(caught.value)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(MissingEvidenceError):
        read_scalars(tmp_path / "e", "e")
