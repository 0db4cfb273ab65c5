"""The training step as pure functions: score -> prepare -> gradients -> apply.

`score` runs once per rollout at the parameters before its first update and fixes old log-probs and
entropies. `prepare` (rl/prepare.py) turns rewards into advantages and weights over one whole
update, so that `gradients` of its micro-batches sum to the same gradient however the rows are
split. The first update's forward pass is that of `score`, so one pass can serve both: `gradients`
is `forward_and_pullback`, then `backward`. Routing is replayed by passing an array: the rollout's
for R3, the one that `score` returned for R2.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

from compass_jax.base.aliases import Tree
from compass_jax.base.records import TrainState
from compass_jax.config import LearnerConfig, ModelConfig, Objective, OptimConfig
from compass_jax.model.logprobs import head_weights, token_logprobs
from compass_jax.model.lora import trainable
from compass_jax.model.moe import RouterStats
from compass_jax.model.params import shardings_like
from compass_jax.model.transformer import Transformer
from compass_jax.model.transformer import apply as apply_model
from compass_jax.rl.correction import mismatch as _mismatch
from compass_jax.rl.diagnostics import Diagnostics
from compass_jax.rl.policy import policy_objective
from compass_jax.rl.prepare import RewardScale
from compass_jax.rl.prepare import prepare as _prepare
from compass_jax.training import optim
from compass_jax.training.pullback import Pullback


class Places(NamedTuple):
    """Where sequences are that share rows."""

    row: Int[Array | np.ndarray, "b"]
    start: Int[Array | np.ndarray, "b"]  # the first token in that row
    size: Int[Array | np.ndarray, "b"]  # tokens


class UpdateBatch(NamedTuple):
    """One micro-batch of an update: rows, and for each sequence the old parameters' log-probs and
    entropies, advantages and weights. A row `p` is a sequence `b` unless `places` says otherwise.
    """

    tokens: Int[Array, "p m"]
    lengths: Int[Array, "p"]  # tokens of each row; 0 for a padding row
    routes: UInt[Array, "p m l k"] | None  # None: live; an unset row falls back to live routing
    mask: Bool[Array, "b t"]  # generated tokens of samples with a known reward
    old_logp: Float[Array, "b t"]
    old_entropy: Float[Array, "b t"]
    ref_logp: Float[Array, "b t"] | None  # None: no reference is kept
    advantage: Float[Array, "b t"]
    weight: Float[Array, "b t"]  # the normaliser over the whole update; 0 outside the mask
    entropy_group: Int[Array, "b t"] | None  # ESPO's tau of each token
    kl_weight: Float[Array, "b t"] | None = None  # of the KL penalty; None: `weight`
    segments: Int[Array, "p m"] | None = None  # see `forward`
    predicted: Bool[Array, "p m"] | None = None  # see `forward`
    places: Places | None = None  # of sequences that share rows


prepare = partial(jax.jit, static_argnames=("n_groups", "config", "scale"))(_prepare)
mismatch = jax.jit(_mismatch)


def reward_scale(config: LearnerConfig) -> RewardScale:
    """Returns the scale of a run's rewards and lengths."""
    rewards, group_size = config.rewards, config.sampling.group_size
    longest = config.rollout.max_new_tokens
    return RewardScale(rewards.right_at, rewards.wrong_at, longest, group_size)


