"""The header of a GGUF file (llama.cpp's format, versions 2 and 3, little-endian): the metadata,
and where each tensor is.

Every length is compared with the bytes that are left before anything is read by it, and the tensors
have to follow one another within the file.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.config.ranges import describe_value
from compass_jax.model.families.raw import UnsupportedModel, WeightsError

_MAGIC, _VERSIONS, _ALIGNMENT = b"GGUF", (2, 3), 32
_MOST_AXES = 4
_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.FLOAT64: "<f8",
    GGUFValueType.BOOL: "?",
}


class Stored(NamedTuple):
    """A tensor of the file: its shape, the slowest axis first, its type, and its bytes."""

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    start: int
    size: int


class Header(NamedTuple):
    """The metadata by key, and the tensors by name."""

    metadata: JsonObject
    tensors: dict[str, Stored]


def read_header(path: Path) -> Header:
    """Returns the header of a file. Raises WeightsError, which names the byte, for one that is
    truncated or damaged, and UnsupportedModel for another version or type.
    """
    with open(path, "rb") as file:
        if not path.stat().st_size:
            raise WeightsError(f"{path} is empty: a GGUF file is expected")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, str(path)).header()


class _Reader:
    """Reads the header from its beginning on."""

    def __init__(self, data: mmap.mmap, where: str):
        self._data, self._where, self._at = data, where, 0

    def header(self) -> Header:
        if self._take(4, "the mark GGUF") != _MAGIC:
            raise WeightsError(f"{self._where} is no GGUF file: it does not begin with GGUF")
        version = self._unsigned("I")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self._where}: version {version} of GGUF, or big-endian numbers, are not"
                f" supported (supported: version {_VERSIONS[0]} and {_VERSIONS[1]}, little-endian)"
            )
        # a tensor has at least 33 bytes in the header, a key of the metadata 13
        tensors, pairs = self._count(33, "tensors"), self._count(13, "keys")
        metadata: JsonObject = {}
        for _ in range(pairs):
            key = self._text()
            if key in metadata:
                self._damaged(f"the key {key[:80]!r} twice")
            metadata[key] = self._value(self._value_type())
        infos = [self._tensor() for _ in range(tensors)]
        return Header(metadata, self._placed(infos, metadata.get("general.alignment", _ALIGNMENT)))

    def _damaged(self, what: str) -> NoReturn:
        raise WeightsError(
            f"{self._where}: {what} at byte {self._at}: the file is truncated or damaged; download"
            " it again"
        )

    def _take(self, size: int, what: str) -> bytes:
        left = len(self._data) - self._at
        if size > left:
            self._damaged(f"{what} of {size} bytes, where {left} are left,")
        self._at += size
        return self._data[self._at - size : self._at]

    def _unsigned(self, kind: str) -> int:
        return struct.unpack(f"<{kind}", self._take(struct.calcsize(kind), "a number"))[0]

    def _count(self, least: int, what: str) -> int:
        """Returns the number of things, each of which has at least `least` bytes."""
        count = self._unsigned("Q")
        left = len(self._data) - self._at
        if count * least > left:
            self._damaged(f"{count} {what}, where {left} bytes are left,")
        return count

    def _text(self) -> str:
        try:
            return self._take(self._unsigned("Q"), "a text").decode()
        except UnicodeDecodeError:
            self._damaged("a text that is not UTF-8")

    def _value_type(self) -> GGUFValueType:
        number = self._unsigned("I")
        if number not in {*_NUMBERS, GGUFValueType.STRING, GGUFValueType.ARRAY}:
            self._damaged(f"a value of the unknown type {number}")
        return GGUFValueType(number)

    def _value(self, kind: GGUFValueType) -> Json:
        if kind == GGUFValueType.STRING:
            return self._text()
        if kind != GGUFValueType.ARRAY:
            return self._numbers(kind, 1)[0]
        inner = self._value_type()
        if inner == GGUFValueType.ARRAY:
            raise UnsupportedModel(f"{self._where}: lists of lists of metadata are not supported")
        if inner == GGUFValueType.STRING:
            return [self._text() for _ in range(self._count(8, "texts"))]
        size = np.dtype(_NUMBERS[inner]).itemsize
        return self._numbers(inner, self._count(size, "numbers"))

    def _numbers(self, kind: GGUFValueType, count: int) -> list:
        dtype = np.dtype(_NUMBERS[kind])
        return np.frombuffer(self._take(count * dtype.itemsize, "a number"), dtype).tolist()

    def _tensor(self) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        """Returns name, shape, type and offset of the next tensor."""
        name, axes = self._text(), self._unsigned("I")
        if not 1 <= axes <= _MOST_AXES:
            self._damaged(f"a tensor {name[:80]!r} of {axes} axes")
        shape = tuple(self._unsigned("Q") for _ in range(axes))[::-1]  # the fastest is first
        number, offset = self._unsigned("I"), self._unsigned("Q")
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise UnsupportedModel(
                f"{self._where}: the tensor {name[:80]!r} has a type, {number}, that the installed"
                " package gguf does not know"
            ) from None
        return name, shape, kind, offset

    def _placed(
        self, infos: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int]], alignment: Json
    ) -> dict[str, Stored]:
        """Returns the tensors with their places; each has to begin where those before it end."""
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise WeightsError(
                f"{self._where}: general.alignment = {describe_value(alignment)}, a power of two is"
                " expected"
            )
        tensors: dict[str, Stored] = {}
        start = end = -(-self._at // alignment) * alignment
        for name, shape, kind, offset in infos:
            block, size = GGML_QUANT_SIZES[kind]
            if 0 in shape or shape[-1] % block:
                self._damaged(f"a tensor {name[:80]!r} of shape {shape} and type {kind.name}")
            self._at = start + offset
            count = int(np.prod([int(n) for n in shape], dtype=object)) // block * size
            if name in tensors or offset % alignment or self._at < end:
                self._damaged(f"the tensor {name[:80]!r} again, or over another one,")
            self._at, end = min(self._at, len(self._data)), self._at + count
            if end > len(self._data):
                self._damaged(f"a tensor {name[:80]!r} of {count} bytes")
            tensors[name] = Stored(shape, kind, start + offset, count)
        return tensors
