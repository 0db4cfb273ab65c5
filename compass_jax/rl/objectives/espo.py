"""ESPO, entropy-adaptive group policy optimisation (arXiv 2512.00499v2): tokens of similar
entropy share a ratio and a clip range.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.masked import masked_quantile
from compass_jax.config import Objective
from compass_jax.config.errors import check
from compass_jax.config.ranges import Clip, DualClip, Fraction, FromZero
from compass_jax.rl.diagnostics import Diagnostics, mean_of, share_of
from compass_jax.rl.objectives.inputs import PolicyInputs, WeightInputs
from compass_jax.rl.shapes import require_shape
from compass_jax.rl.surrogate import (
    Surrogate,
    clipped_surrogate,
    group_mean,
    group_ratio,
    to_tokens,
    token_log_ratio,
    unit_ratio,
)


@dataclass(frozen=True)
class Espo(Objective):
    """ESPO (arXiv 2512.00499v2, eq. 5-9): tokens of high entropy may move further than others. For
    a token of entropy group tau:

        min(s A, clip(s, 1 - eps_tau, 1 + eps_tau) A)
        s_tau = exp(mean_{t in tau} log(pi / pi_old))
        s = sg[s_tau] * pi / sg[pi]  (`token_form` "gspo"),  sg[s_tau] * pi / sg[pi_old] ("printed")

    eps_tau is `clip_range`, or clip_low / clip_high with `fixed_clip`. With one group and the fixed
    clip this is GSPO. `every_token` is the paper's ablation "without grouping": each token is its
    group, s = pi / pi_old, and its clip range follows its entropy.
    """

    needs_advantage: ClassVar[bool] = True
    combines_responses: ClassVar[bool] = False

    alpha: FromZero = 0.02
    """Clip range of a group: this factor times its mean entropy over the entropy of a uniform
    distribution.
    """
    floor: FromZero = 1e-5
    """Smallest clip range (a number, the distance of the ratio from 1)."""
    quantiles: tuple[Fraction, ...] = (0.8,)
    """Boundaries of the entropy groups: shares of a response's tokens by entropy; (): one group."""
    token_form: Literal["gspo", "printed"] = "gspo"
    """Denominator of a token's ratio: its detached probability (gspo), or the old one, as the paper
    prints it (printed).
    """
    every_token: bool = False
    """Whether each token is its own group, the paper's ablation; quantiles must be ()."""
    fixed_clip: bool = False
    """Clip by clip_low and clip_high instead of the entropy."""
    clip_low: Clip = 3e-4
    """Lower clip with fixed_clip: the ratio is clipped at 1 minus this number."""
    clip_high: Clip = 4e-4
    """Upper clip with fixed_clip: the ratio is clipped at 1 plus this number."""
    dual_clip: DualClip = 0.0
    """Dual clip: the largest ratio (a number) if the advantage is negative; 0: off."""

    def groups(
        self, old_entropy: Float[Array, "b t"], mask: Bool[Array, "b t"]
    ) -> Int[Array, "b t"]:
        """Returns the entropy group of each token."""
        return entropy_groups(old_entropy, mask, self.quantiles)

    def surrogate(self, inputs: PolicyInputs) -> Surrogate:
        """Computes the clipped surrogate of each token from its group's ratio and clip range."""
        member = self._members(inputs.entropy_group, inputs.mask)
        log_ratio = token_log_ratio(inputs.logp, inputs.old_logp, inputs.mask)
        if self.every_token:
            ratio = jnp.exp(log_ratio)
        elif self.token_form == "gspo":
            ratio = group_ratio(log_ratio, member) * unit_ratio(inputs.logp, inputs.mask)
        else:
            ratio = group_ratio(log_ratio, member) * jnp.exp(log_ratio)
        low, high, metrics = self._range(inputs, member)
        surrogate = clipped_surrogate(
            ratio, inputs.advantage, inputs.mask, low, high, self.dual_clip
        )
        clipped = _clip_diagnostics(surrogate.clipped, inputs.mask, member, inputs.logp.dtype)
        return surrogate._replace(diagnostics=clipped | metrics)

    def weights(self, inputs: WeightInputs) -> Float[Array, "b t"]:
        """Returns the weights of a mean over responses of the mean over their non-empty entropy
        groups of the mean over a group's tokens: a token of a small group weighs more.
        """
        member = self._members(inputs.entropy_group, inputs.mask)
        one = jnp.ones((), inputs.dtype)
        # [b, n]: tokens of each entropy group; a response's empty groups are not in its mean.
        tokens = jnp.sum(member, axis=1).astype(inputs.dtype)
        groups = jnp.maximum(jnp.sum(tokens > 0, axis=1, keepdims=True), 1).astype(inputs.dtype)
        return inputs.responses * to_tokens(one / (jnp.maximum(tokens, one) * groups), member)

    def validate(self) -> None:
        super().validate()
        key, default = "rl.objective", type(self)
        check(
            self.fixed_clip
            or (self.clip_low, self.clip_high) == (default.clip_low, default.clip_high),
            f"{key}.clip_low/high = {self.clip_low}/{self.clip_high}: espo does not use them"
            " without fixed_clip; set it, or leave both out",
        )
        q = self.quantiles
        check(
            all(0 < x < 1 for x in q) and list(q) == sorted(set(q)),
            f"{key}.quantiles = {q}: must increase strictly inside (0, 1)",
        )
        check(
            not self.every_token or not q,
            f"{key}.every_token: has no use for quantiles {q}; set {key}.quantiles ()",
        )
        check(
            not self.every_token or self.token_form == "gspo",
            f"{key}.token_form = {self.token_form!r} has no effect with every_token; set 'gspo'",
        )

    def _members(self, entropy_group, mask):
        if entropy_group is None:
            raise ValueError("espo needs entropy_group (prepare computes it once per rollout)")
        return group_members(entropy_group, mask, len(self.quantiles) + 1)

    def _range(self, inputs: PolicyInputs, member):
        """Returns the lower clip, the upper clip, and their diagnostics."""
        if self.fixed_clip:
            return self.clip_low, self.clip_high, {}
        if self.every_token:
            zero = jnp.zeros((), inputs.old_entropy.dtype)
            entropy = jax.lax.stop_gradient(jnp.where(inputs.mask, inputs.old_entropy, zero))
            adaptive = self.alpha * entropy / math.log(inputs.vocab_size)
            epsilon, floored = jnp.maximum(adaptive, self.floor), adaptive < self.floor
            metrics = {
                "espo/group_0/epsilon": mean_of(epsilon, inputs.mask),
                "espo/group_0/floor_frac": share_of(floored, inputs.mask, epsilon.dtype),
            }
            return epsilon, epsilon, metrics
        epsilon, floored = clip_range(
            inputs.old_entropy, member, self.alpha, self.floor, inputs.vocab_size
        )
        per_token = to_tokens(epsilon, member)
        return per_token, per_token, _range_diagnostics(epsilon, floored, member)


