"""Parts shared by the clipped policy objectives: ratios under a mask, the clipped surrogate and the
k3 estimator of KL.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compass_jax.base.masked import masked_mean
from compass_jax.rl.diagnostics import Diagnostics

MAX_TOKEN_LOG_RATIO = 20.0
MAX_MEAN_LOG_RATIO = 10.0  # of a sequence or an entropy group


class Surrogate(NamedTuple):
    """A policy objective per token, before weights and KL. Outside the mask: value 0, ratio 1, not
    clipped.
    """

    value: Float[Array, "b t"]
    ratio: Float[Array, "b t"]
    clipped: Bool[Array, "b t"]
    diagnostics: Diagnostics


def token_log_ratio(
    logp: Float[Array, "b t"], old_logp: Float[Array, "b t"], mask: Bool[Array, "b t"]
) -> Float[Array, "b t"]:
    """Computes log(pi / pi_old) clamped to +-20, 0 outside the mask, where both may hold any value.

    Both are replaced outside the mask *before* the subtraction: a NaN in a branch not taken would
    still reach the gradient.
    """
    zero = jnp.zeros((), logp.dtype)
    old_logp = jax.lax.stop_gradient(old_logp)
    return jnp.clip(
        jnp.where(mask, logp, zero) - jnp.where(mask, old_logp, zero),
        -MAX_TOKEN_LOG_RATIO,
        MAX_TOKEN_LOG_RATIO,
    )


def group_mean(x: Float[Array, "b t"], member: Bool[Array, "b t n"]) -> Float[Array, "b n"]:
    """Computes the mean of `x` over each of a row's n groups of tokens; 0 for an empty group."""
    return masked_mean(jnp.broadcast_to(x[:, :, None], member.shape), member, axis=1)


def to_tokens(x: Float[Array, "b n"], member: Bool[Array, "b t n"]) -> Float[Array, "b t"]:
    """Returns the value of each token's group; 0 for a token without a group."""
    # A token is in one group at most, so the sum over groups [b, t, n] has one term.
    return jnp.sum(jnp.where(member, x[:, None, :], jnp.zeros((), x.dtype)), axis=2)


def group_ratio(
    log_ratio: Float[Array, "b t"], member: Bool[Array, "b t n"]
) -> Float[Array, "b t"]:
    """Computes s = exp(mean over the group's tokens of log(pi / pi_old)) at each token, the mean
    clamped to +-10; without gradient.
    """
    mean = jnp.clip(group_mean(log_ratio, member), -MAX_MEAN_LOG_RATIO, MAX_MEAN_LOG_RATIO)
    return jax.lax.stop_gradient(jnp.exp(to_tokens(mean, member)))


def unit_ratio(logp: Float[Array, "b t"], mask: Bool[Array, "b t"]) -> Float[Array, "b t"]:
    """Computes pi / sg[pi]: the value 1 with the gradient of logp at each token of the mask."""
    logp = jnp.where(mask, logp, jnp.zeros((), logp.dtype))
    return jnp.exp(logp - jax.lax.stop_gradient(logp))


def clipped_surrogate(
    ratio: Float[Array, "b t"],
    advantage: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    low: Float[Array, "b t"] | float,
    high: Float[Array, "b t"] | float,
    dual: float = 0.0,
) -> Surrogate:
    """Computes PPO's clipped surrogate (arXiv 1707.06347, eq. 7).

        min(r A, clip(r, 1 - low, 1 + high) A)

    Written by cases: the clipped term is the smaller one exactly where A > 0 and r > 1 + high, or A
    < 0 and r < 1 - low. There the value is constant in r and the gradient 0; everywhere else it is
    r A. With `dual` = c > 1, where A < 0, the value is also at least c A (dual-clip PPO, arXiv
    1912.09729, eq. 5): a wrong answer that has become likely cannot dominate the update.
    """
    zero, one = jnp.zeros((), ratio.dtype), jnp.ones((), ratio.dtype)
    advantage = jax.lax.stop_gradient(jnp.where(mask, advantage, zero))
    too_high, too_low = (advantage > 0) & (ratio > 1 + high), (advantage < 0) & (ratio < 1 - low)
    bounded = jnp.where(too_high, 1 + high, jnp.where(too_low, 1 - low, ratio))
    if dual:
        # The value is c A there, which is constant in r, so these tokens count as clipped.
        too_bad = (advantage < 0) & (ratio > dual)
        bounded, too_high = (
            jnp.where(too_bad, jnp.array(dual, ratio.dtype), bounded),
            too_high | too_bad,
        )
    value = jnp.where(mask, bounded * advantage, zero)
    return Surrogate(value, jnp.where(mask, ratio, one), mask & (too_high | too_low), {})


def kl_k3(log_ratio: Float[Array, "b t"]) -> Float[Array, "b t"]:
    """Computes the k3 estimator of KL(p || q) per token, exp(d) - d - 1 >= 0 with d = log(q / p) at
    tokens sampled from p (arXiv 2402.03300, eq. 4).
    """
    # exp(d) - 1 would lose most digits of a small d.
    return jnp.expm1(log_ratio) - log_ratio
