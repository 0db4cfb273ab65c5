"""Tokens sent to the devices that hold their experts, and the results sent back: expert parallelism
by `ragged_all_to_all`.

A token goes once to each device that holds one of its experts, however many (as DeepEP's dispatch,
arXiv 2412.19437 section 3.2), so no more arrives than an all-gather brings, and nothing is dropped.
XLA:CPU has no ragged_all_to_all; there an all-gather stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.model.moe import counted_dispatch, permute, spread
from compass_jax.model.precision import at_least_float32

AXIS = "expert"


def through_experts(
    work: Callable[..., Float[Array, "r d"]],
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    gates: Float[Array, "n k"],
    mask: Bool[Array, "n"],
    held: int,
    native: bool,
) -> Float[Array, "n d"]:
    """The sum over devices of `work(rows, ids, gates, mask)`, each for the tokens it was sent; in
    `shard_map` over AXIS.

    held: experts of each device; `work` gets ids within its own, `held` for choices that are
    another's. native: by ragged_all_to_all.
    """
    (n, k), devices = ids.shape, jax.lax.axis_size(AXIS)
    # One pair for each device of a token: its first choice there. The others, and those of masked
    # tokens, go nowhere (device `devices`).
    there = jnp.where(mask[:, None], ids // held, devices)
    again = jnp.tril(there[:, :, None] == there[:, None, :], -1).any(2)
    dispatch = counted_dispatch(jnp.where(again, devices, there).reshape(n * k), devices)
    sizes = jax.lax.all_gather(dispatch.sizes, AXIS)  # [source, destination]
    send = partial(exchange, sizes=sizes, room=n * devices, native=native)

    wide = at_least_float32(gates.dtype)  # ids are exact in it
    choices = jnp.concatenate(
        [ids.astype(wide), jnp.where(mask[:, None], gates, 0).astype(wide)], axis=1
    )
    rows = send(spread(x, dispatch.order, dispatch.row))
    got = send(spread(choices, dispatch.order, dispatch.row))
    own = got[:, :k].astype(jnp.int32) - jax.lax.axis_index(AXIS) * held
    own = jnp.where((own >= 0) & (own < held), own, held)
    filled = jnp.arange(n * devices, dtype=jnp.int32) < jnp.sum(sizes[:, jax.lax.axis_index(AXIS)])
    out = work(rows, own, got[:, k:].astype(gates.dtype), filled)
    # zero behind what came back, where the pairs lie that went nowhere
    back = exchange(out, sizes=sizes.T, room=n * k, native=native)
    back = permute(back, dispatch.row, dispatch.order).reshape(n, k, -1)
    return jnp.sum(back, axis=1, dtype=at_least_float32(x.dtype)).astype(x.dtype)


def exchange(
    rows: Float[Array, "m d"], sizes: Int[Array, "p p"], room: int, native: bool
) -> Float[Array, "r d"]:
    """What each device of AXIS was sent, in the order of the senders, then zeros up to `room` rows.

    sizes[i, j]: rows from device i to device j. `rows` has this device's, in the order of the
    receivers; what lies behind them stays.
    """
    return _exchange(rows, sizes, room, native)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(rows, sizes, room, native):
    return (_ragged if native else _gathered)(rows, sizes, room)


def _forward(rows, sizes, room, native):
    return _exchange(rows, sizes, room, native), (sizes, rows.shape[0])


def _backward(room, native, saved, g):
    sizes, m = saved
    # each row's gradient goes back the way that the row came
    return _exchange(g, sizes.T, m, native), None


_exchange.defvjp(_forward, _backward)


def _starts(sizes: Int[Array, "p p"], axis: int) -> Int[Array, "p p"]:
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def _ragged(rows, sizes, room):
    here = jax.lax.axis_index(AXIS)
    return jax.lax.ragged_all_to_all(
        rows,
        jnp.zeros((room, *rows.shape[1:]), rows.dtype),
        input_offsets=_starts(sizes, 1)[here],
        send_sizes=sizes[here],
        output_offsets=_starts(sizes, 0)[here],
        recv_sizes=sizes[:, here],
        axis_name=AXIS,
    )


def _gathered(rows, sizes, room):
    here, everything = jax.lax.axis_index(AXIS), jax.lax.all_gather(rows, AXIS)
    at, ends = jnp.arange(room, dtype=jnp.int32), jnp.cumsum(sizes[:, here], dtype=jnp.int32)
    source = jnp.minimum(
        jnp.sum(at[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), len(ends) - 1
    )
    place = _starts(sizes, 1)[source, here] + at - _starts(sizes, 0)[source, here]
    return jnp.where(
        (at < ends[-1])[:, None],
        everything[source, jnp.minimum(place, rows.shape[0] - 1)],
        jnp.zeros((), rows.dtype),
    )
