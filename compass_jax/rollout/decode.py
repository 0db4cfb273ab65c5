"""Many tokens of every live slot in one call, on the device."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from compass_jax.config import RolloutConfig
from compass_jax.model.moe import unset_id
from compass_jax.model.transformer import Transformer, apply
from compass_jax.rollout.kv_cache import put_back, window
from compass_jax.rollout.logprobs import top_logprobs_if
from compass_jax.rollout.sampling import RowSampling, Sampler, is_end, sample
from compass_jax.rollout.state import DecodeState, lay_state, next_logits


def decoded(
    model: Transformer,
    rollout: RolloutConfig,
    end_ids: tuple[int, ...],
    params: Any,
    state: DecodeState,
    wanted_free: Int[Array, ""],
    sampler: Sampler,
    read: int | None,
    in_place: bool,
    wanted: Bool[Array, ""] | None = None,
) -> tuple[DecodeState, Int[Array, ""]]:
    """(the state, the number of steps taken), see `Engine.generate`. in_place: the cache is read
    and written where it lies, by the kernel; wanted: whether the likeliest tokens are (not None
    where the state has room for them).
    """
    n, slots, placement = rollout.tokens_per_call, rollout.slots, model.placement
    current = jnp.take_along_axis(state.tokens, state.lengths[:, None] - 1, axis=1)[:, 0]

    def go_on(carry):
        i, live = carry[0], carry[3]
        count = jnp.sum(live, dtype=jnp.int32)
        return (i < n) & (count > 0) & (slots - count < wanted_free)

    pages = state.table if in_place else None
    size = rollout.max_length if read is None else read
    cache = state.cache if in_place else window(state.cache, state.table, size, placement)
    start = jnp.int32(0), cache, state.lengths, state.live, current, _outputs(state, n)
    token = partial(_token, model, end_ids, params, state, sampler, pages, wanted)
    steps, cache, lengths, live, _, outputs = jax.lax.while_loop(go_on, token, start)
    inputs = state.lengths[None, :] - 1 + jnp.arange(n, dtype=jnp.int32)[:, None]
    if not in_place:
        wrote = outputs["wrote"]
        cache = put_back(state.cache, state.table, cache, inputs, wrote, placement)
    state = _write_back(state, outputs, rollout.max_length + 1)
    return lay_state(placement, state._replace(cache=cache, lengths=lengths, live=live)), steps


def _outputs(state: DecodeState, n: int) -> dict[str, Any]:
    """Room for what `n` steps give, routes unset."""
    slots = state.lengths.shape[0]
    outputs = {
        "tokens": jnp.zeros((n, slots), jnp.int32),
        "logp": jnp.zeros((n, slots), state.logp.dtype),
        "entropy": jnp.zeros((n, slots), state.entropy.dtype),
        "wrote": jnp.zeros((n, slots), bool),
    }
    if state.routes is not None:
        kind = state.routes.dtype
        shape = n, slots, *state.routes.shape[2:]
        outputs["routes"] = jnp.full(shape, unset_id(kind), kind)
    if state.top is not None:
        outputs["top"] = jax.tree.map(
            lambda x: jnp.zeros((n, slots, x.shape[2]), x.dtype), state.top
        )
    return outputs


def _token(model: Transformer, end_ids, params, state: DecodeState, sampler, pages, wanted, carry):
    """One token of every live slot."""
    i, cache, lengths, live, current, outputs = carry
    step = apply(
        model,
        params,
        current[:, None],
        lengths[:, None] - 1,
        mask=live[:, None],
        cache=cache,
        table=pages,
    )
    logits = next_logits(model, params, step.hidden[:, 0], sampler)
    each = None
    if sampler.per_request:  # a slot that is free asks for nothing
        neutral = RowSampling.plain(lengths.shape[0])
        each = jax.tree.map(partial(jnp.where, live), state.sampling, neutral)
    token, logp, entropy = sample(logits, state.keys, lengths, sampler, each, model.known)
    new = {"tokens": token, "logp": logp, "entropy": entropy, "wrote": live}
    if "routes" in outputs:
        assert step.routes is not None
        new["routes"] = step.routes[:, 0]
    if "top" in outputs:
        new["top"] = top_logprobs_if(wanted, logits, token, sampler.top_logprobs, model.known)
    outputs = {
        name: jax.tree.map(
            lambda held, x: jax.lax.dynamic_update_index_in_dim(held, x, i, 0), buffer, new[name]
        )
        for name, buffer in outputs.items()
    }
    lengths = lengths + live.astype(jnp.int32)
    live = live & ~is_end(token, end_ids) & (lengths < state.limits)
    return i + 1, step.cache, lengths, live, token, outputs


def _write_back(state: DecodeState, outputs, past: int) -> DecodeState:
    """Scatters a call's `[steps slots]` outputs to the slots' rows; a live slot advances one
    position per step.
    """
    n, slots = outputs["tokens"].shape
    slot = jnp.broadcast_to(jnp.arange(slots)[None], (n, slots))
    position = state.lengths[None, :] + jnp.arange(n, dtype=jnp.int32)[:, None]
    # out of range: dropped
    position = jnp.where(outputs["wrote"], position, past)

    def put(buffer, name, shift=0):
        return buffer.at[slot, position - shift].set(
            outputs[name], mode="drop", unique_indices=True
        )

    # row t belongs to token t as an input
    routes = None if state.routes is None else put(state.routes, "routes", 1)
    written = {name: put(getattr(state, name), name) for name in ("tokens", "logp", "entropy")}
    if state.top is not None:
        drawn = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), outputs["top"])
        top = jax.tree.map(lambda held, x: held.at[:, 1:].set(x), state.top, drawn)
        state = state._replace(top=top)
    return state._replace(**written, routes=routes)
