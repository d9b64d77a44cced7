"""Scalars of a TensorBoard event file, without TensorBoard.

A file is a row of records: length (8 bytes), its checksum (4), the data, its checksum (4), all little-endian. The data
of each is a protobuf message Event {2: step, 5: Summary {1: repeated Value {1: tag, 2: simple_value}}}.
"""

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO

from gates.evidence import EvidenceError, MissingEvidenceError

Scalars = dict[str, list[tuple[int, float]]]
"""tag to (step, value), in the order of the file"""

_SCALAR_MAX = 4096  # bytes; what is longer holds pictures or text, and is passed over unread
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_STEP, _SUMMARY, _VALUE, _TAG, _SIMPLE = 2, 5, 1, 1, 2


def read_scalars(path: Path, shown: str) -> tuple[Scalars, str]:
    """And a note on a torn last record, which is what a kill leaves ("" if none)."""
    scalars: Scalars = {}
    try:
        with path.open("rb") as handle:
            size = path.stat().st_size
            for record in _records(handle, size, shown):
                for tag, step, value in _event(record, shown):
                    scalars.setdefault(tag, []).append((step, value))
            left = size - handle.tell()
    except FileNotFoundError:
        raise MissingEvidenceError(shown, "is missing") from None
    except OSError as error:
        raise EvidenceError(shown, f"can't be read ({error.strerror})") from error
    return scalars, f"{shown}: the last record is torn ({left} bytes)" if left else ""


def _records(handle: BinaryIO, size: int, shown: str) -> Iterator[bytes]:
    """Data of each whole record that may hold scalars; the file is left where a torn one starts."""
    at = 0
    while size - at >= 12:
        head = handle.read(12)
        (length, check) = struct.unpack("<QI", head)
        if masked_crc(head[:8]) != check:
            raise EvidenceError(shown, f"is no event file, or damaged at byte {at}")
        if length > size - at - 16:
            break
        if length <= _SCALAR_MAX:
            data, (check,) = handle.read(length), struct.unpack("<I", handle.read(4))
            if masked_crc(data) != check:
                raise EvidenceError(shown, f"is damaged in the record at byte {at}")
            yield data
        at += 16 + length
        handle.seek(at)
    handle.seek(at)


def _event(record: bytes, shown: str) -> Iterator[tuple[str, int, float]]:
    try:
        step, summaries = 0, []
        for number, wire, value in _fields(record):
            if (number, wire) == (_STEP, _VARINT):
                step = _signed(value)
            elif (number, wire) == (_SUMMARY, _BYTES):
                summaries.append(value)
        for summary in summaries:
            for number, wire, value in _fields(summary):
                if (number, wire) == (_VALUE, _BYTES):
                    yield from _scalar(value, step)
    except (ValueError, IndexError) as error:  # UnicodeDecodeError is a ValueError
        raise EvidenceError(shown, f"holds a record that is no event ({error})") from error


def _scalar(message: bytes, step: int) -> Iterator[tuple[str, int, float]]:
    tag, simple = "", None
    for number, wire, value in _fields(message):
        if (number, wire) == (_TAG, _BYTES):
            tag = value.decode("utf-8")
        elif (number, wire) == (_SIMPLE, _FIXED32):
            (simple,) = struct.unpack("<f", value)
    if simple is not None:
        yield tag, step, simple


def _fields(message: bytes) -> Iterator[tuple[int, int, Any]]:
    """Field number, wire type, and a whole number or the bytes. ValueError or IndexError if it is no message."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, wire = key >> 3, key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield number, wire, value
            continue
        if wire == _BYTES:
            length, at = _varint(message, at)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if at + length > len(message):
            raise ValueError("a field beyond its end")
        yield number, wire, message[at : at + length]
        at += length


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError("a number of more than ten bytes")


def _signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def masked_crc(data: bytes) -> int:
    """CRC-32C, turned by 15 bits and shifted by a constant, as the format has it."""
    table, crc = _crc_table(), 0xFFFFFFFF
    for byte in data:
        crc = table[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    crc ^= 0xFFFFFFFF
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


@cache
def _crc_table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)
