"""Experts on several devices, in `shard_map` over the axis "expert".

Each device gets the tokens of the devices that hold the other experts, all of them (gather) or
those that its experts are chosen for (all_to_all), computes what its own experts have to do with
them, and the sums go back. Nothing is dropped, and in float32 each token's routes are those of a
single device.

By all_to_all a token goes once to each device that holds one of its experts, however many (as
DeepEP's dispatch, arXiv 2412.19437 section 3.2), so no more arrives than an all-gather brings.
XLA:CPU has no ragged_all_to_all; there an all-gather stands in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from compass_jax.model.experts.dispatch import counted_dispatch, permute, spread
from compass_jax.model.precision import at_least_float32
from compass_jax.model.quantize import Quantized, is_quantized
from compass_jax.sharding import Placement

AXIS = "expert"


class Share(NamedTuple):
    """How one device takes part in the experts' work: `local` is what it does with its own."""

    local: Callable[..., Float[Array, "n d"]]  # (x, ids, gates, mask, weights)

    how: Literal["gather", "all_to_all", "here"]  # here: each device has the same tokens
    expert: int
    tensor: int
    native: bool = False  # a TPU's own all-to-all

    def __call__(self, x, ids, gates, mask, weights) -> Float[Array, "n d"]:
        """`local` of this device's tokens, with the experts of all devices along the
        expert axis.
        """
        held = weights["down"].shape[0]
        work = partial(self.local, weights=weights)
        if self.how == "all_to_all":
            out = through_experts(work, x, ids, gates, mask, held, self.native)
        else:
            if self.how == "gather":
                x, ids, gates, mask = (
                    jax.lax.all_gather(y, "expert", tiled=True) for y in (x, ids, gates, mask)
                )
            first = jax.lax.axis_index("expert") * held
            # `held` is no expert: not dispatched
            own = jnp.where((ids >= first) & (ids < first + held), ids - first, held)
            out = work(x, own, gates, mask)
        if self.how == "gather":
            out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
        elif self.how == "here" and self.expert > 1:
            out = jax.lax.psum(out, "expert")
        # Last: over this device's own tokens, not over all that came.
        return jax.lax.psum(out, "tensor") if self.tensor > 1 else out


def over_mesh(
    layer: Callable,
    placement: Placement,
    specs: dict[str, Any],
    y,
    gate_input,
    params,
    routes,
    mask,
):
    """`layer(y, gate_input, params, routes, mask) -> (output, ids, statistics)` of each device's
    own tokens, in `shard_map`; the statistics are of all tokens. `specs`: those of `params`, which
    say how each lies inside.
    """
    rows, tokens = placement.batch_axes(y.shape[0]), placement.token_axis(y.shape[1])
    split, here = (*rows, *([tokens] if tokens else ())), P(rows or None, tokens)

    def local(*arrays):
        out, ids, stats = layer(*arrays)
        return out, ids, jax.tree.map(lambda x: jax.lax.psum(x, split), stats) if split else stats

    weights = {name: _inside(specs[name], w) for name, w in params.items()}
    run = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(here, here, weights, None if routes is None else here, here),
        out_specs=(here, here, P()),
        check_vma=False,
    )
    return run(y, gate_input, params, routes, mask)


def _inside(spec: Any, w: Array | Quantized) -> Any:
    """The layout of a weight, or of the values and scales of one in 8 bits."""
    if is_quantized(w):
        return Quantized(spec.over_mesh(w.values), spec.over_mesh(w.scales))
    return spec.over_mesh(w)


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
