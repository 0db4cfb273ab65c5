"""Reads and writes rows of recorded routes `[rows t l k]` on the device."""

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
    """Returns rows of `routes`, cut or padded to `length`; unset for rows out of range and tokens
    past the end.
    """
    unset = unset_id(routes.dtype)
    out = jnp.take(routes[:, :length], rows, axis=0, mode="fill", fill_value=unset)
    missing = length - out.shape[1]
    return jnp.pad(out, ((0, 0), (0, missing), (0, 0), (0, 0)), constant_values=unset)


@partial(jax.jit, donate_argnums=0)
def put_routes(
    routes: UInt[Array, "b t l k"], rows: Int[Array, "m"], new: UInt[Array, "m n l k"]
) -> UInt[Array, "b t l k"]:
    """Writes `new` to `rows` of `routes`, which are donated; rows out of range are dropped."""
    length = min(routes.shape[1], new.shape[1])
    return routes.at[rows, :length].set(new[:, :length], mode="drop")


@jax.jit
def take_tokens(
    routes: UInt[Array, "b t l k"], rows: Int[Array, "m n"], positions: Int[Array, "m n"]
) -> UInt[Array, "m n l k"]:
    """Returns the routes of tokens by row and position; unset for those out of range."""
    unset = unset_id(routes.dtype)
    return routes.at[rows, positions].get(mode="fill", fill_value=unset)


@partial(jax.jit, donate_argnums=0)
def put_tokens(
    routes: UInt[Array, "b t l k"],
    rows: Int[Array, "m n"],
    positions: Int[Array, "m n"],
    new: UInt[Array, "m n l k"],
) -> UInt[Array, "b t l k"]:
    """Writes `new` to tokens of `routes`, which are donated; those out of range are dropped."""
    return routes.at[rows, positions].set(new, mode="drop")
