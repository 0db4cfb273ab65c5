"""CISPO, clipped importance-sampling weights (MiniMax-M1, arXiv 2506.13585)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.config import Objective
from compass_jax.config.ranges import Range
from compass_jax.rl.objectives.inputs import PolicyInputs, WeightInputs, all_token_mean
from compass_jax.rl.surrogate import Surrogate, token_log_ratio


@dataclass(frozen=True)
class Cispo(Objective):
    """CISPO (arXiv 2506.13585, eq. 4-5, upper bound only): every token keeps its gradient, with a
    bounded weight:

    sg[min(r_t, ratio_max)] A_t log pi(t)
    """

    needs_advantage: ClassVar[bool] = True
    combines_responses: ClassVar[bool] = False

    ratio_max: Annotated[float, Range(1, 1e6, above=True)] = 5.0
    """Cap of a token's weight, which is its ratio (1.2 is published too)."""

    @property
    def averages_groups(self) -> bool:
        """Whether a sample weighs less in a larger group: not in a mean over all tokens."""
        return False

    def surrogate(self, inputs: PolicyInputs) -> Surrogate:
        """Computes the weighted log-prob of each token; a token above the bound is clipped."""
        logp, mask = inputs.logp, inputs.mask
        ratio = jax.lax.stop_gradient(jnp.exp(token_log_ratio(logp, inputs.old_logp, mask)))
        zero, one = jnp.zeros((), logp.dtype), jnp.ones((), logp.dtype)
        advantage = jax.lax.stop_gradient(jnp.where(mask, inputs.advantage, zero))
        factor = jnp.minimum(ratio, jnp.array(self.ratio_max, ratio.dtype)) * advantage
        return Surrogate(
            factor * jnp.where(mask, logp, zero),
            jnp.where(mask, ratio, one),
            mask & (ratio > self.ratio_max),
            {},
        )

    def weights(self, inputs: WeightInputs) -> Float[Array, "b t"]:
        """Returns the weights of a mean over all tokens of the update."""
        return all_token_mean(inputs)
