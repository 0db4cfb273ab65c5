"""Training parameters -> rollout parameters in one jitted function, never through the host."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax

from compass_jax.model.params import to_decode


@partial(jax.jit, static_argnames=("dtype",))
def _convert(params: Any, dtype: str) -> Any:
    return jax.tree.map(lambda x: x.astype(dtype), to_decode(params))


def hand_over(params: Any, dtype: str) -> tuple[Any, dict[str, float]]:
    """The decoding copy (decode layout, in `dtype`) of training parameters in either layout; and its bytes and seconds."""
    started = time.perf_counter()
    decode = jax.block_until_ready(_convert(params, dtype))
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(decode))
    return decode, {"handover/bytes": float(size), "time/handover_s": time.perf_counter() - started}
