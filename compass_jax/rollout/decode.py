"""The decoding loop: draws many tokens for every live slot in one call, on the device."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import RolloutConfig
from compass_jax.model.moe import unset_id
from compass_jax.model.transformer import Transformer, apply
from compass_jax.rollout.engine_api import ResultTokens
from compass_jax.rollout.kv_cache import put_back, window
from compass_jax.rollout.logprobs import top_logprobs_if
from compass_jax.rollout.sampling import RowSampling, Sampler, is_end, sample
from compass_jax.rollout.state import DecodeState, lay, lay_state, next_logits, side_by_side


def decoded(
    model: Transformer,
    rollout: RolloutConfig,
    end_ids: tuple[int, ...],
    params: Tree,
    state: DecodeState,
    wanted_free: Int[Array, ""],
    sampler: Sampler,
    read: int | None,
    in_place: bool,
    needs_top: Bool[Array, ""] | None = None,
) -> tuple[DecodeState, ResultTokens]:
    """Returns the state and the new tokens, see `Engine.generate`.

    in_place: whether the kernel reads and writes the cache in place. needs_top: whether the
    log-probs of the likeliest tokens are requested (None unless the state has them).
    """
    n, slots, placement = rollout.tokens_per_call, rollout.slots, model.placement

    def go_on(carry):
        i, live = carry[0], carry[3]
        count = jnp.sum(live, dtype=jnp.int32)
        return (i < n) & (count > 0) & (slots - count < wanted_free)

    # The window copies a slot's pages into one range, which needs no table.
    pages = state.table if in_place else None
    size = rollout.max_length if read is None else read
    cache = state.cache if in_place else window(state.cache, state.table, size, placement)
    start = jnp.int32(0), cache, state.lengths, state.live, state.token, _outputs(state, n)
    token = partial(_token, model, end_ids, params, state, sampler, pages, needs_top)
    steps, cache, lengths, live, last, outputs = jax.lax.while_loop(go_on, token, start)
    # [steps slots]: a slot stays live until its end, so step i of a live slot wrote this position.
    inputs = state.lengths[None, :] - 1 + jnp.arange(n, dtype=jnp.int32)[:, None]
    if not in_place:
        written_slots = outputs["wrote"]
        cache = put_back(state.cache, state.table, cache, inputs, written_slots, placement)
    results = _results(state, outputs, lengths, live)
    results = jax.tree.map(lambda x: lay(placement, x, "batch"), results).replace(steps=steps)
    after = state._replace(
        cache=cache,
        token=last,
        unreported=jnp.zeros_like(state.unreported),
        routes=_written_routes(state, outputs, inputs, rollout.max_length),
        lengths=lengths,
        live=live,
    )
    return lay_state(placement, after), results


def _outputs(state: DecodeState, n: int) -> JsonObject:
    """Returns zero outputs of `n` steps, with routes unset."""
    slots = state.lengths.shape[0]
    outputs = {
        "tokens": jnp.zeros((n, slots), jnp.int32),
        "logp": jnp.zeros((n, slots), state.first_logp.dtype),
        "entropy": jnp.zeros((n, slots), state.first_entropy.dtype),
        "wrote": jnp.zeros((n, slots), bool),
    }
    if state.routes is not None:
        kind = state.routes.dtype
        shape = n, slots, *state.routes.shape[2:]
        outputs["routes"] = jnp.full(shape, unset_id(kind), kind)
    if state.top is not None:
        outputs["top"] = jax.tree.map(lambda x: jnp.zeros((n, *x.shape), x.dtype), state.top)
    return outputs


def _token(
    model: Transformer, end_ids, params, state: DecodeState, sampler, pages, needs_top, carry
):
    """Draws one token in every live slot."""
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
    if sampler.per_request:  # free slots get neutral parameters
        neutral = RowSampling.plain(lengths.shape[0])
        each = jax.tree.map(partial(jnp.where, live), state.sampling, neutral)
    token, logp, entropy = sample(logits, state.keys, lengths, sampler, each, model.known)
    new = {"tokens": token, "logp": logp, "entropy": entropy, "wrote": live}
    if "routes" in outputs:
        assert step.routes is not None
        new["routes"] = side_by_side(step.routes[:, 0])
    if "top" in outputs:
        new["top"] = top_logprobs_if(needs_top, logits, token, sampler.top_logprobs, model.known)
    outputs = {
        name: jax.tree.map(
            lambda rows, x: jax.lax.dynamic_update_index_in_dim(rows, x, i, 0), buffer, new[name]
        )
        for name, buffer in outputs.items()
    }
    lengths = lengths + live.astype(jnp.int32)
    live = live & ~is_end(token, end_ids) & (lengths < state.limits)
    return i + 1, step.cache, lengths, live, token, outputs


def _results(state: DecodeState, outputs, lengths, live) -> ResultTokens:
    """Returns the unreported first tokens and a call's `[steps slots]` outputs, by slots."""

    def columns(first, drawn):
        return jnp.concatenate([first[:, None], jnp.moveaxis(drawn, 0, 1)], axis=1)

    tokens = columns(state.token, outputs["tokens"])
    valid = columns(state.unreported, outputs["wrote"]).astype(jnp.int32)
    m = tokens.shape[1]
    top = None
    if state.top is not None:
        top = jax.tree.map(columns, state.top, outputs["top"])
    return ResultTokens(
        data=jnp.concatenate([tokens, valid, (lengths - state.prompts)[:, None]], axis=1),
        tokens_idx=(0, m),
        valid_idx=(m, 2 * m),
        length_idx=(2 * m, 2 * m + 1),
        samples_per_slot=1,
        logp=columns(state.first_logp, outputs["logp"]),
        entropy=columns(state.first_entropy, outputs["entropy"]),
        top=top,
        live=live,
    )


def _written_routes(state: DecodeState, outputs, inputs: Int[Array, "steps slots"], past: int):
    """Returns the slots' routes with those of a call's inputs added; row t belongs to input token
    t.
    """
    if state.routes is None:
        return None
    slot = jnp.broadcast_to(jnp.arange(inputs.shape[1])[None], inputs.shape)
    # Rows out of range are dropped. Stopped slots write there, each step to another row, because
    # the indices are declared unique.
    unwritten = past + jnp.arange(inputs.shape[0])[:, None]
    position = jnp.where(outputs["wrote"], inputs, unwritten)
    return state.routes.at[slot, position].set(outputs["routes"], mode="drop", unique_indices=True)
