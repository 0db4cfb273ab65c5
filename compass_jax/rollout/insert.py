"""Insertion of prefilled samples into slots."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from compass_jax.config import RolloutConfig
from compass_jax.devices.sharding import Placement
from compass_jax.model.moe import unset_id
from compass_jax.rollout.kv_cache import put_prefix
from compass_jax.rollout.prefill import for_samples
from compass_jax.rollout.sampling import is_end
from compass_jax.rollout.state import DecodeState, Prefix, lay_state, side_by_side


def inserted(
    rollout: RolloutConfig,
    end_ids: tuple[int, ...],
    placement: Placement | None,
    prefix: Prefix,
    state: DecodeState,
    slots: Int[Array, "p s"],
    max_new_tokens: Int[Array, "p"] | None,
) -> DecodeState:
    """Returns `state` with sample `s` of prompt `p` in `slots[p, s]`, unless that is -1; see
    `Engine.bulk_insert`.
    """
    p, s = slots.shape
    flat = slots.reshape(p * s)
    to = jnp.where(flat < 0, rollout.slots, flat)  # out of range: dropped
    source = for_samples(jnp.arange(p), s)

    def rows(buffer, new):
        return buffer.at[to].set(new.astype(buffer.dtype), mode="drop")

    lengths = jnp.take(prefix.lengths, source)
    token, logp, entropy = (
        x.reshape(p * s) for x in (prefix.first_token, prefix.first_logp, prefix.first_entropy)
    )
    most = jnp.full(prefix.lengths.shape, rollout.max_new_tokens, jnp.int32)
    most = most if max_new_tokens is None else jnp.clip(max_new_tokens, 1, most)
    limits = lengths + jnp.take(most, source)
    state = state._replace(
        cache=put_prefix(state.cache, state.table, prefix.cache, source, to, placement),
        token=rows(state.token, token),
        first_logp=rows(state.first_logp, logp),
        first_entropy=rows(state.first_entropy, entropy),
        unreported=rows(state.unreported, jnp.ones_like(token)),
        routes=_put_routes(state.routes, prefix.routes, source, to),
        lengths=rows(state.lengths, lengths + 1),
        prompts=rows(state.prompts, lengths),
        limits=rows(state.limits, limits),
        keys=rows(state.keys, prefix.keys.reshape(p * s, 2)),
        # A sample that its first token ends is not live, but `generate` still reports the token.
        live=rows(state.live, ~is_end(token, end_ids) & (lengths + 1 < limits)),
        sampling=(
            state.sampling
            if prefix.sampling is None
            else jax.tree.map(
                lambda buffer, new: rows(buffer, jnp.take(new, source)),
                state.sampling,
                prefix.sampling,
            )
        ),
        top=jax.tree.map(
            lambda buffer, new: rows(buffer, new.reshape(p * s, -1)), state.top, prefix.top
        ),
    )
    return lay_state(placement, state)


def _put_routes(routes, new, source, to):
    """Returns `routes` with rows `source` of a prefix's routes in slots `to`. Later positions are
    unset, so that a sequence does not inherit the routes of the slot's previous one.
    """
    if routes is None:
        return None
    empty = jnp.array(unset_id(routes.dtype), routes.dtype)
    routes = routes.at[to].set(
        jnp.broadcast_to(empty, (to.shape[0], *routes.shape[1:])), mode="drop"
    )
    rows = jnp.take(side_by_side(new), source, axis=0).astype(routes.dtype)
    return routes.at[to, : new.shape[1]].set(rows, mode="drop")