def entropy_groups(
    old_entropy: Float[Array, "b t"], mask: Bool[Array, "b t"], quantiles: tuple[float, ...]
) -> Int[Array, "b t"]:
    """Returns the entropy group tau of each token: the number of thresholds <= e_t, and -1 outside
    the mask.

    A threshold is a quantile, linearly interpolated, of the response's own masked entropies: (0.8,)
    makes group 1 the 20% of the tokens with the highest entropy. No quantiles: one group. Ties may
    leave a group empty.
    """
    require_shape("entropy_groups", old_entropy.shape[:2], old_entropy=old_entropy, mask=mask)
    index = jnp.zeros(mask.shape, jnp.int32)
    for q in quantiles:
        # A quantile that falls on a token equals its entropy exactly (masked_quantile), so that
        # the token is in the upper group.
        index = index + (masked_quantile(old_entropy, mask, q)[:, None] <= old_entropy).astype(
            jnp.int32
        )
    return jnp.where(mask, index, -1)


def group_members(
    entropy_group: Int[Array, "b t"], mask: Bool[Array, "b t"], n: int
) -> Bool[Array, "b t n"]:
    """Returns whether a token of the mask is in each of the `n` entropy groups of its response."""
    return mask[:, :, None] & (
        entropy_group[:, :, None] == jnp.arange(n, dtype=entropy_group.dtype)[None, None, :]
    )


def clip_range(
    old_entropy: Float[Array, "b t"],
    member: Bool[Array, "b t n"],
    alpha: float,
    floor: float,
    vocab_size: int,
) -> tuple[Float[Array, "b n"], Bool[Array, "b n"]]:
    """Computes eps_tau = max(alpha * mean_{t in tau} e_t / ln v, floor), and where the floor acts
    (arXiv 2512.00499v2, eq. 8).
    """
    entropy = jax.lax.stop_gradient(
        jnp.where(jnp.any(member, axis=2), old_entropy, jnp.zeros((), old_entropy.dtype))
    )
    # Eq. 8 as printed lacks the sum over the group's tokens; the paper's text says "average".
    adaptive = alpha * group_mean(entropy, member) / math.log(vocab_size)
    return jnp.maximum(adaptive, floor), adaptive < floor


def _clip_diagnostics(
    clipped: Bool[Array, "b t"], mask: Bool[Array, "b t"], member: Bool[Array, "b t n"], dtype
) -> Diagnostics:
    """Returns, per group, the share of its tokens that are clipped and its share of all tokens."""
    metrics: Diagnostics = {}
    for i in range(member.shape[2]):
        metrics[f"espo/group_{i}/clip_frac"] = share_of(clipped, member[:, :, i], dtype)
        metrics[f"espo/group_{i}/token_frac"] = share_of(member[:, :, i], mask, dtype)
    return metrics


def _range_diagnostics(
    epsilon: Float[Array, "b n"], floored: Bool[Array, "b n"], member: Bool[Array, "b t n"]
) -> Diagnostics:
    """Returns, per group, over the responses in which it is not empty, the mean clip range and the
    share of ranges at the floor.
    """
    nonempty = jnp.any(member, axis=1)
    metrics: Diagnostics = {}
    for i in range(member.shape[2]):
        metrics[f"espo/group_{i}/epsilon"] = mean_of(epsilon[:, i], nonempty[:, i])
        metrics[f"espo/group_{i}/floor_frac"] = share_of(
            floored[:, i], nonempty[:, i], epsilon.dtype
        )
    return metrics
