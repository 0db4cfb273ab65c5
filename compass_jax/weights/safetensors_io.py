"""Folders of safetensors files, with the library `safetensors`.

Headers are checked before a tensor is read, tensors are read one at a time from a memory map, and
shards are written one at a time.
"""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from compass_jax.model.families.raw import WeightsError
from compass_jax.weights.hf_config import read_json, refuse_adapter

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80}  # exponent bits of infinities and NaN
MOST_BYTES = 4_000_000_000  # of a shard
_BLOCK = 2**18  # entries per check, few enough for the processor's cache
_ROWS = 4096  # rows that are compared at once
_FILE_NAME = re.compile(r"[\w.+-]{1,200}\.safetensors")
_CONSOLIDATED = "consolidated"  # begins the names of Mistral's own files of the same weights
_OS_ERROR = re.compile(r"os error (\d+)")


def widest(kinds: Set[str]) -> str:
    """Returns the float type that holds all numbers of these types."""
    if len(kinds) == 1:
        return next(iter(kinds))
    # float32 holds every float16 and every bfloat16, which do not hold each other.
    return "float64" if "float64" in kinds else "float32"


class Encoding(Protocol):
    """How a tensor's values are stored, if not as its floats."""

    label: ClassVar[str]

    def open(self, handle: Any) -> Any:
        """Returns the tensor's values in its open file; indexing them reads the file."""


class Stored(NamedTuple):
    """The location of a tensor on disk, with the content of its header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str  # a numpy name, or the format's code for a type that is not a float
    # for a part of a tensor: the tensor's name, the index on its first axis (None: the full tensor
    # under another name), the first row within that entry, and its columns (first, step)
    tensor: str | None = None
    entry: int | None = None
    row: int = 0
    columns: tuple[int, int] = (0, 1)
    encoding: Encoding | None = None

    def open(self, handle: Any, name: str) -> Any:
        """Returns the tensor called `name` in its open file; indexing it reads the file."""
        if self.encoding is not None:
            return self.encoding.open(handle)
        return handle.get_slice(self.tensor or name)

    def read(self, handle: Any, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns the entries `index` of this tensor, called `name`, from its open file."""
        piece = self.open(handle, name)
        if self.entry is None:
            return piece[index]
        rows, *other_axes = index
        rows = slice(rows.start + self.row, rows.stop + self.row)
        *axes, last = rows, *other_axes
        first, step = self.columns
        last = slice(last.start * step, last.stop * step)
        entry = slice(self.entry, self.entry + 1)
        return piece[(entry, *axes, last)][0][..., first::step]


def read_headers(folder: str | Path) -> dict[str, Stored]:
    """Returns name -> Stored of every tensor of a folder with `model.safetensors`, or shards and
    their index.

    Raises WeightsError for a missing, truncated or damaged shard, and if index and shards disagree.
    """
    tensors, problems = look(folder)
    if problems:
        raise WeightsError(problems[0])
    return tensors


def look(folder: str | Path) -> tuple[dict[str, Stored], list[str]]:
    """Returns the tensors whose headers can be read, and all faults of files, headers and index.

    Raises WeightsError for a folder without weights or with an invalid index.
    """
    folder = Path(folder)
    files, index = _files(folder)
    tensors: dict[str, Stored] = {}
    problems = []
    unread: set[str] = set()  # files whose tensors are unknown
    for file in files:
        if not file.is_file():
            unread.add(file.name)
            lost = [name for name, where in index.items() if where == file.name]
            problems.append(
                f"shard {file} is missing: {INDEX} lists {len(lost)} tensors in it, {lost[0]}"
                " first; download it again"
            )
            continue
        try:
            with open_file(file) as handle:
                for name in handle.keys():  # noqa: SIM118 (not a dict)
                    piece = handle.get_slice(name)
                    code = piece.get_dtype()
                    stored = Stored(file, tuple(piece.get_shape()), DTYPES.get(code, code))
                    if (first := tensors.setdefault(name, stored)) is not stored:
                        problems.append(
                            f"tensor {name} is in {first.file.name} and in {file.name} of {folder}"
                        )
        except WeightsError as error:
            unread.add(file.name)
            problems.append(str(error))
    for name, place in index.items():
        if place not in unread and (name not in tensors or tensors[name].file.name != place):
            problems.append(
                f"{folder / INDEX} places tensor {name} in {place}, which does not hold it"
            )
    return tensors, problems


