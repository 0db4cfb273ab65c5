"""Policy objectives, to be maximised: `objective = per_token.sum()` over all micro-batches of an
update, loss = -objective.

An objective is a pure function to a `Surrogate` (value, ratio and clipping per token) and a row in
`OBJECTIVES`; how its tokens are averaged is a row in `WEIGHTS`. Everything but `logp` is constant
in the gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.config import ObjectiveConfig
from compass_jax.masked import masked_max
from compass_jax.rl.diagnostics import Diagnostics, mean_of, share_of
from compass_jax.rl.espo import espo, group_members
from compass_jax.rl.grouping import group_sum, spread
from compass_jax.rl.shapes import require_shape
from compass_jax.rl.surrogate import (
    Surrogate,
    clipped_surrogate,
    group_ratio,
    kl_k3,
    to_tokens,
    token_log_ratio,
    unit_ratio,
)


def grpo(
    logp: Float[Array, "b t"],
    old_logp: Float[Array, "b t"],
    advantage: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """Each token has its own ratio (GRPO, arXiv 2402.03300, eq. 3):

        min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),    r_t = pi(t) / pi_old(t)

    DAPO (arXiv 2503.14476, eq. 8) is this with a higher upper clip and all tokens weighing the
    same; Dr.GRPO (arXiv 2503.20783, eq. 3) with a constant denominator and no division by std.
    """
    require_shape(
        "grpo", logp.shape[:2], logp=logp, old_logp=old_logp, advantage=advantage, mask=mask
    )
    return clipped_surrogate(
        jnp.exp(token_log_ratio(logp, old_logp, mask)),
        advantage,
        mask,
        clip_low,
        clip_high,
        dual_clip,
    )


def gspo(
    logp: Float[Array, "b t"],
    old_logp: Float[Array, "b t"],
    advantage: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    clip_low: float,
    clip_high: float,
    dual_clip: float = 0.0,
) -> Surrogate:
    """The reward is the sequence's, so the ratio is too (GSPO-token, arXiv 2507.18071, eq. 13-14):

    min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)
    s_t = sg[s] * pi(t) / sg[pi(t)],    s = exp(mean over the response of log(pi / pi_old))
    """
    require_shape(
        "gspo", logp.shape[:2], logp=logp, old_logp=old_logp, advantage=advantage, mask=mask
    )
    s = group_ratio(token_log_ratio(logp, old_logp, mask), mask[:, :, None])
    return clipped_surrogate(
        s * unit_ratio(logp, mask), advantage, mask, clip_low, clip_high, dual_clip
    )


def cispo(
    logp: Float[Array, "b t"],
    old_logp: Float[Array, "b t"],
    advantage: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    ratio_max: float,
) -> Surrogate:
    """No token loses its gradient, only its weight is bounded (CISPO, arXiv 2506.13585, eq. 4-5,
    upper bound alone):

    sg[min(r_t, ratio_max)] A_t log pi(t)
    """
    require_shape(
        "cispo", logp.shape[:2], logp=logp, old_logp=old_logp, advantage=advantage, mask=mask
    )
    ratio = jax.lax.stop_gradient(jnp.exp(token_log_ratio(logp, old_logp, mask)))
    zero, one = jnp.zeros((), logp.dtype), jnp.ones((), logp.dtype)
    factor = jnp.minimum(ratio, jnp.array(ratio_max, ratio.dtype)) * jax.lax.stop_gradient(
        jnp.where(mask, advantage, zero)
    )
    return Surrogate(
        factor * jnp.where(mask, logp, zero),
        jnp.where(mask, ratio, one),
        mask & (ratio > ratio_max),
        {},
    )


class PolicyInputs(NamedTuple):
    """All that an objective may read; `logp` alone carries a gradient."""

    logp: Float[Array, "b t"]
    old_logp: Float[Array, "b t"]
    old_entropy: Float[Array, "b t"]
    advantage: Float[Array, "b t"]
    mask: Bool[Array, "b t"]
    entropy_group: Int[Array, "b t"] | None
    vocab_size: int


def _espo(x: PolicyInputs, config: ObjectiveConfig) -> Surrogate:
    if x.entropy_group is None:
        raise ValueError(
            "policy_objective: espo needs entropy_group (prepare computes it once per rollout)"
        )
    return espo(
        x.logp,
        x.old_logp,
        x.old_entropy,
        x.advantage,
        x.mask,
        x.entropy_group,
        config,
        x.vocab_size,
    )


def _grpo(x: PolicyInputs, config: ObjectiveConfig) -> Surrogate:
    return grpo(x.logp, x.old_logp, x.advantage, x.mask, *config.clips, config.dual_clip)


OBJECTIVES: dict[str, Callable[[PolicyInputs, ObjectiveConfig], Surrogate]] = {
    "grpo": _grpo,
    "dapo": _grpo,
    "dr_grpo": _grpo,
    "gspo": lambda x, config: gspo(
        x.logp, x.old_logp, x.advantage, x.mask, *config.clips, config.dual_clip
    ),
    "cispo": lambda x, config: cispo(
        x.logp, x.old_logp, x.advantage, x.mask, config.cispo_ratio_max
    ),
    "espo": _espo,
}


def policy_objective(
    logp: Float[Array, "b t"],
    old_logp: Float[Array, "b t"],
    old_entropy: Float[Array, "b t"],
    advantage: Float[Array, "b t"],
    weight: Float[Array, "b t"],
    config: ObjectiveConfig,
    *,
    mask: Bool[Array, "b t"],
    entropy_group: Int[Array, "b t"] | None = None,
    ref_logp: Float[Array, "b t"] | None = None,
    vocab_size: int,
) -> tuple[Float[Array, "b t"], Diagnostics]:
    """The objective of each token, times its `weight`, less `kl_coef` times k3 to the reference;
    and diagnostics to merge.

    One row is one sequence. Arrays may hold anything, NaN included, outside the mask: value and
    gradient there are 0. Differentiable in `logp` only. `vocab_size` counts the real columns of the
    LM head. ValueError for mixed shapes, a missing `entropy_group` (espo), or a missing `ref_logp`
    with `kl_coef` > 0.
    """
    arrays = dict(
        old_logp=old_logp,
        old_entropy=old_entropy,
        advantage=advantage,
        weight=weight,
        mask=mask,
        entropy_group=entropy_group,
        ref_logp=ref_logp,
    )
    require_shape("policy_objective", (None, None), logp=logp)
    require_shape("policy_objective", logp.shape, **arrays)
    if config.kl_coef > 0 and ref_logp is None:
        raise ValueError(
            f"policy_objective: rl.objective.kl_coef = {config.kl_coef} needs ref_logp"
        )
    fixed = jax.lax.stop_gradient
    inputs = PolicyInputs(
        logp, fixed(old_logp), fixed(old_entropy), fixed(advantage), mask, entropy_group, vocab_size
    )
    surrogate = OBJECTIVES[config.name](inputs, config)
    value, diagnostics = (
        surrogate.value,
        _policy_diagnostics(logp, old_logp, surrogate, mask) | surrogate.diagnostics,
    )
    if ref_logp is not None:
        penalty = kl_k3(-token_log_ratio(logp, ref_logp, mask))
        value = value - config.kl_coef * penalty
        diagnostics["policy/ref_kl_k3"] = mean_of(penalty, mask)
    return value * fixed(jnp.where(mask, weight, jnp.zeros((), weight.dtype))), diagnostics


def _policy_diagnostics(
    logp: Float[Array, "b t"],
    old_logp: Float[Array, "b t"],
    surrogate: Surrogate,
    mask: Bool[Array, "b t"],
) -> Diagnostics:
    """Of the ratio that the objective clips: a token's for grpo, a sequence's for gspo, an entropy
    group's for espo.

    `policy/kl_k3` estimates KL(pi_old || pi), per token, from the tokens that pi_old sampled.
    """
    ratio, one = jax.lax.stop_gradient(surrogate.ratio), jnp.ones((), logp.dtype)
    return {
        "policy/kl_k3": mean_of(kl_k3(token_log_ratio(logp, old_logp, mask)), mask),
        "policy/clip_frac": share_of(surrogate.clipped, mask, logp.dtype),
        "policy/ratio_max": (masked_max(ratio, mask), one),
        "policy/ratio_dev_max": (masked_max(jnp.abs(ratio - 1), mask), one),
    }


def response_weight(
    group: Int[Array, "b"], known: Bool[Array, "b"], n_groups: int, dtype
) -> Float[Array, "b"]:
    """1 / (G s_g): every group with a known sample weighs the same, however many samples it has;
    unknown and padding rows 0.
    """
    known = known & (group >= 0)
    samples = group_sum(known.astype(jnp.int32), group, n_groups)
    groups = jnp.sum(samples > 0, dtype=jnp.int32)
    share = jnp.ones((), dtype) / jnp.maximum(spread(samples, group) * groups, 1).astype(dtype)
    return jnp.where(known, share, jnp.zeros((), dtype))


class WeightInputs(NamedTuple):
    """All that a normaliser may read: every row of one update."""

    mask: Bool[Array, "b t"]
    group: Int[Array, "b"]
    known: Bool[Array, "b"]
    n_groups: int
    entropy_group: Int[Array, "b t"] | None
    config: ObjectiveConfig
    max_new_tokens: int | None
    dtype: jnp.dtype

    @property
    def responses(self) -> Float[Array, "b 1"]:
        """The share of each response in a mean over responses."""
        return response_weight(self.group, self.known, self.n_groups, self.dtype)[:, None]


def token_mean(x: WeightInputs) -> Float[Array, "b t"]:
    """Mean over responses of the mean over a response's tokens: 1 / (tokens of the response)."""
    count = jnp.maximum(jnp.sum(x.mask, axis=1, keepdims=True), 1).astype(x.dtype)
    return x.responses * (x.mask.astype(x.dtype) / count)