def forward(
    model: Transformer,
    params: Tree,
    tokens: Int[Array, "b t"],
    lengths: Int[Array, "b"],
    routes: UInt[Array, "b t l k"] | None,
    temperature: float | Float[Array, ""],
    segments: Int[Array, "b t"] | None = None,
    predicted: Bool[Array, "b t"] | None = None,
):
    """Computes (logp, entropy, routes used, aux) of whole sequences. The last token of a sequence
    is not an input, so it is masked like padding. `segments` numbers the sequences that share a
    row, each of which gives the same result as in its own row; `lengths` are then the rows'.
    `predicted` are the tokens whose logp and entropy are needed, others have 0 (None: all).
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    mask = positions < lengths[:, None] - 1
    if segments is not None:
        positions, mask = _within(segments, positions, mask)
    out = apply_model(model, params, tokens, positions, mask=mask, routes=routes, segments=segments)
    head, chunk = head_weights(params), model.compute.logprob_chunk
    logp, entropy = token_logprobs(
        out.hidden, head, tokens, temperature, chunk, model.placement, model.known, predicted
    )
    if segments is not None:  # a sequence's first token is not predicted
        logp, entropy = (jnp.where(positions > 0, x, jnp.zeros_like(x)) for x in (logp, entropy))
    return logp, entropy, out.routes, out.aux


def _within(
    segments: Int[Array, "b t"], positions: Int[Array, "b t"], mask: Bool[Array, "b t"]
) -> tuple[Int[Array, "b t"], Bool[Array, "b t"]]:
    """Returns (positions that start at 0 in each segment, `mask` without each segment's last
    token).
    """
    # The rolls wrap around and compare a row's first token with its last. If both are of one
    # segment, its start is 0 all the same, and `mask` leaves out the row's last token already.
    begins = segments != jnp.roll(segments, 1, axis=1)
    start = jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)
    return positions - start, mask & (segments == jnp.roll(segments, -1, axis=1))


@partial(jax.jit, static_argnames=("model",))
def forward_and_pullback(
    model: Transformer,
    params: Tree,
    tokens,
    lengths,
    routes,
    temperature: float | Float[Array, ""],
    segments=None,
    predicted=None,
):
    """Computes ((logp, entropy, routes used, aux), pullback of (logp, mean router probabilities) to
    the trained part of the parameters).

    One compiled program computes the old and the new log-probs. Two programs round differently
    (1e-5 in a token's ratio in float32, far more in bfloat16, where ESPO clips at 1e-5 to 2e-3), so
    that the first update would be off policy.
    """

    trained, in_params = trainable(params)

    def run(trained):
        logp, entropy, used_routes, aux = forward(
            model, in_params(trained), tokens, lengths, routes, temperature, segments, predicted
        )
        return (logp, None if aux is None else aux.probs), (entropy, used_routes, aux)

    (logp, _), pullback, (entropy, used_routes, aux) = jax.vjp(run, trained, has_aux=True)
    return (logp, entropy, used_routes, jax.lax.stop_gradient(aux)), Pullback.without(
        pullback, params
    )


def unpack(values: Float[Array, "p m"], places: Places, length: int) -> Float[Array, "b {length}"]:
    """Returns the values of each sequence from rows that several share, with zeros past its end."""
    token = jnp.arange(length, dtype=jnp.int32)[None]
    # Positions past the row's end are clipped; the next line replaces their values.
    of_tokens = values.at[places.row[:, None], places.start[:, None] + token].get(mode="clip")
    return jnp.where(token < places.size[:, None], of_tokens, jnp.zeros_like(of_tokens))


@partial(jax.jit, static_argnames=("model",))
def pull(model: Transformer, params: Tree, pullback: Pullback, cotangents):
    """Computes the gradient of the trained part of `params` from a pullback of
    `forward_and_pullback` at `params` and its cotangents; over a mesh it has the sharding of what
    it belongs to.
    """
    return constrained(model, pullback.within(params)(cotangents)[0])


def constrained(model: Transformer, grads: Tree) -> Tree:
    """Constrains gradients to their parameters' sharding: without it the compiler may replicate
    them on every device.
    """
    if model.placement is None:
        return grads
    return jax.lax.with_sharding_constraint(
        grads, shardings_like(grads, model.config, model.placement)
    )


def score(
    model: Transformer,
    params: Tree,
    tokens: Int[Array, "b t"],
    lengths: Int[Array, "b"],
    routes: UInt[Array, "b t l k"] | None,
    segments: Int[Array, "b t"] | None = None,
    predicted: Bool[Array, "b t"] | None = None,
    *,
    temperature: float | Float[Array, ""],
):
    """Returns (old_logp, old_entropy, routes used, diagnostics) at `params`, routed by `routes`
    (None: live). The values equal bit for bit those of `gradients` at the same parameters and rows.
    """
    (logp, entropy, used_routes, aux), _ = forward_and_pullback(
        model, params, tokens, lengths, routes, temperature, segments, predicted
    )
    return logp, entropy, used_routes, router_diagnostics(aux)


def gradients(
    model: Transformer,
    params: Tree,
    batch: UpdateBatch,
    share: Float[Array, ""],
    *,
    objective: Objective,
    temperature: float | Float[Array, ""],
) -> tuple[Tree, Diagnostics, Float[Array, "p m"]]:
    """Computes the gradient of -objective of one micro-batch and its diagnostics, which both sum
    over the micro-batches of an update; and the log-probs at `params`.

    `share` is the micro-batch's share of the update's tokens. It scales the router's load-balancing
    loss, the only term that depends on how an update is split (it is a product of two means; off by
    default).
    """
    (logp, _, _, aux), pullback = forward_and_pullback(
        model,
        params,
        batch.tokens,
        batch.lengths,
        batch.routes,
        temperature,
        batch.segments,
        batch.predicted,
    )
    return *backward(model, params, logp, aux, pullback, batch, share, objective), logp


def backward(
    model: Transformer,
    params: Tree,
    logp: Float[Array, "p m"],
    aux: RouterStats | None,
    pullback: Pullback,
    batch: UpdateBatch,
    share: Float[Array, ""],
    objective: Objective,
) -> tuple[Tree, Diagnostics]:
    """Computes `gradients` from the results of `forward_and_pullback` at `params`."""
    cotangents, diagnostics = _objective_gradient(
        logp, aux, batch, share, objective, model.config, model.columns
    )
    return pull(model, params, pullback, cotangents), diagnostics


@partial(jax.jit, static_argnames=("objective", "shape", "columns"))
def _objective_gradient(
    logp,
    aux: RouterStats | None,
    batch: UpdateBatch,
    share,
    objective: Objective,
    shape: ModelConfig,
    columns: int,
):
    """Computes the gradient of -objective in (logp, aux.probs), and the micro-batch's
    diagnostics.
    """

    def loss(of):
        logp, probs = of
        if batch.places is not None:
            logp = unpack(logp, batch.places, batch.mask.shape[1])
        per_token, diagnostics = policy_objective(
            logp,
            batch.old_logp,
            batch.old_entropy,
            batch.advantage,
            batch.weight,
            objective,
            mask=batch.mask,
            entropy_group=batch.entropy_group,
            ref_logp=batch.ref_logp,
            kl_weight=batch.kl_weight,
            vocab_size=columns,
        )
        total = -jnp.sum(per_token)
        diagnostics = {**diagnostics, "loss": (jax.lax.stop_gradient(total),)}
        if objective.router_aux_coef and aux is not None:
            # The gradient reaches the router through `probs`; the load is a count without gradient.
            balance = load_balancing_loss(aux._replace(probs=probs), shape.mixture.top_k)
            total = total + (objective.router_aux_coef * share * balance).astype(total.dtype)
        return total, diagnostics

    cotangents, diagnostics = jax.grad(loss, has_aux=True)(
        (logp, None if aux is None else aux.probs)
    )
    return cotangents, {**diagnostics, **router_diagnostics(aux)}


@partial(jax.jit, static_argnames=("model",))
def sft_gradients(
    model: Transformer,
    params: Tree,
    tokens: Int[Array, "b t"],
    lengths: Int[Array, "b"],
    weight: Float[Array, "b t"],
    share: Float[Array, ""],
    aux_coef: float,
    segments: Int[Array, "b t"] | None = None,
) -> tuple[Tree, Diagnostics]:
    """Computes the gradient of -sum(weight * logp) plus the load-balancing loss; `weight` is 0
    outside the assistant's tokens and sums to 1 over the update. `segments` is that of `forward`.
    """

    trained, in_params = trainable(params)

    def loss(trained):
        params = in_params(trained)
        logp, entropy, _, aux = forward(
            model, params, tokens, lengths, None, 1.0, segments, weight != 0
        )
        nll = -jnp.sum(weight * logp)
        balance = (
            jnp.zeros((), nll.dtype)
            if aux is None
            else load_balancing_loss(aux, model.config.mixture.top_k)
        )
        return nll + (aux_coef * share * balance).astype(nll.dtype), (
            nll,
            jnp.sum(weight * entropy),
            aux,
        )

    grads, (nll, entropy, aux) = jax.grad(loss, has_aux=True)(trained)
    return constrained(model, grads), {
        "loss": (nll,),
        "entropy_nats": (entropy,),
        **router_diagnostics(aux),
    }


def add(total: Tree | None, part: Tree) -> Tree:
    """Adds two gradients in at least float32 and donates the first; None stands for an
    empty sum.
    """
    return optim.widen(part) if total is None else accumulate(total, part)


@partial(jax.jit, donate_argnums=(0,))
def accumulate(total: Tree, part: Tree) -> Tree:
    """Returns total + part in the dtypes of `total`, which is donated."""
    return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, part)


@partial(jax.jit, static_argnames=("config", "total_steps", "decays"), donate_argnums=(0,))
def apply(
    state: TrainState,
    grads: Tree,
    *,
    config: OptimConfig,
    total_steps: int,
    decays: tuple[bool, ...],
    factor: Float[Array, ""] | None = None,
    betas: tuple[Float[Array, ""], Float[Array, ""]] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Runs one optimiser update (`optim.update`); the state is donated."""
    return optim.update(state, grads, config, total_steps, decays, factor, betas)


def load_balancing_loss(aux: RouterStats, top_k: int) -> Float[Array, ""]:
    """Computes e / k * sum_e f_e P_e, the mean over MoE layers: 1 when balanced (Switch
    Transformer, arXiv 2101.03961, eq. 4, for top-k).
    """
    tokens = jnp.maximum(aux.tokens, 1.0)[:, None]
    experts = aux.load.shape[1]
    return jnp.mean(
        experts
        / top_k
        * jnp.sum(jax.lax.stop_gradient(aux.load / tokens) * (aux.probs / tokens), axis=1)
    )


def router_diagnostics(aux: RouterStats | None) -> Diagnostics:
    """Returns the flip rate against live routing, the share of unset rows, and the fullest expert's
    load over the mean; empty for a dense model.
    """
    if aux is None:
        return {}
    aux = jax.lax.stop_gradient(aux)
    tokens = jnp.sum(aux.tokens)
    load = jnp.max(aux.load, axis=1) / jnp.maximum(jnp.mean(aux.load, axis=1), 1e-9)
    return {
        "replay/flip_frac": (jnp.sum(aux.flips), tokens),
        "replay/unset_frac": (jnp.sum(aux.unset), tokens),
        # Weighted by tokens, so that merged micro-batches give the mean over tokens.
        "moe/load_max_over_mean": (jnp.mean(load) * tokens, tokens),
    }
