"""Arrays of a checkpoint that are read from disk where they are indexed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from compass_jax.weights.manifest import ARRAYS, CheckpointError
from compass_jax.weights.sound import ValidCheckpoint


@dataclass(frozen=True)
class StoredArray:
    """An array on disk, or a part of it. Indexing reads nothing; `numpy.asarray` reads."""

    store: ts.TensorStore

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
        """Number of entries of the first axis that lie in one chunk, which is read as a whole."""
        chunk = self.store.chunk_layout.read_chunk.shape
        return int((chunk and chunk[0]) or self.shape[0])

    def __getitem__(self, index: Any) -> StoredArray:
        return StoredArray(self.store[index])

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self.store.read().result(), dtype)


def open_array(checkpoint: ValidCheckpoint, name: str) -> StoredArray | np.ndarray:
    """Returns an array of a checkpoint by its name in the manifest. Raises CheckpointError if it
    cannot be opened.
    """
    shape, dtype = checkpoint.manifest.leaves[name]
    if 0 in shape:  # orbax stores none
        return np.zeros(shape, dtype)
    folder = checkpoint.path / ARRAYS
    kvstore = {"driver": "ocdbt", "base": f"file://{folder}/", "path": f"{name}/"}
    try:
        return StoredArray(ts.open({"driver": "zarr", "kvstore": kvstore}, read=True).result())
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{folder}: {name} cannot be opened ({error})") from error
