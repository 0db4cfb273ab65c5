"""TPU kernels on a CPU. The interpreter of TPU kernels in jax supports neither views of another
shape nor slices that repeat one element, which tokamax's gmm_v2 uses; this module reads and writes
both through indices of elements."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax._src.state.indexing import Slice
from jax._src.state.types import ReshapeTransform
from jax.experimental.pallas import tpu


@contextlib.contextmanager
def on_a_tpu(monkeypatch) -> Iterator[None]:
    """Runs tokamax's TPU kernels, compiled for one core, in the interpreter."""
    from tokamax._src import config

    for name, change in (("get", _get), ("store", _store), ("swap", _swap)):
        plain = getattr(interpret_pallas_call, name)
        replacement = _for_views(plain, change)
        replacement.__wrapped__ = _for_views(plain.__wrapped__, change)  # type: ignore[attr-defined]
        monkeypatch.setattr(interpret_pallas_call, name, replacement)
    device = jax.sharding.AbstractDevice(device_kind="TPU v5", num_cores=1, platform="tpu")
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
    with (
        config.disable_multi_core_mode(True),
        jax.sharding.use_abstract_mesh(mesh),
        tpu.force_tpu_interpret_mode(),
    ):
        yield


def _for_views(plain: Callable, change: Callable) -> Callable:
    """Returns a function that calls `change` for an access through a view of another shape, and
    `plain` otherwise.
    """

    def access(token, *args, **options):
        *where, transforms = args[:5]
        if not any(map(_is_unknown, transforms)):
            return plain(token, *args, **options)
        return change(token, _key(*where), jax.tree.map(int, transforms), *args[5:])

    return access


def _key(device, core, space, buffer) -> tuple[str, int, int, int]:
    name = interpret_pallas_call.TPU_MEMORY_SPACE_NAMES[int(space)]
    core = interpret_pallas_call._local_core_id_or_zero_if_hbm(int(core), name)
    return name, int(buffer), int(device), core


def _elements(key, transforms) -> tuple[Any, np.ndarray, np.ndarray]:
    """Returns the memory, a buffer's content, and the indices of the elements accessed."""
    memory = interpret_pallas_call._get_shared_memory()
    content, (shape, _), _ = memory.get_buffer_content(key, (), None, increment_clock=False)
    at = np.arange(content.size).reshape(content.shape)[tuple(slice(n) for n in shape)]
    for one in transforms:
        at = at.reshape(one.shape) if isinstance(one, ReshapeTransform) else _indexed(at, one)
    return memory, content, at


def _is_unknown(transform) -> bool:
    slices = [x for x in getattr(transform, "indices", ()) if isinstance(x, Slice)]
    return isinstance(transform, ReshapeTransform) or any(x.stride == 0 for x in slices)


def _indexed(at: np.ndarray, indexer) -> np.ndarray:
    for axis, index in reversed(list(enumerate(indexer.indices))):
        if isinstance(index, Slice):
            index = index.start + np.arange(index.size) * index.stride
        at = np.take(at, index, axis)
    return at


def _get(token, key, transforms, *_):
    _, content, at = _elements(key, transforms)
    return token, content.ravel()[at]


def _store(token, key, transforms, value, *_):
    _swap(token, key, transforms, value, None)
    return token


def _swap(token, key, transforms, value, mask):
    memory, content, at = _elements(key, transforms)
    flat = content.ravel().copy()
    before, value = flat[at], np.asarray(value)
    flat[at] = value if mask is None else np.where(np.asarray(mask), value, before)
    memory.store_buffer_content(key, (), flat.reshape(content.shape), None, increment_clock=False)
    return token, before
