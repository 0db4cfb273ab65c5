"""Experts on several devices, in `shard_map` over the axis "expert".

Each device receives tokens of the devices that hold the other experts: all of them (gather), or
those that chose its experts (all_to_all). It runs its experts on them, and the sums are sent back.
No token is dropped, and in float32 each token's routes equal those of a single device.

With all_to_all a token is sent once to each device that holds one of its experts (as in DeepEP's
dispatch, arXiv 2412.19437 section 3.2), so that a device receives at most what an all-gather
brings. XLA:CPU has no ragged_all_to_all; an all-gather replaces it there.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.devices.sharding import Placement
from compass_jax.model.experts.dispatch import counted_dispatch, permute, repeat_tokens
from compass_jax.model.precision import at_least_float32
from compass_jax.model.quantize import Quantized, is_quantized
from compass_jax.model.stacks import InStack

AXIS = "expert"


class Share(NamedTuple):
    """One device's part of the experts' work; `local` runs the device's experts."""

    local: Callable[..., Float[Array, "n d"]]  # (x, ids, gates, mask, weights)

    how: Literal["gather", "all_to_all", "here"]  # here: all devices have the same tokens
    expert: int
    tensor: int
    native: bool = False  # a TPU's own all-to-all

    def __call__(self, x, ids, gates, mask, weights) -> Float[Array, "n d"]:
        """Runs the experts of all devices along the expert axis on this device's tokens."""
        experts = weights["down"].shape[0]
        if self.tensor > 1 and "down_bias" in weights:  # the sum over tensor has it once
            bias = weights["down_bias"]
            first = jax.lax.axis_index("tensor") == 0
            weights = {**weights, "down_bias": jnp.where(first, bias, jnp.zeros_like(bias))}
        work = partial(self.local, weights=weights)
        if self.how == "all_to_all":
            out = through_experts(work, x, ids, gates, mask, experts, self.native)
        else:
            if self.how == "gather":
                x, ids, gates, mask = of_all_devices(x, ids, gates, mask)
            first = jax.lax.axis_index("expert") * experts
            # The id `experts` is not dispatched.
            local_ids = jnp.where((ids >= first) & (ids < first + experts), ids - first, experts)
            out = work(x, local_ids, gates, mask)
        if self.how == "gather":
            out = jax.lax.psum_scatter(out, "expert", scatter_dimension=0, tiled=True)
        elif self.how == "here" and self.expert > 1:
            out = jax.lax.psum(out, "expert")
        # Last, over this device's tokens: a sum before it would move all received tokens.
        return jax.lax.psum(out, "tensor") if self.tensor > 1 else out


def of_all_devices(
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    gates: Float[Array, "n k"],
    mask: Bool[Array, "n"],
) -> tuple[Float[Array, "m d"], Int[Array, "m k"], Float[Array, "m k"], Bool[Array, "m"]]:
    """Returns the arguments of all devices along AXIS; ids of masked tokens are -1, their gates 0.

    Ids, gates and mask are sent in one collective: while a token is decoded they are a few hundred
    bytes, so that latency counts.
    """
    masked = mask[:, None]
    choices = _choices(jnp.where(masked, ids, -1), jnp.where(masked, gates, 0))
    x, choices = (jax.lax.all_gather(y, AXIS, tiled=True) for y in (x, choices))
    ids, all_gates = jnp.split(choices, 2, axis=1)
    ids = ids.astype(jnp.int32)
    return x, ids, all_gates.astype(gates.dtype), ids[:, 0] >= 0


def _choices(ids: Int[Array, "n k"], gates: Float[Array, "n k"]) -> Float[Array, "n 2*k"]:
    """Returns ids and gates side by side, in a type in which both are exact."""
    wide = at_least_float32(gates.dtype)
    return jnp.concatenate([ids.astype(wide), gates.astype(wide)], axis=1)


def over_mesh(
    layer: Callable,
    placement: Placement,
    specs: dict[str, Tree],
    y,
    gate_input,
    params,
    routes,
    mask,
):
    """Calls `layer(y, gate_input, params, routes, mask) -> (output, ids, statistics)` on each
    device's tokens in `shard_map`; the statistics are summed over all tokens. `specs` declares the
    layout of `params` inside.
    """
    rows, tokens = placement.batch_axes(y.shape[0]), placement.token_axis(y.shape[1])
    split, by_token = (*rows, *([tokens] if tokens else ())), P(rows or None, tokens)

    def local(*arrays):
        out, ids, stats = layer(*arrays)
        return out, ids, jax.tree.map(lambda x: jax.lax.psum(x, split), stats) if split else stats

    weights = {name: _inside(specs[name], w) for name, w in params.items()}
    run = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(by_token, by_token, weights, None if routes is None else by_token, by_token),
        out_specs=(by_token, by_token, P()),
        check_vma=False,
    )
    return run(y, gate_input, params, routes, mask)


