"""What the advantages that compare with a prompt's predicted pass rate share."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.base.masked import masked_mean
from compass_jax.base.records import PREDICTED
from compass_jax.rl.advantages.inputs import AdvantageInputs

EPSILON = 1e-4  # added to the standard deviation, as a share of the range of the rewards


def float_column(inputs: AdvantageInputs, name: str) -> Float[Array, "b"]:
    """Returns a column in the type of the rewards. Raises ValueError where it is missing."""
    if name not in inputs.columns:
        raise ValueError(
            f"the advantage reads the column {name!r} of StepArrays, which is missing: fill it with"
            " the predictions of the rows' prompts, or take another advantage, such as rloo"
        )
    return inputs.columns[name].astype(inputs.reward.dtype)


def predicted_reward(inputs: AdvantageInputs) -> Float[Array, "b"]:
    """Returns the predicted reward, wrong_at + p (right_at - wrong_at) for the pass rate p."""
    rate = float_column(inputs, PREDICTED)
    return inputs.wrong_at + rate * (inputs.right_at - inputs.wrong_at)


def of_equal_samples(
    difference: Float[Array, "b"], inputs: AdvantageInputs, *, normalise: bool
) -> Float[Array, "b"]:
    """Computes advantages from the differences D between rewards and baselines:

        A_i = c_g (D_i - mean D) / (std D + EPSILON (right_at - wrong_at))      with `normalise`
        A_i = c_g D_i                                                           without

    Mean and standard deviation (ddof 0) are over the known rewards of the update. In float32 equal
    differences deviate by up to 1e-6 of the range of the rewards, which EPSILON keeps below 0.01.
    c_g is `inputs.sample_factor`, with which the weight of a sample does not depend on the number
    of its group's samples.
    """
    if normalise:
        known = inputs.known
        difference = difference - masked_mean(difference, known)
        deviation = jnp.sqrt(masked_mean(jnp.square(difference), known))
        difference = difference / (deviation + EPSILON * (inputs.right_at - inputs.wrong_at))
    return difference if inputs.sample_factor is None else difference * inputs.sample_factor
