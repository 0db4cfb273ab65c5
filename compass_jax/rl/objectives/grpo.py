"""GRPO (arXiv 2402.03300), and DAPO (2503.14476) and Dr.GRPO (2503.20783), which change its
clipping and its mean.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.config import Objective, RLConfig
from compass_jax.config.ranges import Clip, DualClip
from compass_jax.rl.objectives.inputs import (
    PolicyInputs,
    WeightInputs,
    all_token_mean,
    token_mean,
)
from compass_jax.rl.surrogate import Surrogate, clipped_surrogate, token_log_ratio


@dataclass(frozen=True)
class Grpo(Objective):
    """GRPO (arXiv 2402.03300, eq. 3), with a ratio per token:

        min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t),    r_t = pi(t) / pi_old(t)

    `mean` "response" is the mean over responses of the mean over a response's tokens; "tokens" is
    the mean over all tokens of the update, where a long response weighs more (DAPO, section 3.3);
    "constant" is the mean over responses of a response's sum divided by the largest number of new
    tokens, with advantages that are not divided by a standard deviation (Dr.GRPO, section 3.2).
    """

    needs_advantage: ClassVar[bool] = True
    combines_responses: ClassVar[bool] = False

    clip_low: Clip = 0.2
    """Lower clip: the ratio is clipped at 1 minus this number."""
    clip_high: Clip = 0.2
    """Upper clip: the ratio is clipped at 1 plus this number."""
    dual_clip: DualClip = 0.0
    """Dual clip: the largest ratio (a number) if the advantage is negative; 0: off."""
    mean: Literal["response", "tokens", "constant"] = "response"
    """Mean over tokens: by response (GRPO), of all tokens (DAPO), or over a constant length
    (Dr.GRPO).
    """

    @property
    def divides_by_std(self) -> bool:
        """Whether advantages are divided by a standard deviation: not for Dr.GRPO."""
        return self.mean != "constant"

    @property
    def averages_groups(self) -> bool:
        """Whether a sample weighs less in a larger group: not in a mean over all tokens (DAPO)."""
        return self.mean != "tokens"

    def surrogate(self, inputs: PolicyInputs) -> Surrogate:
        """Computes the clipped surrogate of each token."""
        ratio = jnp.exp(token_log_ratio(inputs.logp, inputs.old_logp, inputs.mask))
        clips = self.clip_low, self.clip_high, self.dual_clip
        return clipped_surrogate(ratio, inputs.advantage, inputs.mask, *clips)

    def weights(self, inputs: WeightInputs) -> Float[Array, "b t"]:
        """Returns the weights of `mean`. Raises ValueError where its divisor `max_new_tokens` is
        None.
        """
        if self.mean == "tokens":
            return all_token_mean(inputs)
        if self.mean == "response":
            return token_mean(inputs)
        if inputs.max_new_tokens is None:
            raise ValueError("dr_grpo needs max_new_tokens, the constant that it divides by")
        return inputs.whole_responses * (inputs.mask.astype(inputs.dtype) / inputs.max_new_tokens)


def grpo(**changes: Any) -> Grpo:
    """Returns GRPO's published settings, with `changes`."""
    return Grpo(**changes)


def dr_grpo(**changes: Any) -> Grpo:
    """Returns Dr.GRPO: a constant divisor, and advantages without a division."""
    return Grpo(**{"mean": "constant", **changes})


def with_dr_grpo(rl: RLConfig, max_new_tokens: int) -> RLConfig:
    """Returns `rl` with Dr.GRPO's objective (arXiv 2503.20783), at any length of an answer."""
    return dataclasses.replace(rl, objective=dr_grpo())


def dapo_surrogate(**changes: Any) -> Grpo:
    """Returns DAPO's objective alone: a higher upper clip and equal weights of all tokens."""
    return Grpo(**{"clip_high": 0.28, "mean": "tokens", **changes})


def dapo(rl: RLConfig, max_new_tokens: int) -> RLConfig:
    """Returns `rl` with DAPO (arXiv 2503.14476): its objective, its dynamic sampling instead of
    RL-ZVP, screening and posterior selection, and its overlong penalty over the last fifth of an
    answer, halved because rewards are 0 and 1.
    """
    zero = dataclasses.replace(
        rl.zero_variance, rl_zvp=False, posterior=False, dynamic_sampling=True
    )
    buffer = max(max_new_tokens // 5, 1)  # 4,096 of 20,480
    shaping = dataclasses.replace(rl.shaping, overlong_penalty=0.5, overlong_buffer_tokens=buffer)
    return dataclasses.replace(
        rl, objective=dapo_surrogate(), step_policy=None, zero_variance=zero, shaping=shaping
    )