def all_token_mean(x: WeightInputs) -> Float[Array, "b t"]:
    """Mean over all tokens of the update: a long response weighs more (DAPO, arXiv 2503.14476,
    section 3.3).
    """
    counted = x.mask & (x.known & (x.group >= 0))[:, None]
    return counted.astype(x.dtype) / jnp.maximum(jnp.sum(counted), 1).astype(x.dtype)


def constant_length_mean(x: WeightInputs) -> Float[Array, "b t"]:
    """Mean over responses of the sum over a response's tokens / the largest number of new tokens
    (Dr.GRPO, arXiv 2503.20783, section 3.2).
    """
    if x.max_new_tokens is None:
        raise ValueError(
            "token_weights: dr_grpo needs max_new_tokens, the constant that it divides by"
        )
    return x.responses * (x.mask.astype(x.dtype) / x.max_new_tokens)


def entropy_group_mean(x: WeightInputs) -> Float[Array, "b t"]:
    """Mean over responses, over their non-empty entropy groups, over a group's tokens: one of a
    small group weighs more (arXiv 2512.00499v2).
    """
    if x.entropy_group is None:
        raise ValueError("token_weights: espo needs entropy_group")
    member = group_members(x.entropy_group, x.mask, len(x.config.espo_quantiles) + 1)
    tokens = jnp.sum(member, axis=1).astype(x.dtype)
    filled = jnp.maximum(jnp.sum(tokens > 0, axis=1, keepdims=True), 1).astype(x.dtype)
    return x.responses * to_tokens(
        jnp.ones((), x.dtype) / (jnp.maximum(tokens, jnp.ones((), x.dtype)) * filled), member
    )


