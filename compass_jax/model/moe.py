"""Mixture of experts with explicit routes: route -> sort by expert -> grouped matmul -> combine,
dropless.

Routes are `[n k]` unsigned ids; the dtype's largest value means unset (`unset_id`). Read routes
only with `read_routes`. Raw use is silently wrong: a gather at 255 gives NaN or the last expert,
and uint8 + 16 wraps.
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
from compass_jax.model.experts.build import Experts
from compass_jax.model.experts.parallel import over_mesh
from compass_jax.model.precision import at_least_float32
from compass_jax.model.quantize import Quantized, in_dtype
from compass_jax.model.routers.inputs import RouterInputs
from compass_jax.model.stacks import InStack


class RouterStats(NamedTuple):
    """Sums over the unmasked tokens of one MoE layer; divide by `tokens`."""

    probs: Float[Array, "e"]  # router probability
    load: Float[Array, "e"]  # (token, choice) pairs sent to the expert
    flips: Float[Array, ""]  # tokens whose live top-k set differs from the ids used
    unset: Float[Array, ""]  # tokens whose row was unset, so that they were routed live
    tokens: Float[Array, ""]


def routing_dtype(experts: int) -> np.dtype:
    """Returns uint8 up to 255 experts, else uint16: one value is reserved for 'unset'."""
    return np.dtype(np.uint8 if experts <= 255 else np.uint16)


def unset_id(dtype) -> int:
    """Returns the id that means 'no route recorded'."""
    return int(np.iinfo(dtype).max)


def empty_routes(config: ModelConfig, *shape: int) -> UInt[Array, "..."] | None:
    """Returns unset routes `[*shape l k]`; None for a dense model."""
    if not config.moe_layers:
        return None
    dtype = routing_dtype(config.mixture.experts)
    return jnp.full((*shape, len(config.moe_layers), config.mixture.top_k), unset_id(dtype), dtype)


def read_routes(
    routes: UInt[Array, "*n k"], experts: int
) -> tuple[Int[Array, "*n k"], Bool[Array, "*n"]]:
    """Returns int32 ids in [0, experts) and whether each row is set. The only reader of routes."""
    is_set = jnp.all(routes != jnp.array(unset_id(routes.dtype), routes.dtype), axis=-1)
    return jnp.clip(routes.astype(jnp.int32), 0, experts - 1), is_set


def check_routes(
    routes: np.ndarray, experts: int, top_k: int, layers: int, where: str = "routes"
) -> None:
    """Checks `[... t l k]` on the host. Raises ValueError for a wrong width, a partial row, an id
    out of range or a repeated id.
    """
    if routes.shape[-2:] != (layers, top_k):
        raise ValueError(
            f"{where}: shape {routes.shape} ends in (layers, k) = {routes.shape[-2:]}, the model"
            f" has ({layers}, {top_k})"
        )
    if routes.dtype != routing_dtype(experts):
        raise ValueError(
            f"{where}: dtype {routes.dtype}, a model of {experts} experts records"
            f" {routing_dtype(experts)}"
        )
    unset = routes == unset_id(routes.dtype)
    for problem, bad in (
        ("a partly unset row", unset.any(-1) & ~unset.all(-1)),
        (f"an expert id above {experts - 1}", (~unset & (routes >= experts)).any(-1)),
        (
            "a repeated expert id",
            (np.diff(np.sort(routes.astype(np.int32), axis=-1), axis=-1) == 0).any(-1)
            & ~unset.any(-1),
        ),
    ):
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise ValueError(f"{where}: {problem} at index {at}: {routes[at].tolist()}")


def route(
    logits: Float[Array, "n e"],
    routes: UInt[Array, "n k"] | None,
    mask: Bool[Array, "n"],
    config: MoEConfig,
    bias: Float[Array, "e"] | None = None,
) -> tuple[Int[Array, "n k"], Float[Array, "n k"], RouterStats]:
    """Computes expert ids and gate weights by `config.router` (arXiv 2510.11370: the choice is
    replayed, the weights are live). `bias` is that of the choice.
    """
    wide, router = logits.astype(at_least_float32(logits.dtype)), config.router
    inputs = RouterInputs(wide, bias, config.top_k, config.norm_top_k)
    probs = router.probs(inputs)
    _, live = jax.lax.top_k(router.choice(inputs), config.top_k)
    ids, is_set = live, jnp.zeros(mask.shape, bool)
    if routes is not None:
        replayed, is_set = read_routes(routes, config.experts)
        ids = jnp.where(is_set[:, None], replayed, live)
    # Gates come from the dense live scores. Scores that are zero outside the live top-k would give
    # a replayed expert no gradient.
    gates = router.gates(inputs, ids)
    return ids, gates, _router_stats(probs, live, ids, is_set, mask, routes is not None)


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


def moe_layer(
    y: Float[Array, "b t d"],
    gate_input: Float[Array, "b t d"],
    params: dict[str, Float[Array, "..."] | Quantized | InStack],
    routes: UInt[Array, "b t k"] | None,
    mask: Bool[Array, "b t"],
    config: MoEConfig,
    experts: Experts,
) -> tuple[Float[Array, "b t d"], UInt[Array, "b t k"], RouterStats]:
    """Runs one MoE layer; returns its output, the routes used, and router statistics over all
    tokens.
    """
    layer = partial(_layer, config=config, work=experts.work(y.shape), chunk=experts.chunk)
    if experts.placement is None or experts.specs is None:
        return layer(y, gate_input, params, routes, mask)
    return over_mesh(layer, experts.placement, experts.specs, y, gate_input, params, routes, mask)


def _layer(y, gate_input, params, routes, mask, *, config: MoEConfig, work: Callable, chunk: int):
    """Runs `moe_layer` on one device's tokens; `work` runs all experts on them."""
    b, t, d = y.shape
    flat, mask, wide = y.reshape(b * t, d), mask.reshape(b * t), at_least_float32(y.dtype)
    # The default precision of a TPU would round the operands to bfloat16.
    logits = jnp.matmul(
        gate_input.reshape(b * t, d).astype(wide),
        params["router"].astype(wide),
        precision=jax.lax.Precision.HIGHEST,
    )
    if "router_bias" in params:
        logits = logits + params["router_bias"].astype(wide)[None, :]
    bias = params["router_selection"].astype(wide) if "router_selection" in params else None
    recorded = None if routes is None else routes.reshape(b * t, -1)
    ids, gates, stats = route(logits, recorded, mask, config, bias)
    weights = {name: in_dtype(w, y.dtype) for name, w in params.items() if "router" not in name}
    run = partial(work, weights=weights)
    out = (
        _by_chunks(run, chunk, flat, ids, gates, mask)
        if 0 < chunk < b * t
        else run(flat, ids, gates, mask)
    )
    dtype = routing_dtype(config.experts)
    record = jnp.where(mask[:, None], ids, unset_id(dtype)).astype(dtype)
    return out.reshape(b, t, d), record.reshape(b, t, -1), stats


def _by_chunks(run: Callable, chunk: int, *tokens: Array) -> Float[Array, "n d"]:
    """Calls `run` on `chunk` tokens of the `[n ...]` arrays at a time; masked tokens pad the last
    chunk.
    """
    n = tokens[0].shape[0]

    def parts(x):
        return jnp.pad(x, ((0, -n % chunk), *((0, 0),) * (x.ndim - 1))).reshape(
            -1, chunk, *x.shape[1:]
        )

    # Without the checkpoint all chunks' intermediate results would be kept for the backward pass.
    out = jax.lax.map(jax.checkpoint(lambda part: run(*part)), tuple(map(parts, tokens)))
    return out.reshape(-1, out.shape[-1])[:n]
