"""Rows of recorded routes `[rows t l k]` on the device, taken and written."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, UInt

from compass_jax.model.moe import unset_id


@partial(jax.jit, static_argnames="length")
def take_routes(
    routes: UInt[Array, "b t l k"], rows: Int[Array, "m"], length: int
) -> UInt[Array, "m n l k"]:
    """Rows of `routes`, cut or padded to `length`; unset where a row is out of range or past their
    end.
    """
    unset = unset_id(routes.dtype)
    taken = jnp.take(routes[:, :length], rows, axis=0, mode="fill", fill_value=unset)
    missing = length - taken.shape[1]
    return jnp.pad(taken, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=unset)


@partial(jax.jit, donate_argnums=0)
def put_routes(
    routes: UInt[Array, "b t l k"], rows: Int[Array, "m"], new: UInt[Array, "m n l k"]
) -> UInt[Array, "b t l k"]:
    """`routes`, which are donated, with `new` in `rows`; rows out of range are dropped."""
    length = min(routes.shape[1], new.shape[1])
    return routes.at[rows, :length].set(new[:, :length], mode="drop")
