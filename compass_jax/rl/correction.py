"""The mismatch between the sampler's and the trainer's probabilities at the same parameters, and
the weights that correct for it.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from compass_jax.base.masked import masked_sum
from compass_jax.config import Correction
from compass_jax.rl.corrections.inputs import CorrectionInputs
from compass_jax.rl.diagnostics import Diagnostics, mean_of, share_of
from compass_jax.rl.shapes import require_shape
from compass_jax.rl.surrogate import kl_k3, token_log_ratio

EXTREME_RATIO = 2.0


def mismatch(
    old_logp: Float[Array, "b t"], rollout_logp: Float[Array, "b t"], mask: Bool[Array, "b t"]
) -> Diagnostics:
    """Computes the mismatch of rollout and training, with rho = exp(old_logp - rollout_logp), the
    log-ratio clamped to +-20:

        logp_abs_diff   mean |old_logp - rollout_logp| (not clamped)
        kl_k3           mean(rho - 1 - ln rho), an estimate of KL(rollout || training)
        extreme_frac    share of tokens with max(rho, 1 / rho) > 2
        ess             (sum rho)^2 / (n sum rho^2), effective sample size as a share; kept as
                        (sum rho, sum rho^2, n), since only sums add up
    """
    require_shape("mismatch", (None, None), old_logp=old_logp)
    require_shape("mismatch", old_logp.shape, rollout_logp=rollout_logp, mask=mask)
    log_rho = token_log_ratio(old_logp, rollout_logp, mask)
    rho = jnp.exp(log_rho)
    return {
        "mismatch/logp_abs_diff": mean_of(jnp.abs(old_logp - rollout_logp), mask),
        "mismatch/kl_k3": mean_of(kl_k3(log_rho), mask),
        "mismatch/extreme_frac": share_of(
            jnp.abs(log_rho) > math.log(EXTREME_RATIO), mask, old_logp.dtype
        ),
        "mismatch/ess": (
            *mean_of(rho, mask)[:1],
            masked_sum(jnp.square(rho), mask),
            jnp.sum(mask).astype(old_logp.dtype),
        ),
    }


def correction_weight(
    old_logp: Float[Array, "b t"],
    rollout_logp: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    correction: Correction,
) -> tuple[Float[Array, "b t"], Diagnostics]:
    """Computes the weight of each token outside the clip, without gradient; 1 outside the mask.

    Dropped tokens stay in the denominator: multiply the normaliser by the weight, never
    renormalise.
    """
    require_shape("correction_weight", (None, None), old_logp=old_logp)
    require_shape("correction_weight", old_logp.shape, rollout_logp=rollout_logp, mask=mask)
    log_ratio = jax.lax.stop_gradient(token_log_ratio(old_logp, rollout_logp, mask))
    with correction.calling("weights"):
        weight = correction.weights(CorrectionInputs(log_ratio, mask))
        require_shape("weights", mask.shape, result=weight)
    weight = jnp.where(mask, weight, jnp.ones((), weight.dtype))
    return weight, {
        "correction/weight_mean": mean_of(weight, mask),
        # The log-ratio is clamped, so a ratio is never 0: a weight of 0 is a dropped token.
        "correction/dropped_frac": share_of(weight == 0, mask, weight.dtype),
    }
