"""TensorBoard's event files: scalars as protocol buffers of class Event, in TFRecord's frames.

Fields are those of tensorboard/compat/proto/event.proto and summary.proto. The package tensorboardX
writes the same bytes, but imports torch where that is installed, which takes seconds.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping

import numpy as np

_INVALID = re.compile(r"[^-/\w.]")  # in a tag
_STARTED = 1  # SessionLog.START


def head(now: float, purge_step: int) -> bytes:
    """Returns the first records of a file. TensorBoard hides events of earlier files from
    `purge_step` on. now: seconds since 1970.
    """
    session = _bytes(7, _varint(1, _STARTED))
    return _record(now, 0, _bytes(3, b"brain.Event:2")) + _record(now, purge_step, session)


def scalars(now: float, step: int, numbers: Mapping[str, float]) -> bytes:
    """Returns the records of the numbers of `step`. now: seconds since 1970."""
    records = []
    for name, number in numbers.items():
        tag = _INVALID.sub("_", name).lstrip("/").encode()
        value = _bytes(1, tag) + b"\x15" + _float32(number)  # simple_value = 2
        records.append(_record(now, step, _bytes(5, _bytes(1, value))))
    return b"".join(records)


def _record(now: float, step: int, content: bytes) -> bytes:
    """Returns the record of an event: its length, the event, and checksums of both."""
    data = b"\x09" + struct.pack("<d", now) + (_varint(2, step) if step else b"") + content
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _float32(number: float) -> bytes:
    with np.errstate(over="ignore"):  # too large: infinite
        return np.float32(number).tobytes()


def _varint(field: int, number: int) -> bytes:
    """Encodes a field with a non-negative integer."""
    return _number(field << 3) + _number(number)


def _bytes(field: int, content: bytes) -> bytes:
    """Encodes a field with a text or a message."""
    return _number(field << 3 | 2) + _number(len(content)) + content


def _number(n: int) -> bytes:
    groups = []
    while n > 0x7F:
        groups.append(n & 0x7F | 0x80)
        n >>= 7
    return bytes([*groups, n])


def _table() -> list[int]:
    """Returns the CRC-32C (Castagnoli) of every byte."""
    table = []
    for crc in range(256):
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        table.append(crc)
    return table


_CRC = _table()


def _checksum(data: bytes) -> bytes:
    """Returns the masked CRC-32C of a TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
