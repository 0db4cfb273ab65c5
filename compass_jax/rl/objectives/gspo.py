"""GSPO, group sequence policy optimisation (arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Array, Float

from compass_jax.config import Objective
from compass_jax.config.ranges import Clip, DualClip
from compass_jax.rl.objectives.inputs import PolicyInputs, WeightInputs, token_mean
from compass_jax.rl.surrogate import (
    Surrogate,
    clipped_surrogate,
    group_ratio,
    token_log_ratio,
    unit_ratio,
)


@dataclass(frozen=True)
class Gspo(Objective):
    """GSPO-token (arXiv 2507.18071, eq. 13-14), with a ratio per sequence, as the reward is:

    min(s_t A_t, clip(s_t, 1 - clip_low, 1 + clip_high) A_t)
    s_t = sg[s] * pi(t) / sg[pi(t)],    s = exp(mean over the response of log(pi / pi_old))
    """

    needs_advantage: ClassVar[bool] = True
    combines_responses: ClassVar[bool] = False

    clip_low: Clip = 3e-4
    """Lower clip: the ratio is clipped at 1 minus this number."""
    clip_high: Clip = 4e-4
    """Upper clip: the ratio is clipped at 1 plus this number."""
    dual_clip: DualClip = 0.0
    """Dual clip: the largest ratio (a number) if the advantage is negative; 0: off."""

    def surrogate(self, inputs: PolicyInputs) -> Surrogate:
        """Computes the clipped surrogate of each token from its sequence's ratio."""
        log_ratio = token_log_ratio(inputs.logp, inputs.old_logp, inputs.mask)
        s = group_ratio(log_ratio, inputs.mask[:, :, None]) * unit_ratio(inputs.logp, inputs.mask)
        clips = self.clip_low, self.clip_high, self.dual_clip
        return clipped_surrogate(s, inputs.advantage, inputs.mask, *clips)

    def weights(self, inputs: WeightInputs) -> Float[Array, "b t"]:
        """Returns the weights of a mean over responses of the mean over a response's tokens."""
        return token_mean(inputs)