WEIGHTS: dict[str, Callable[[WeightInputs], Float[Array, "b t"]]] = {
    "grpo": token_mean,
    "dapo": all_token_mean,
    "dr_grpo": constant_length_mean,
    "gspo": token_mean,
    "cispo": all_token_mean,
    "espo": entropy_group_mean,
}


def token_weights(
    mask: Bool[Array, "b t"],
    group: Int[Array, "b"],
    known: Bool[Array, "b"],
    n_groups: int,
    config: ObjectiveConfig,
    entropy_group: Int[Array, "b t"] | None = None,
    dtype=jnp.float32,
    max_new_tokens: int | None = None,
) -> Float[Array, "b t"]:
    """The normaliser of one update as a weight per token, so that no split into buckets or
    micro-batches changes the gradient.

    A mean over responses is one over the groups with a known sample, of the mean over a group's
    known samples. Give it all rows of the update. Except for dr_grpo, which divides by
    `max_new_tokens` (ValueError without it), the weights sum to 1 if every response that counts has
    tokens; samples with unknown reward and padding have 0.
    """
    require_shape("token_weights", (None, None), mask=mask)
    require_shape("token_weights", mask.shape, entropy_group=entropy_group)
    require_shape("token_weights", mask.shape[:1], group=group, known=known)
    return WEIGHTS[config.name](
        WeightInputs(mask, group, known, n_groups, entropy_group, config, max_new_tokens, dtype)
    )
