"""The state of an engine between its calls (prefilled prompts and the slots' sequences), and its
layout on a mesh.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from compass_jax.base.aliases import Tree
from compass_jax.config import RolloutConfig
from compass_jax.devices.sharding import Placement, constrain
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.moe import empty_routes
from compass_jax.model.precision import at_least_float32
from compass_jax.model.transformer import Cache, Transformer
from compass_jax.rollout.kv_cache import new_cache, pages_spec
from compass_jax.rollout.logprobs import TopLogprobs, empty_logprobs
from compass_jax.rollout.sampling import RowSampling, Sampler


class Prefix(NamedTuple):
    """`p` prompts after prefill, with the first token of each of their `s` samples."""

    cache: Cache  # layers of [p kv t d], or runs of [layers p kv t d] (compute.scan_decode)
    tokens: Int[Array, "p t"]
    lengths: Int[Array, "p"]
    routes: UInt[Array, "p t l k"] | None
    keys: UInt32[Array, "p s 2"]
    first_token: Int[Array, "p s"]
    first_logp: Float[Array, "p s"]
    first_entropy: Float[Array, "p s"]
    sampling: RowSampling | None = None  # [p] of a `per_request` sampler
    top: TopLogprobs | None = None  # [p s k], of a sampler with `top_logprobs`


class DecodeState(NamedTuple):
    """The state of all slots, one row per slot.

    Each call returns the new tokens and their log-probs. The state holds the inputs of the next
    call, and the routes until `harvest` copies them. With `rollout.cache_pages` the driver of the
    engine assigns pages to slots (pages.PagePool). It sets `table` before it inserts and before it
    generates: for every live slot, the pages of all positions that the call may write.
    """

    # layers of [slots kv t d]; of [pages kv page d] with a table; or runs of these, stacked
    cache: Cache
    token: Int[Array, "slots"]  # the last token, not yet an input
    first_logp: Float[Array, "slots"]  # log-prob of the token from the prefill
    first_entropy: Float[Array, "slots"]
    unreported: Bool[Array, "slots"]  # whether no result has reported that token yet
    # the ids of all layers along one axis: XLA copies less of the buffer to write into it
    routes: UInt[Array, "slots t l*k"] | None
    lengths: Int[Array, "slots"]  # number of tokens so far, prompt included
    prompts: Int[Array, "slots"]  # number of tokens of the prompt
    limits: Int[Array, "slots"]  # length at which the sequence is cut
    keys: UInt32[Array, "slots 2"]
    live: Bool[Array, "slots"]  # whether the sequence is unfinished
    sampling: RowSampling  # [slots] of a `per_request` sampler; else those of `plain`
    # the page of each page-sized part of a slot, or an index out of range
    table: Int[Array, "slots n"] | None = None
    top: TopLogprobs | None = None  # [slots k] of that token, of a sampler with `top_logprobs`


def side_by_side(routes: UInt[Array, "*n l k"]) -> UInt[Array, "*n l*k"]:
    """Returns routes with the ids of all layers along one axis."""
    return routes.reshape(*routes.shape[:-2], -1)


def lay(placement: Placement | None, x: Array, *axes: str | None) -> Array:
    """Returns `x` with its first axes split over the mesh and the others replicated."""
    return constrain(placement, x, *axes, *(None,) * (x.ndim - len(axes)))


def next_logits(
    model: Transformer, params: Tree, hidden: Float[Array, "n d"], sampler: Sampler
) -> Float[Array, "n v"]:
    """Returns the logits of the next tokens. Over a mesh they stay split over the vocabulary like
    the LM head, because whole rows would gather the head in every token step.
    """
    placement = model.placement
    logits = lay(placement, logits_of(hidden, head_weights(params)), "batch", "vocab")
    # truncation needs whole rows: the logits are gathered, which are far smaller than the head
    return lay(placement, logits, "batch") if sampler.truncates else logits


def lay_cache(placement: Placement | None, cache: Cache, rows: int) -> Cache:
    """Returns a cache of `rows` slots or prompts on the mesh: its rows, or its pages with their
    slots, over the devices, its heads over tensor.
    """
    if placement is None:
        return cache
    _, specs = pages_spec(placement, rows, cache)
    return jax.tree.map(
        lambda x, spec: jax.lax.with_sharding_constraint(x, placement.sharding(*spec)),
        cache,
        specs,
    )


def lay_state(placement: Placement | None, state: DecodeState) -> DecodeState:
    """Returns a state in its layout between calls: slots over the mesh, the cache's heads over
    tensor.
    """
    if placement is None:
        return state
    cache = lay_cache(placement, state.cache, state.lengths.shape[0])
    return jax.tree.map(lambda x: lay(placement, x, "batch"), state._replace(cache=()))._replace(
        cache=cache
    )


def empty_state(
    model: Transformer, rollout: RolloutConfig, groups: int, most: int = 0
) -> DecodeState:
    """Returns a state without live slots.

    groups: number of equal parts of slots and pages. most: the sampler's `top_logprobs`.
    """
    n, wide = rollout.slots, at_least_float32(model.compute.dtype)
    cache, table = new_cache(model.config, rollout, model.compute, groups)
    top = None
    if most:
        top = empty_logprobs((n,), most, model.config.vocab_size, model.compute.dtype)
    routes = empty_routes(model.config, n, rollout.max_length)
    state = DecodeState(
        cache=cache,
        table=table,
        token=jnp.zeros((n,), jnp.int32),
        first_logp=jnp.zeros((n,), wide),
        first_entropy=jnp.zeros((n,), wide),
        unreported=jnp.zeros((n,), bool),
        routes=None if routes is None else side_by_side(routes),
        lengths=jnp.ones((n,), jnp.int32),
        prompts=jnp.ones((n,), jnp.int32),
        limits=jnp.ones((n,), jnp.int32),
        keys=jnp.zeros((n, 2), jnp.uint32),
        live=jnp.zeros((n,), bool),
        sampling=RowSampling.plain(n),
        top=top,
    )
    return lay_state(model.placement, state)