def _files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """Returns the weight files, and the index: tensor -> name of its file. Raises WeightsError if
    the folder contains other weights than Mistral's own copy.
    """
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            refuse_adapter(folder)
            raise WeightsError(
                f"{folder} holds neither {SINGLE} nor {INDEX}: weights are read from safetensors"
                " files alone"
            )
        _refuse_others(folder, {SINGLE}, f"there is no {INDEX}")
        return [folder / SINGLE], {}
    index = read_json(folder / INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(
        isinstance(name, str) and _FILE_NAME.fullmatch(name) for name in index.values()
    ):
        raise WeightsError(
            f"{folder / INDEX}: weight_map must give a file of this folder, *.safetensors, for each"
            " tensor"
        )
    _refuse_others(folder, set(index.values()), f"{INDEX} does not name it")
    return [folder / name for name in sorted(set(index.values()))], index


def _refuse_others(folder: Path, named: set[str], why: str) -> None:
    names = {path.name for path in folder.glob("*.safetensors")} - named
    if extras := sorted(name for name in names if not name.startswith(_CONSOLIDATED)):
        more = f" and {len(extras) - 1} more" if len(extras) > 1 else ""
        raise WeightsError(
            f"{folder} holds {extras[0]}{more} beside the weights, and {why}: remove what does not"
            " belong to the model"
        )


@contextmanager
def open_file(file: Path) -> Iterator[Any]:
    """Opens a safetensors file for numpy. Raises WeightsError if it is truncated or damaged."""
    try:
        handle = safe_open(file, framework="np")
    except SafetensorError as error:
        raise WeightsError(
            f"{file} ({file.stat().st_size:,} bytes) is truncated or damaged: {str(error)[:300]};"
            " download it again"
        ) from error
    except OSError as error:
        raise WeightsError(f"{file} cannot be read: {error.strerror or error}") from error
    with handle:
        yield handle


def finite(tensor: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """Returns `tensor` as `dtype`. Raises WeightsError, beginning with `where`, if an entry is not
    finite or overflows `dtype`.
    """
    with np.errstate(all="ignore"):
        cast = tensor.astype(dtype, copy=False)
    if bad := not_finite(cast):
        wrong = not_finite(tensor)
        kind = f"{wrong:,} are NaN or infinite" if wrong else f"{bad:,} are too large for {dtype}"
        raise WeightsError(
            f"{where}: of {cast.size:,} weights that were read {kind}; download it again, or take"
            " another checkpoint"
        )
    return cast


def not_finite(tensor: np.ndarray) -> int:
    """Returns the number of entries of a contiguous array that are NaN or infinite."""
    flat, count = tensor.reshape(-1), 0
    exponent = _EXPONENTS.get(tensor.dtype.name)
    if exponent is not None:  # numpy's isfinite takes ten times as long for these types
        flat = flat.view(np.uint16)
    for start in range(0, flat.size, _BLOCK):
        part = flat[start : start + _BLOCK]
        if exponent is None:
            is_finite = np.isfinite(part)
            count += 0 if is_finite.all() else int(np.count_nonzero(~is_finite))
        elif np.bitwise_and(part, exponent).max() == exponent:
            count += int(np.count_nonzero((part & exponent) == exponent))
    return count


def same_tensor(a: tuple[str, Stored], b: tuple[str, Stored]) -> bool:
    """Returns whether two stored tensors are bitwise equal, comparing a few rows at a time."""
    (name_a, at_a), (name_b, at_b) = a, b
    if at_a[1:] != at_b[1:] or not at_a.shape or at_a.dtype not in DTYPES.values():
        return False
    if at_a.encoding is not None:
        return False
    with open_file(at_a.file) as one, open_file(at_b.file) as two:
        left, right = one.get_slice(name_a), two.get_slice(name_b)
        count = at_a.shape[0]
        parts = [slice(i, min(i + _ROWS, count)) for i in range(0, count, _ROWS)]
        return all(left[part].tobytes() == right[part].tobytes() for part in parts)


def shard_files(sizes: dict[str, int], shard_bytes: int = MOST_BYTES) -> dict[str, list[str]]:
    """Returns file -> names of its tensors, in order, in shards of at most `shard_bytes`; a larger
    tensor gets a separate shard.
    """
    shards: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not shards or used + size > shard_bytes:
            shards.append([])
            used = 0
        shards[-1].append(name)
        used += size
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    count = f"{len(shards):05d}"
    return {f"model-{i:05d}-of-{count}.safetensors": shard for i, shard in enumerate(shards, 1)}


def write_shards(
    folder: Path, files: Mapping[str, Sequence[str]], tensors: Iterator[np.ndarray]
) -> None:
    """Writes safetensors files, each assembled in memory, and an index for several files.

    Args:
        folder: the folder to write to.
        files: file name -> names of its tensors.
        tensors: all tensors, in the order of `files`.

    Raises OSError if the disk is full or not writable.
    """
    write_index(folder, files, write_files(folder, files, tensors))


def write_files(
    folder: Path, files: Mapping[str, Sequence[str]], tensors: Iterator[np.ndarray]
) -> int:
    """Writes the files of `write_shards` without their index; returns the bytes of the tensors."""
    return sum(_write_file(folder / file, names, tensors) for file, names in files.items())


def _write_file(file: Path, names: Sequence[str], tensors: Iterator[np.ndarray]) -> int:
    shard = {name: np.ascontiguousarray(next(tensors)) for name in names}
    try:
        save_file(shard, file, {"format": "pt"})
    except SafetensorError as error:
        # The library gives the operating system's error only as text.
        code = int(match[1]) if (match := _OS_ERROR.search(str(error))) else errno.EIO
        raise OSError(code, os.strerror(code)) from error
    with open(file, "rb") as shard_file:
        flush(shard_file)
    return sum(tensor.nbytes for tensor in shard.values())


def write_index(folder: Path, files: Mapping[str, Sequence[str]], total: int) -> None:
    """Writes the index of several files, whose tensors have `total` bytes."""
    if list(files) != [SINGLE]:
        index = {name: file for file, names in files.items() for name in names}
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": index})


def flush(out: BinaryIO) -> None:
    """Forces a file to disk, which also reveals a delayed 'no space left'."""
    out.flush()
    os.fsync(out.fileno())


def write_json(file: Path, value: Any) -> None:
    """Writes indented JSON and forces it to disk."""
    with open(file, "wb") as out:
        out.write((json.dumps(value, indent=2) + "\n").encode())
        flush(out)
