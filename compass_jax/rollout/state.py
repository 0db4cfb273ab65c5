"""What an engine holds between its calls: prompts after prefill, and the slots' sequences; how they
lie on a mesh.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt, UInt32

from compass_jax.config import RolloutConfig
from compass_jax.model.logprobs import head_weights, logits_of
from compass_jax.model.moe import empty_routes
from compass_jax.model.precision import at_least_float32
from compass_jax.model.transformer import Cache, Transformer
from compass_jax.rollout.kv_cache import new_cache, pages_spec
from compass_jax.rollout.logprobs import TopLogprobs, empty_logprobs
from compass_jax.rollout.sampling import RowSampling, Sampler
from compass_jax.sharding import Placement, constrain


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
    """One row per slot. `t` is the longest sequence; arrays are aligned as in records.py.

    With `rollout.cache_pages` whoever drives the engine assigns pages to slots (pages.PagePool),
    and puts its `table` here before it inserts and before it generates: for every live slot the
    pages of all positions that the call may write.
    """

    # layers of [slots kv t d]; of [pages kv page d] with a table; or runs of these, stacked
    cache: Cache
    tokens: Int[Array, "slots t"]
    logp: Float[Array, "slots t"]
    entropy: Float[Array, "slots t"]
    routes: UInt[Array, "slots t l k"] | None
    # tokens so far, prompt included; the last one has not been an input yet
    lengths: Int[Array, "slots"]
    limits: Int[Array, "slots"]  # length at which the sequence is cut
    keys: UInt32[Array, "slots 2"]
    live: Bool[Array, "slots"]  # holds a sequence that is not finished
    sampling: RowSampling  # [slots] of a `per_request` sampler; else those of `plain`
    # the page of each stretch of a slot, out of range where there is none
    table: Int[Array, "slots n"] | None = None
    # [slots 1 + tokens_per_call k], of a sampler with `top_logprobs`: of the first token of a
    # sequence that was inserted since the last call, and of those that this one drew
    top: TopLogprobs | None = None


def lay(placement: Placement | None, x: Array, *axes: str | None) -> Array:
    """`x` on the mesh, by its first axes; the others are whole."""
    return constrain(placement, x, *axes, *(None,) * (x.ndim - len(axes)))


def next_logits(
    model: Transformer, params: Any, hidden: Float[Array, "n d"], sampler: Sampler
) -> Float[Array, "n v"]:
    """The logits of the next tokens. Over a mesh they stay split over the vocabulary, as the LM
    head is: whole rows of them would gather the head in every token step.
    """
    placement = model.placement
    logits = lay(placement, logits_of(hidden, head_weights(params)), "batch", "vocab")
    # what is sorted has to be whole: the logits are gathered, which are far smaller than the head
    return lay(placement, logits, "batch") if sampler.truncates else logits


def lay_cache(placement: Placement | None, cache: Cache, rows: int) -> Cache:
    """A cache of so many slots or prompts on the mesh: its rows, or its pages with their slots,
    over the devices, its heads over tensor.
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
    """A state as it lies between calls: slots over the mesh, heads of the cache over tensor."""
    if placement is None:
        return state
    cache = lay_cache(placement, state.cache, state.lengths.shape[0])
    return jax.tree.map(lambda x: lay(placement, x, "batch"), state._replace(cache=()))._replace(
        cache=cache
    )


def empty_state(
    model: Transformer, rollout: RolloutConfig, groups: int, most: int = 0
) -> DecodeState:
    """No slot is live. groups: of slots, each with an equal part of the pages; most: of the
    sampler's `top_logprobs`.
    """
    n, t, wide = rollout.slots, rollout.max_length, at_least_float32(model.compute.dtype)
    cache, table = new_cache(model.config, rollout, model.compute, groups)
    top = None
    if most:
        of_call = n, 1 + rollout.tokens_per_call
        top = empty_logprobs(of_call, most, model.config.vocab_size, model.compute.dtype)
    state = DecodeState(
        cache=cache,
        table=table,
        tokens=jnp.zeros((n, t), jnp.int32),
        logp=jnp.zeros((n, t), wide),
        entropy=jnp.zeros((n, t), wide),
        routes=empty_routes(model.config, n, t),
        lengths=jnp.ones((n,), jnp.int32),
        limits=jnp.ones((n,), jnp.int32),
        keys=jnp.zeros((n, 2), jnp.uint32),
        live=jnp.zeros((n,), bool),
        sampling=RowSampling.plain(n),
        top=top,
    )
    return lay_state(model.placement, state)
