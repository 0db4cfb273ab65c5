"""A user's objective: REINFORCE in which bad answers count less than good ones."""

from dataclasses import dataclass
from typing import Annotated

import jax.numpy as jnp

from compass_jax.config import Objective
from compass_jax.config.ranges import Range
from compass_jax.rl.objectives.inputs import PolicyInputs, WeightInputs, token_mean
from compass_jax.rl.surrogate import Surrogate


@dataclass(frozen=True)
class Forgiving(Objective):
    """REINFORCE: A log pi where the advantage A is positive, else `negative` times A log pi."""

    negative: Annotated[float, Range(0, 1)] = 0.25
    """Weight of the gradient of answers below their group's mean."""

    def surrogate(self, inputs: PolicyInputs) -> Surrogate:
        """Computes each token's objective, without a clip."""
        logp = jnp.where(inputs.mask, inputs.logp, jnp.zeros_like(inputs.logp))
        advantage = jnp.where(inputs.mask, inputs.advantage, jnp.zeros_like(inputs.advantage))
        factor = jnp.where(advantage < 0, self.negative * advantage, advantage)
        nowhere = jnp.zeros_like(inputs.mask)
        return Surrogate(factor * logp, jnp.ones_like(logp), nowhere, {})

    def weights(self, inputs: WeightInputs):
        """Returns the tokens' weights: a mean over answers of the mean over an answer's tokens."""
        return token_mean(inputs)
