"""The objective of a micro-batch, to be maximised: `objective = per_token.sum()` over all
micro-batches of an update, loss = -objective; and the weights of an update.

The objective's class (rl/objectives/) defines the clipping and the mean over tokens. Only `logp`
carries a gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.masked import masked_max
from compass_jax.config import Objective
from compass_jax.rl.diagnostics import Diagnostics, mean_of, share_of
from compass_jax.rl.objectives.inputs import (
    PolicyInputs,
    UpdateShares,
    WeightInputs,
    update_shares,
)
from compass_jax.rl.shapes import require_shape
from compass_jax.rl.surrogate import Surrogate, kl_k3, token_log_ratio


def policy_objective(
    logp: Float[Array, "b t"],
    old_logp: Float[Array, "b t"],
    old_entropy: Float[Array, "b t"],
    advantage: Float[Array, "b t"],
    weight: Float[Array, "b t"],
    config: Objective,
    *,
    mask: Bool[Array, "b t"],
    entropy_group: Int[Array, "b t"] | None = None,
    ref_logp: Float[Array, "b t"] | None = None,
    kl_weight: Float[Array, "b t"] | None = None,
    vocab_size: int,
) -> tuple[Float[Array, "b t"], Diagnostics]:
    """Computes each token's objective times its `weight`, less `kl_coef` times k3 to the reference
    times `kl_weight` (None: `weight`). Returns it with diagnostics to merge.

    One row is one sequence. Outside the mask arrays may hold any value, NaN included: value and
    gradient there are 0. Differentiable in `logp` only. `vocab_size` counts the real columns of the
    LM head.

    Raises:
        ValueError: shapes differ, `entropy_group` is missing (espo), or `ref_logp` is missing with
            `kl_coef` > 0.
    """
    arrays = dict(
        old_logp=old_logp,
        old_entropy=old_entropy,
        advantage=advantage,
        weight=weight,
        mask=mask,
        entropy_group=entropy_group,
        ref_logp=ref_logp,
        kl_weight=kl_weight,
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
    with config.calling("surrogate"):
        surrogate = config.surrogate(inputs)
    value, zero = surrogate.value, jnp.zeros((), weight.dtype)
    diagnostics = _policy_diagnostics(logp, old_logp, surrogate, mask) | surrogate.diagnostics
    # A weight outside the mask may be NaN, which a product with the value 0 would keep.
    weight = fixed(jnp.where(mask, weight, zero))
    if ref_logp is None:
        return value * weight, diagnostics
    # k3 takes d = log(ref / pi), so the sign of the log-ratio is reversed.
    penalty = kl_k3(-token_log_ratio(logp, ref_logp, mask))
    diagnostics["policy/ref_kl_k3"] = mean_of(penalty, mask)
    if kl_weight is None:
        return (value - config.kl_coef * penalty) * weight, diagnostics
    kl_weight = fixed(jnp.where(mask, kl_weight, zero))
    return value * weight - config.kl_coef * penalty * kl_weight, diagnostics


def _policy_diagnostics(
    logp: Float[Array, "b t"],
    old_logp: Float[Array, "b t"],
    surrogate: Surrogate,
    mask: Bool[Array, "b t"],
) -> Diagnostics:
    """Returns diagnostics of the ratio that the objective clips: a token's for grpo, a sequence's
    for gspo, an entropy group's for espo.

    `policy/kl_k3` estimates KL(pi_old || pi), per token, from the tokens that pi_old sampled.
    """
    ratio, one = jax.lax.stop_gradient(surrogate.ratio), jnp.ones((), logp.dtype)
    return {
        "policy/kl_k3": mean_of(kl_k3(token_log_ratio(logp, old_logp, mask)), mask),
        "policy/clip_frac": share_of(surrogate.clipped, mask, logp.dtype),
        "policy/ratio_max": (masked_max(ratio, mask), one),
        "policy/ratio_dev_max": (masked_max(jnp.abs(ratio - 1), mask), one),
    }


def token_weights(
    mask: Bool[Array, "b t"],
    group: Int[Array, "b"],
    known: Bool[Array, "b"],
    n_groups: int,
    config: Objective,
    entropy_group: Int[Array, "b t"] | None = None,
    dtype=jnp.float32,
    max_new_tokens: int | None = None,
    shares: UpdateShares | None = None,
) -> Float[Array, "b t"]:
    """Computes the normaliser of one update as a weight per token, so that no split into buckets or
    micro-batches changes the gradient.

    A mean over responses is the mean over the groups with a known sample of the mean over a group's
    known samples, so pass all rows of the update, or the `shares` of those that are passed. The
    weights sum to 1 if every known response has tokens (dr_grpo's do not: it divides by
    `max_new_tokens` and raises ValueError without it). Samples with unknown reward and padding have
    weight 0.
    """
    require_shape("token_weights", (None, None), mask=mask)
    require_shape("token_weights", mask.shape, entropy_group=entropy_group)
    require_shape("token_weights", mask.shape[:1], group=group, known=known)
    if shares is None:
        lengths = jnp.sum(mask, axis=1, dtype=jnp.int32)
        shares = update_shares(group, known, n_groups, lengths, dtype)
    options = n_groups, entropy_group, max_new_tokens, dtype
    with config.calling("weights"):
        return config.weights(WeightInputs(mask, group, known, *options, *shares))