def _inside(spec: Tree, w: Tree) -> Tree:
    """Returns the partition of a weight, or of the values and scales of an 8-bit one; layers of a
    stack are not split.
    """
    if isinstance(w, InStack):
        part = _inside(spec, jax.eval_shape(w.part))
        layer: Tree = P()
        return InStack(jax.tree.map(lambda x: P(None, *x), part), layer)
    if is_quantized(w):
        return Quantized(spec.over_mesh(w.values), spec.over_mesh(w.scales))
    return spec.over_mesh(w)


def through_experts(
    work: Callable[..., Float[Array, "r d"]],
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    gates: Float[Array, "n k"],
    mask: Bool[Array, "n"],
    experts: int,
    native: bool,
) -> Float[Array, "n d"]:
    """Computes the sum over devices of `work(rows, ids, gates, mask)`, each on the tokens that it
    received; call it in `shard_map` over AXIS.

    Args:
        experts: experts of each device; `work` gets ids within its own, and `experts` for choices
            of other devices.
        native: whether to use ragged_all_to_all.
    """
    (n, k), devices = ids.shape, jax.lax.axis_size(AXIS)
    # One pair for each device of a token: its first choice on that device. Other choices, and
    # those of masked tokens, are not sent (device `devices`).
    device = jnp.where(mask[:, None], ids // experts, devices)
    is_repeat = jnp.tril(device[:, :, None] == device[:, None, :], -1).any(2)
    dispatch = counted_dispatch(jnp.where(is_repeat, devices, device).reshape(n * k), devices)
    sizes = jax.lax.all_gather(dispatch.sizes, AXIS)  # [source, destination]
    # At most n tokens come from each device, because a token is sent to a device once.
    send = partial(exchange, sizes=sizes, room=n * devices, native=native)

    choices = _choices(ids, jnp.where(mask[:, None], gates, 0))
    rows = send(repeat_tokens(x, dispatch.order, dispatch.row))
    got = send(repeat_tokens(choices, dispatch.order, dispatch.row))
    local_ids = got[:, :k].astype(jnp.int32) - jax.lax.axis_index(AXIS) * experts
    local_ids = jnp.where((local_ids >= 0) & (local_ids < experts), local_ids, experts)
    received = jnp.sum(sizes[:, jax.lax.axis_index(AXIS)], dtype=jnp.int32)
    filled = jnp.arange(n * devices, dtype=jnp.int32) < received
    out = work(rows, local_ids, got[:, k:].astype(gates.dtype), filled)
    # Rows after the received ones are zero: the pairs that were not sent.
    back = exchange(out, sizes=sizes.T, room=n * k, native=native)
    back = permute(back, dispatch.row, dispatch.order).reshape(n, k, -1)
    return jnp.sum(back, axis=1, dtype=at_least_float32(x.dtype)).astype(x.dtype)


def exchange(
    rows: Float[Array, "m d"], sizes: Int[Array, "p p"], room: int, native: bool
) -> Float[Array, "r d"]:
    """Returns the rows sent to each device of AXIS, in the order of the senders, then zeros up to
    `room` rows.

    sizes[i, j] is the number of rows from device i to device j. `rows` has this device's rows in
    the order of the receivers; rows after them are not sent.
    """
    return _exchange(rows, sizes, room, native)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _exchange(rows, sizes, room, native):
    return (_ragged if native else _gathered)(rows, sizes, room)


def _forward(rows, sizes, room, native):
    return _exchange(rows, sizes, room, native), (sizes, rows.shape[0])


def _backward(room, native, saved, g):
    sizes, m = saved
    # Each row's gradient returns to the row's sender.
    return _exchange(g, sizes.T, m, native), None


_exchange.defvjp(_forward, _backward)


def _starts(sizes: Int[Array, "p p"], axis: int) -> Int[Array, "p p"]:
    return jnp.cumsum(sizes, axis=axis, dtype=jnp.int32) - sizes


def _ragged(rows, sizes, room):
    device = jax.lax.axis_index(AXIS)
    return jax.lax.ragged_all_to_all(
        rows,
        jnp.zeros((room, *rows.shape[1:]), rows.dtype),
        input_offsets=_starts(sizes, 1)[device],
        send_sizes=sizes[device],
        # Places in the receivers' buffers: after the rows of the devices before this one.
        output_offsets=_starts(sizes, 0)[device],
        recv_sizes=sizes[:, device],
        axis_name=AXIS,
    )


def _gathered(rows, sizes, room):
    device, all_rows = jax.lax.axis_index(AXIS), jax.lax.all_gather(rows, AXIS)
    at, ends = jnp.arange(room, dtype=jnp.int32), jnp.cumsum(sizes[:, device], dtype=jnp.int32)
    source = jnp.minimum(
        jnp.sum(at[:, None] >= ends[None, :], axis=1, dtype=jnp.int32), len(ends) - 1
    )
    # A row has the same offset among its sender's rows for this device on both sides.
    place = _starts(sizes, 1)[source, device] + at - _starts(sizes, 0)[source, device]
    return jnp.where(
        (at < ends[-1])[:, None],
        all_rows[source, jnp.minimum(place, rows.shape[0] - 1)],
        jnp.zeros((), rows.dtype),
    )
