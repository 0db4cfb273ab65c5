"""Mixture of experts with explicit routes: route -> sort by expert -> grouped matmul -> combine,
dropless.

Routing is `[n k]` unsigned ids; the type's largest value means unset (`unset_id`). `read_routes` is
the only reader of a raw routing array: raw use is silently wrong, since a gather at 255 gives NaN
or the last expert and uint8 + 16 wraps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from compass_jax.config import ModelConfig, MoEConfig
from compass_jax.model.grouped import grouped_swiglu
from compass_jax.model.precision import at_least_float32
from compass_jax.model.quantize import Quantized, in_dtype, ragged_matmul
from compass_jax.model.sized import Dispatch


class RouterStats(NamedTuple):
    """Sums over the unmasked tokens of one MoE layer; divide by `tokens`."""

    probs: Float[Array, "e"]  # router probability
    load: Float[Array, "e"]  # (token, choice) pairs sent to the expert
    flips: Float[Array, ""]  # tokens whose live top-k set differs from the ids used
    unset: Float[Array, ""]  # tokens whose given row was unset, so that live routing was used
    tokens: Float[Array, ""]


def routing_dtype(experts: int) -> np.dtype:
    """uint8 up to 255 experts, else uint16: one value is kept for 'unset'."""
    return np.dtype(np.uint8 if experts <= 255 else np.uint16)


def unset_id(dtype) -> int:
    """The value that means 'no route recorded here'."""
    return int(np.iinfo(dtype).max)


def empty_routes(config: ModelConfig, *shape: int) -> UInt[Array, "..."] | None:
    """Unset routes `[*shape l k]`; None for a dense model."""
    if not config.moe_layers:
        return None
    dtype = routing_dtype(config.moe.experts)
    return jnp.full((*shape, len(config.moe_layers), config.moe.top_k), unset_id(dtype), dtype)


def read_routes(
    routing: UInt[Array, "*n k"], experts: int
) -> tuple[Int[Array, "*n k"], Bool[Array, "*n"]]:
    """The only reader of a routing array: int32 ids in [0, experts) and whether each row is set."""
    is_set = jnp.all(routing != jnp.array(unset_id(routing.dtype), routing.dtype), axis=-1)
    return jnp.clip(routing.astype(jnp.int32), 0, experts - 1), is_set


def check_routes(
    routing: np.ndarray, experts: int, top_k: int, layers: int, where: str = "routing"
) -> None:
    """Host-side check of `[... t l k]`; raises ValueError for a wrong width, a partial row, an id
    out of range or a repeated id.
    """
    if routing.shape[-2:] != (layers, top_k):
        raise ValueError(
            f"{where}: shape {routing.shape} ends in (layers, k) = {routing.shape[-2:]}, the model"
            f" has ({layers}, {top_k})"
        )
    if routing.dtype != routing_dtype(experts):
        raise ValueError(
            f"{where}: dtype {routing.dtype}, a model of {experts} experts records"
            f" {routing_dtype(experts)}"
        )
    unset = routing == unset_id(routing.dtype)
    for problem, bad in (
        ("a partly unset row", unset.any(-1) & ~unset.all(-1)),
        (f"an expert id above {experts - 1}", (~unset & (routing >= experts)).any(-1)),
        (
            "a repeated expert id",
            (np.diff(np.sort(routing.astype(np.int32), axis=-1), axis=-1) == 0).any(-1)
            & ~unset.any(-1),
        ),
    ):
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"{where}: {problem} at index {at}: {routing[at].tolist()}")


def route(
    logits: Float[Array, "n e"],
    given: UInt[Array, "n k"] | None,
    mask: Bool[Array, "n"],
    config: MoEConfig,
) -> tuple[Int[Array, "n k"], Float[Array, "n k"], RouterStats]:
    """Expert ids and gate weights (arXiv 2510.11370: the choice is replayed, the weights are live).

    g_i = exp(s_i) / sum_{j in ids} exp(s_j) with top-k normalisation, exp(s_i) / sum_{all e}
    exp(s_j) without. Weights are gathered from the dense live scores, so a replayed expert outside
    the live top-k still has a gradient.
    """
    wide = logits.astype(at_least_float32(logits.dtype))
    probs = jax.nn.softmax(wide, axis=-1)
    _, live = jax.lax.top_k(wide, config.top_k)
    ids, is_set = live, jnp.zeros(mask.shape, bool)
    if given is not None:
        replayed, is_set = read_routes(given, config.experts)
        ids = jnp.where(is_set[:, None], replayed, live)
    if config.norm_top_k:
        gates = jax.nn.softmax(jnp.take_along_axis(wide, ids, axis=-1), axis=-1)
    else:
        gates = jnp.take_along_axis(probs, ids, axis=-1)
    return ids, gates, _router_stats(probs, live, ids, is_set, mask, given is not None)


def _router_stats(probs, live, ids, is_set, mask, replaying: bool) -> RouterStats:
    count = mask.astype(probs.dtype)
    chosen = jax.nn.one_hot(ids, probs.shape[-1], dtype=probs.dtype).sum(1)
    # ids are distinct: subset means equal
    flipped = ~jnp.all(jnp.any(live[:, :, None] == ids[:, None, :], axis=2), axis=1)
    unset = ~is_set if replaying else jnp.zeros_like(is_set)
    return RouterStats(
        probs=jnp.sum(probs * count[:, None], axis=0),
        load=jnp.sum(chosen * count[:, None], axis=0),
        flips=jnp.sum(jnp.where(flipped, count, jnp.zeros_like(count))),
        unset=jnp.sum(jnp.where(unset, count, jnp.zeros_like(count))),
        tokens=jnp.sum(count),
    )


@jax.custom_vjp
def permute(
    x: Float[Array, "m d"], order: Int[Array, "m"], inverse: Int[Array, "m"]
) -> Float[Array, "m d"]:
    """x[order]; its transpose is a gather too (a scatter-add is many times slower on CPU)."""
    return jnp.take(x, order, axis=0, unique_indices=True, mode="clip")


def _permute_fwd(x, order, inverse):
    return permute(x, order, inverse), (order, inverse)


def _permute_bwd(saved, g):
    _, inverse = saved
    return jnp.take(g, inverse, axis=0, unique_indices=True, mode="clip"), None, None


permute.defvjp(_permute_fwd, _permute_bwd)


@jax.custom_vjp
def spread(
    x: Float[Array, "n d"], order: Int[Array, "m"], inverse: Int[Array, "m"]
) -> Float[Array, "m d"]:
    """Each token once for each of its m / n choices, the choices in `order`; the transpose sums a
    token's, by a gather too.
    """
    return jnp.take(x, order // (order.shape[0] // x.shape[0]), axis=0, mode="clip")


def _spread_fwd(x, order, inverse):
    return spread(x, order, inverse), (inverse, x.shape[0])


def _spread_bwd(saved, g):
    inverse, n = saved
    return (
        jnp.take(g, inverse, axis=0, unique_indices=True, mode="clip")
        .reshape(n, -1, g.shape[1])
        .sum(1),
        None,
        None,
    )


spread.defvjp(_spread_fwd, _spread_bwd)


def moe_layer(
    y: Float[Array, "b t d"],
    gate_input: Float[Array, "b t d"],
    params: dict[str, Float[Array, "..."] | Quantized],
    given: UInt[Array, "b t k"] | None,
    mask: Bool[Array, "b t"],
    config: MoEConfig,
    implementation: str,
    ffn: Callable | None = None,
    chunk: int = 0,
) -> tuple[Float[Array, "b t d"], UInt[Array, "b t k"], RouterStats]:
    """(output, the ids that were used, router statistics) of one MoE layer. `ffn`: `moe_ffn`, or
    one that shares the work (model/sharded.py).

    chunk: so many tokens go through the experts at once (0: all), and once more in the backward
    pass: what dropless dispatch may need, room for all of them on one device, is then of a chunk.
    """
    b, t, d = y.shape
    flat, mask, wide = y.reshape(b * t, d), mask.reshape(b * t), at_least_float32(y.dtype)
    logits = jnp.matmul(
        gate_input.reshape(b * t, d).astype(wide),
        params["router"].astype(wide),
        precision=jax.lax.Precision.HIGHEST,
    )
    ids, gates, stats = route(
        logits, None if given is None else given.reshape(b * t, -1), mask, config
    )
    weights = {name: in_dtype(w, y.dtype) for name, w in params.items() if name != "router"}
    run = partial(ffn or moe_ffn, weights=weights, implementation=implementation)
    out = (
        _by_chunks(run, chunk, flat, ids, gates, mask)
        if 0 < chunk < b * t
        else run(flat, ids, gates, mask)
    )
    dtype = routing_dtype(config.experts)
    record = jnp.where(mask[:, None], ids, unset_id(dtype)).astype(dtype)
    return out.reshape(b, t, d), record.reshape(b, t, -1), stats


def _by_chunks(run: Callable, chunk: int, *tokens: Array) -> Float[Array, "n d"]:
    """`run` of `[n ...]` arrays, `chunk` of their tokens after the other; the last ones are filled
    up with masked tokens.
    """
    n = tokens[0].shape[0]

    def parts(x):
        return jnp.pad(x, ((0, -n % chunk), *((0, 0),) * (x.ndim - 1))).reshape(
            -1, chunk, *x.shape[1:]
        )

    out = jax.lax.map(jax.checkpoint(lambda part: run(*part)), tuple(map(parts, tokens)))
    return out.reshape(-1, out.shape[-1])[:n]


def moe_ffn(
    x: Float[Array, "n d"],
    ids: Int[Array, "n k"],
    gates: Float[Array, "n k"],
    mask: Bool[Array, "n"],
    weights: dict[str, Float[Array, "e ..."] | Quantized],
    implementation: str,
    parts: int = 1,
) -> Float[Array, "n d"]:
    """sum_k gates_k * SwiGLU_{ids_k}(x), dropless. Masked tokens, and choices whose id is the
    number of experts, are not dispatched and give 0.

    `parts`: of how many the experts here are one, so that about that share of the choices is
    theirs; it changes sizes of blocks alone.
    """
    n, k = ids.shape
    experts = weights["down"].shape[0]
    # `experts` sorts behind every group
    flat = jnp.where(mask[:, None], ids, experts).reshape(n * k)
    dispatch = (
        sorted_dispatch(flat, experts)
        if implementation == "padded"
        else counted_dispatch(flat, experts)
    )
    grouped = partial(grouped_swiglu, parts=parts) if implementation == "padded" else ragged_swiglu
    # A masked token's gates may be NaN, and 0 * NaN is not 0.
    gates = jnp.where(mask[:, None], gates.astype(x.dtype), jnp.zeros((), x.dtype))
    return grouped(x, gates, weights, dispatch)


def sorted_dispatch(expert: Int[Array, "m"], experts: int) -> Dispatch:
    """The pairs of (token, choice) by their `expert`, those of one in their order; the id `experts`
    is none and comes behind.
    """
    order = _stable_order(expert, experts + 1)
    row = (
        jnp.zeros_like(order)
        .at[order]
        .set(jnp.arange(expert.shape[0], dtype=jnp.int32), unique_indices=True)
    )
    return Dispatch(
        order,
        row,
        jnp.sum(
            expert[:, None] == jnp.arange(experts, dtype=expert.dtype)[None, :],
            axis=0,
            dtype=jnp.int32,
        ),
    )


def counted_dispatch(expert: Int[Array, "m"], experts: int) -> Dispatch:
    """`sorted_dispatch` by counting: running counts of each expert's pairs say where each pair
    goes. On a TPU sums are cheap; a sort is slow, and takes its compiler seconds in every layer."""
    m = expert.shape[0]
    here = expert[:, None] == jnp.arange(experts + 1, dtype=expert.dtype)[None, :]
    counts = _running_counts(here)
    sizes = counts[-1]
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    row = jnp.sum(jnp.where(here, counts - 1 + starts[None, :], 0), axis=1, dtype=jnp.int32)
    order = jnp.zeros_like(row).at[row].set(jnp.arange(m, dtype=jnp.int32), unique_indices=True)
    return Dispatch(order, row, sizes[:experts])


def _running_counts(here: Bool[Array, "m e"], size: int = 256) -> Int[Array, "m e"]:
    """Cumulative sum over axis 0: within blocks a product with a triangle (0, 1 and counts up to
    256 are exact), then over the blocks.
    """
    m, e = here.shape
    blocks = jnp.pad(here, ((0, -m % size), (0, 0))).reshape(-1, size, e).astype(jnp.bfloat16)
    triangle = jnp.tril(jnp.ones((size, size), jnp.bfloat16))
    within = jnp.einsum("ij,bje->bie", triangle, blocks, preferred_element_type=jnp.float32).astype(
        jnp.int32
    )
    whole = within[:, -1]
    before = jnp.cumsum(whole, axis=0, dtype=jnp.int32) - whole
    return (within + before[:, None]).reshape(-1, e)[:m]


def _stable_order(keys: Int[Array, "m"], bound: int) -> Int[Array, "m"]:
    """argsort of keys in [0, bound), ties in their order. One sort of (key, index) in an integer is
    three times faster than a sort of pairs.
    """
    m = keys.shape[0]
    if bound * m > np.iinfo(np.int32).max:
        return jnp.argsort(keys, stable=True).astype(jnp.int32)
    return jnp.sort(keys * m + jnp.arange(m, dtype=jnp.int32)) % m


def ragged_swiglu(
    x: Float[Array, "n d"],
    gates: Float[Array, "n k"],
    weights: dict[str, Float[Array, "e ..."] | Quantized],
    dispatch: Dispatch,
) -> Float[Array, "n d"]:
    """`grouped_swiglu` by `jax.lax.ragged_dot` (TPU, GPU)."""
    order, row, sizes = dispatch
    dispatched = (jnp.arange(order.shape[0], dtype=jnp.int32) < jnp.sum(sizes, dtype=jnp.int32))[
        :, None
    ]
    zero = jnp.zeros((), x.dtype)
    rows = spread(x, order, row)
    rows = jnp.where(dispatched, rows, zero)
    if "gate_up" in weights:
        a, u = jnp.split(ragged_matmul(rows, weights["gate_up"], sizes), 2, axis=-1)
    else:
        a, u = (ragged_matmul(rows, weights[name], sizes) for name in ("gate", "up"))
    # rows behind the last group are undefined
    out = jnp.where(dispatched, ragged_matmul(jax.nn.silu(a) * u, weights["down"], sizes), zero)
    return jnp.einsum("nkd,nk->nd", permute(out, row, order).reshape(*gates.shape, -1), gates)
