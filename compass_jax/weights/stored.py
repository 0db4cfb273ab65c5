"""Arrays of a checkpoint that stay on disk until numpy asks for their values."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorstore as ts

from compass_jax.weights.disk import cause
from compass_jax.weights.manifest import ARRAYS, CheckpointError
from compass_jax.weights.sound import ValidCheckpoint


@dataclass(frozen=True)
class StoredArray:
    """An array on disk, or a part of it. Indexing reads nothing; `numpy.asarray` reads, and raises
    CheckpointError where that fails.
    """

    store: ts.TensorStore
    where: str  # checkpoint and array, for messages

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        return tuple(self.store.shape)

    @property
    def dtype(self) -> np.dtype:
        """The type of the entries."""
        return self.store.dtype.numpy_dtype

    @property
    def entries_read(self) -> int:
        """Number of entries of the first axis in one chunk, which is read as a whole."""
        chunk = self.store.chunk_layout.read_chunk.shape
        return int((chunk and chunk[0]) or self.shape[0])

    def __getitem__(self, index: Any) -> StoredArray:
        return replace(self, store=self.store[index])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        try:
            return np.asarray(self.store.read().result(), dtype)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self.where} cannot be read ({cause(error)})") from error


def open_array(
    checkpoint: ValidCheckpoint, name: str, dtype: np.dtype | None = None
) -> StoredArray | np.ndarray:
    """Returns an array of a checkpoint by its name in the manifest, whose values are converted to
    `dtype` when they are read (None: not converted). Raises CheckpointError if it cannot be opened.
    """
    where = f"{checkpoint.path}: array {name}"
    if name not in checkpoint.manifest.leaves:
        raise CheckpointError(f"{where} is missing, which the model needs")
    shape, stored_dtype = checkpoint.manifest.leaves[name]
    if 0 in shape:  # orbax stores none
        return np.zeros(shape, dtype or stored_dtype)
    base = {"driver": "file", "path": f"{checkpoint.path / ARRAYS}/"}
    spec = {
        "driver": "zarr",
        "kvstore": {"driver": "ocdbt", "base": base, "path": f"{name}/"},
        # a checkpoint that is removed meanwhile is an error, not an array of zeros
        "fill_missing_data_reads": False,
        "recheck_cached_metadata": False,
        "recheck_cached_data": False,
    }
    try:
        store = ts.open(spec, read=True).result()
        return StoredArray(store if dtype is None else ts.cast(store, ts.dtype(dtype)), where)
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{where} cannot be opened ({cause(error)})") from error
