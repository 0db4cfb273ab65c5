"""Samples of prefilled prompts into slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from compass_jax.config import RolloutConfig
from compass_jax.model.moe import unset_id
from compass_jax.rollout.kv_cache import put_prefix
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.prefill import for_samples
from compass_jax.rollout.sampling import is_end
from compass_jax.rollout.state import DecodeState, Prefix, lay_state
from compass_jax.sharding import Placement


def inserted(
    rollout: RolloutConfig,
    end_ids: tuple[int, ...],
    placement: Placement | None,
    prefix: Prefix,
    state: DecodeState,
    slots: Int[Array, "p s"],
    max_new_tokens: Int[Array, "p"] | None,
) -> DecodeState:
    """`state` with sample `s` of prompt `p` in `slots[p, s]`, unless that is -1; see
    `Engine.bulk_insert`.
    """
    (p, s), t = slots.shape, prefix.tokens.shape[1]
    flat = slots.reshape(p * s)
    to = jnp.where(flat < 0, rollout.slots, flat)  # out of range: dropped
    source = for_samples(jnp.arange(p), s)

    def rows(buffer, new):
        return buffer.at[to].set(new.astype(buffer.dtype), mode="drop")

    def window(buffer, new):
        return buffer.at[to, :t].set(
            jnp.take(new, source, axis=0).astype(buffer.dtype), mode="drop"
        )

    lengths = jnp.take(prefix.lengths, source)
    token, logp, entropy = (
        x.reshape(p * s) for x in (prefix.first_token, prefix.first_logp, prefix.first_entropy)
    )

    def first(buffer, new):
        return buffer.at[to, lengths].set(new.astype(buffer.dtype), mode="drop")

    most = jnp.full(prefix.lengths.shape, rollout.max_new_tokens, jnp.int32)
    most = most if max_new_tokens is None else jnp.clip(max_new_tokens, 1, most)
    limits = lengths + jnp.take(most, source)
    state = state._replace(
        cache=put_prefix(state.cache, state.table, prefix.cache, source, to, placement),
        tokens=first(window(state.tokens, prefix.tokens), token),
        logp=first(
            rows(state.logp, jnp.zeros((p * s, state.logp.shape[1]), state.logp.dtype)), logp
        ),
        entropy=first(
            rows(state.entropy, jnp.zeros((p * s, state.entropy.shape[1]), state.entropy.dtype)),
            entropy,
        ),
        routes=(None if state.routes is None else window(_forget(state.routes, to), prefix.routes)),
        lengths=rows(state.lengths, lengths + 1),
        limits=rows(state.limits, limits),
        keys=rows(state.keys, prefix.keys.reshape(p * s, 2)),
        live=rows(state.live, ~is_end(token, end_ids) & (lengths + 1 < limits)),
        sampling=(
            state.sampling
            if prefix.sampling is None
            else jax.tree.map(
                lambda held, new: rows(held, jnp.take(new, source)),
                state.sampling,
                prefix.sampling,
            )
        ),
        top=_first_row(state.top, prefix.top, to),
    )
    return lay_state(placement, state)


def _first_row(held: TopLogprobs | None, new: TopLogprobs | None, to) -> TopLogprobs | None:
    """`held` `[slots n k]` with those `[p s k]` of the first tokens in the first rows of `to`."""
    if held is None:
        return None

    def put(held, new):
        return held.at[to, 0].set(new.reshape(-1, new.shape[-1]), mode="drop")

    return jax.tree.map(put, held, new)


def _forget(routes, slots):
    """A new sequence must not inherit the routes of the slot's previous one: its rows start
    unset.
    """
    empty = jnp.array(unset_id(routes.dtype), routes.dtype)
    return routes.at[slots].set(
        jnp.broadcast_to(empty, (slots.shape[0], *routes.shape[1:])), mode="drop"
    )
