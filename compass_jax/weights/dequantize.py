"""Weights in fewer bits than a float of the model, dequantised when they are read.

FP8: e4m3 values with one scale for each block of 128 x 128 (DeepSeek-V3, arXiv 2412.19437, section
3.3.2; Qwen3's FP8 folders). MXFP4: e2m1 values, two in a byte, with one power of two for each 32
(OCP Microscaling Formats 1.0; gpt-oss).
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from compass_jax.model.families.raw import WeightsError
from compass_jax.weights.safetensors_io import DTYPES, Encoding, Stored, open_file

FP8_BLOCK, MXFP4_BLOCK = 128, 32
_FP8, _SCALE, _BLOCKS, _EXPONENTS = "F8_E4M3", "_scale_inv", "_blocks", "_scales"
# Values of the types by their bits.
_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.float32)
_E2M1 = np.concatenate([_HALVES, -_HALVES]) / 2


def dequantized(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Returns the tensors under the names that they have in full precision, without scales. What
    does not belong together stays, and is later reported as unexpected.
    """
    result = dict(tensors)
    offsets: dict[Path, dict[str, int]] = {}
    for name, scales in tensors.items():
        weight = name.removesuffix(_SCALE)
        values = tensors.get(weight)
        if weight == name or values is None or not _fits_fp8(values, scales):
            continue
        if values.file not in offsets:
            offsets[values.file] = _offsets(values.file)
        fp8 = Fp8(values.file, offsets[values.file][weight], values.shape, name, scales)
        result[weight] = values._replace(dtype="bfloat16", encoding=fp8)
        del result[name]
    for name, blocks in tensors.items():
        weight = name.removesuffix(_BLOCKS)
        exponents = tensors.get(weight + _EXPONENTS)
        if weight == name or exponents is None or not _fits_mxfp4(blocks, exponents):
            continue
        experts, columns, groups, _ = blocks.shape
        shape = experts, groups * MXFP4_BLOCK, columns
        mxfp4 = Mxfp4(name, weight + _EXPONENTS, exponents)
        result[weight] = blocks._replace(shape=shape, dtype="bfloat16", encoding=mxfp4)
        del result[name], result[weight + _EXPONENTS]
    return result


def dequantized_notices(tensors: Iterable[Stored]) -> list[str]:
    """Returns a notice for each kind of quantised tensors."""
    counts = Counter(x.encoding.label for x in tensors if x.encoding is not None)
    return [
        f"{count:,} tensors in {label} are dequantised; an export has floats"
        for label, count in counts.items()
    ]


def refuse_quantized(folder: str | Path, tensors: Mapping[str, Stored]) -> None:
    """Raises WeightsError for a folder of quantised weights, for what changes them in place."""
    for line in dequantized_notices(dequantized(tensors).values()):
        raise WeightsError(
            f"{folder}: {line.partition(' are ')[0]} cannot be changed: dequantise them first, by"
            " compass import-hf and export-hf"
        )


def _fits_fp8(values: Stored, scales: Stored) -> bool:
    # At least two axes, so that the shape of a vector can be unpacked too.
    *lead, rows, columns = (0, 0, *values.shape)[-max(2, len(values.shape)) :]
    blocks = (*lead, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    is_scale = scales.dtype in DTYPES.values() and scales.shape == blocks
    return values.dtype == _FP8 and is_scale and 0 not in values.shape


def _fits_mxfp4(blocks: Stored, exponents: Stored) -> bool:
    types = {blocks.dtype, exponents.dtype}
    shape = (*exponents.shape, MXFP4_BLOCK // 2)
    return types == {"U8"} and len(shape) == 4 and blocks.shape == shape and 0 not in shape


def _offsets(file: Path) -> dict[str, int]:
    """Returns where the data of each tensor of a safetensors file begins, in bytes. The library
    has checked the header; its numpy interface does not read FP8.
    """
    with open(file, "rb") as source:
        size = int.from_bytes(source.read(8), "little")
        header = json.loads(source.read(size))
    return {
        name: 8 + size + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


@dataclass(frozen=True)
class Fp8(Encoding):
    """A matrix, or a stack of them: value * scale of its block of 128 x 128."""

    label: ClassVar[str] = "FP8 (e4m3 with a scale for each 128 x 128)"

    file: Path
    start: int
    shape: tuple[int, ...]
    name: str  # of the scales
    scales: Stored

    def open(self, handle: Any) -> Any:
        """Returns the tensor in float32; indexing it reads the values."""
        bits = np.memmap(self.file, np.uint8, "r", self.start, self.shape)
        if self.scales.file == self.file:
            return _Fp8Slice(bits, self._scales(handle))
        with open_file(self.scales.file) as other:
            return _Fp8Slice(bits, self._scales(other))

    def _scales(self, handle: Any) -> np.ndarray:
        return handle.get_tensor(self.name).astype(np.float32)


@dataclass(frozen=True)
class _Fp8Slice:
    bits: np.ndarray
    scales: np.ndarray

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        *lead, rows, columns = _positions(index, self.bits.shape)
        blocks = np.arange(self.scales.shape[-2])
        scales = self.scales[np.ix_(*lead, blocks, columns // FP8_BLOCK)]
        values = np.take(_E4M3, self.bits[index])
        # Scaled one block of rows at a time, so that the scales never take the size of the values.
        ends = np.searchsorted(rows // FP8_BLOCK, blocks, side="right")
        for block, (first, last) in enumerate(itertools.pairwise((0, *ends))):
            values[..., first:last, :] *= scales[..., block : block + 1, :]
        return values


@dataclass(frozen=True)
class Mxfp4(Encoding):
    """Matrices `[expert, input, output]` of values in blocks of 32 inputs, each with an exponent of
    2; the files have `[expert, output, block, byte]`, the first value in the low half of a byte.
    """

    label: ClassVar[str] = "MXFP4 (e2m1 with a power of two for each 32)"

    name: str  # of the bytes
    exponents_name: str
    exponents: Stored

    def open(self, handle: Any) -> Any:
        """Returns the tensor in float32; indexing it reads the values."""
        blocks = handle.get_slice(self.name)
        with open_file(self.exponents.file) as other:
            exponents = other.get_tensor(self.exponents_name)
        return _Mxfp4Slice(blocks, exponents)


@dataclass(frozen=True)
class _Mxfp4Slice:
    blocks: Any
    exponents: np.ndarray

    def __getitem__(self, index: slice | tuple[slice, ...]) -> np.ndarray:
        experts, columns, groups = self.exponents.shape
        shape = experts, groups * MXFP4_BLOCK, columns
        at = index if isinstance(index, tuple) else (index,)
        chosen, inputs, outputs = (*at, *(slice(None),) * (3 - len(at)))
        packed = self.blocks[chosen, outputs]
        values = np.empty((*packed.shape[:-1], MXFP4_BLOCK), np.float32)
        values[..., 0::2], values[..., 1::2] = _E2M1[packed & 15], _E2M1[packed >> 4]
        # A stored exponent has a bias of 127 (E8M0).
        powers = self.exponents[chosen, outputs].astype(np.int32) - 127
        wide = np.ldexp(values, powers[..., None])
        return wide.reshape(*wide.shape[:2], shape[1])[:, :, inputs].transpose(0, 2, 1)


def _positions(index: slice | tuple[slice, ...], shape: tuple[int, ...]) -> tuple[np.ndarray, ...]:
    """Returns the positions that `index` chooses on each axis."""
    parts = index if isinstance(index, tuple) else (index,)
    parts += (slice(None),) * (len(shape) - len(parts))
    return tuple(np.arange(size)[part] for part, size in zip(parts, shape, strict=True))
