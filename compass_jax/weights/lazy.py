"""Arrays whose values are read while a checkpoint is written, one chunk at a time, so that no
process holds a whole one. Several processes share the chunks.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts

from compass_jax.devices.distributed import in_every_process, process_index_and_count

Index = tuple[slice, ...]
_CHUNK_BYTES = 2**26  # of a part that a process holds


@dataclass(frozen=True)
class LazyArray:
    """An array without its values: `read` returns those of a part, of type `dtype`. `axes` are its
    axes in the order of the file that it reads, the outermost first.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[Index], np.ndarray]
    axes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return self.size * self.dtype.itemsize


def chunk_shape(x: LazyArray) -> list[int]:
    """Returns the shape of an array's chunks: parts of the file, each of one layer in a large stack
    of matrices.
    """
    chunk = list(x.shape)
    if len(chunk) >= 3 and x.nbytes > _CHUNK_BYTES:
        chunk[0] = 1
    # The file's outermost axes are split first, which leaves its contiguous axes whole.
    for axis in x.axes:
        one = math.prod(chunk) // chunk[axis] * x.dtype.itemsize
        chunk[axis] = max(1, min(chunk[axis], _CHUNK_BYTES // one))
    return chunk


class LazyHandler(ocp.type_handlers.NumpyHandler):
    """Writes lazy arrays for orbax, which reads them like numpy's.

    The owner clears `saved` before a save and sets it after orbax's call has returned.
    """

    def __init__(self) -> None:
        super().__init__()
        self.saved = threading.Event()

    async def serialize(
        self,
        values: Sequence[LazyArray],
        infos: Sequence[Any],
        args: Sequence[ocp.SaveArgs] | None = None,
    ) -> Sequence[ocp.future.Future]:
        """Returns the future of the writes, of which each process has a part."""
        writes = self._write_all(list(zip(values, infos, strict=True)))
        return [ocp.future.CommitFutureAwaitingContractedSignals(writes, name="lazy arrays")]

    async def _write_all(self, leaves: Sequence[tuple[LazyArray, Any]]) -> None:
        """Reads and writes this process's chunks. An error in one process is raised in all: the
        others would wait for orbax's commit.
        """
        refusal: Exception | None = None
        try:
            await _write(leaves)
        except Exception as error:
            refusal = error

        def finish() -> None:
            if refusal is not None:
                raise refusal

        # orbax's call runs collectives too, and all processes must run them in the same order.
        self.saved.wait()
        in_every_process(finish)


def registry(handler: LazyHandler) -> Any:
    """Returns orbax's handlers of the leaves of a checkpoint: jax arrays and lazy ones."""
    jax_handler = ocp.type_handlers.get_type_handler(jax.Array)
    return ocp.type_handlers.create_type_handler_registry(
        (jax.Array, jax_handler), (LazyArray, handler)
    )


async def _write(leaves: Sequence[tuple[LazyArray, Any]]) -> None:
    """Reads and writes this process's chunks one after the other, so that it holds one."""
    number, count = process_index_and_count()
    turn = itertools.count()
    for value, info in leaves:
        await info.await_path_creation()
        spec = ocp.type_handlers.get_json_tspec_write(
            info,
            use_ocdbt=info.is_ocdbt_checkpoint,
            global_shape=value.shape,
            local_shape=value.shape,
            dtype=value.dtype,
            process_index=number,
        )
        spec["metadata"]["chunks"] = chunk = chunk_shape(value)
        store = await ts.open(ts.Spec(spec), create=True, open=True, context=info.ts_context)
        for index in _chunks(value.shape, chunk):
            if next(turn) % count == number:
                await store[index].write(value.read(index))


def _chunks(shape: Sequence[int], chunk: Sequence[int]) -> Iterator[Index]:
    """Yields the indices of an array's chunks, in order."""
    starts = (range(0, size, step) for size, step in zip(shape, chunk, strict=True))
    for first in itertools.product(*starts):
        yield tuple(
            slice(i, min(i + step, size)) for i, step, size in zip(first, chunk, shape, strict=True)
        )
