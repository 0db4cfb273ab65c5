"""ESPO, entropy-adaptive group policy optimisation (arXiv 2512.00499v2): tokens of like entropy
share a ratio and a clip range.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.config import ObjectiveConfig
from compass_jax.masked import masked_quantile
from compass_jax.rl.diagnostics import Diagnostics, mean_of, share_of
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


def entropy_groups(
    old_entropy: Float[Array, "b t"], mask: Bool[Array, "b t"], quantiles: tuple[float, ...]
) -> Int[Array, "b t"]:
    """The entropy group tau of each token: the number of thresholds <= e_t, and -1 outside the
    mask.

    A threshold is a quantile, linearly interpolated, of the response's own masked entropies: (0.8,)
    makes group 1 the 20% of the tokens with the highest entropy. No quantiles: one group. Ties may
    leave a group empty.
    """
    require_shape("entropy_groups", old_entropy.shape[:2], old_entropy=old_entropy, mask=mask)
    index = jnp.zeros(mask.shape, jnp.int32)
    for q in quantiles:
        index = index + (masked_quantile(old_entropy, mask, q)[:, None] <= old_entropy).astype(
            jnp.int32
        )
    return jnp.where(mask, index, -1)


def group_members(
    entropy_group: Int[Array, "b t"], mask: Bool[Array, "b t"], n: int
) -> Bool[Array, "b t n"]:
    """Whether a token of the mask is in each of the `n` entropy groups of its response."""
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
    """eps_tau = max(alpha * mean_{t in tau} e_t / ln v, floor), and where the floor acts (arXiv
    2512.00499v2, eq. 8).
    """
    entropy = jax.lax.stop_gradient(
        jnp.where(jnp.any(member, axis=2), old_entropy, jnp.zeros((), old_entropy.dtype))
    )
    adaptive = alpha * group_mean(entropy, member) / math.log(vocab_size)
    return jnp.maximum(adaptive, floor), adaptive < floor


def espo(
    logp: Float[Array, "b t"],
    old_logp: Float[Array, "b t"],
    old_entropy: Float[Array, "b t"],
    advantage: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    entropy_group: Int[Array, "b t"],
    config: ObjectiveConfig,
    vocab_size: int,
) -> Surrogate:
    """Uncertain tokens may move further than certain ones (arXiv 2512.00499v2, eq. 5-9), per token
    of entropy group tau:

        min(s A, clip(s, 1 - eps_tau, 1 + eps_tau) A)
        s_tau = exp(mean_{t in tau} log(pi / pi_old)),    s = sg[s_tau] * pi / sg[pi]
                                                          (`espo_token_form` "gspo")
                                                          s = sg[s_tau] * pi / sg[pi_old]
                                                              ("printed")

    eps_tau is `clip_range`, or clip_low / clip_high with `espo_fixed_clip`. The mean over tokens,
    groups and responses is in the weights. With one group and the fixed clip this is GSPO.
    `espo_every_token` is the paper's ablation "without grouping": a token is a group of its own, s
    = pi / pi_old, and its clip range is that of its own entropy.
    """
    require_shape(
        "espo",
        logp.shape[:2],
        logp=logp,
        old_logp=old_logp,
        old_entropy=old_entropy,
        advantage=advantage,
        mask=mask,
        entropy_group=entropy_group,
    )
    member = group_members(entropy_group, mask, len(config.espo_quantiles) + 1)
    log_ratio = token_log_ratio(logp, old_logp, mask)
    token = unit_ratio(logp, mask) if config.espo_token_form == "gspo" else jnp.exp(log_ratio)
    ratio = (
        jnp.exp(log_ratio) if config.espo_every_token else group_ratio(log_ratio, member) * token
    )
    if config.espo_fixed_clip:
        surrogate = clipped_surrogate(ratio, advantage, mask, *config.clips, config.dual_clip)
        return surrogate._replace(
            diagnostics=_clip_diagnostics(surrogate.clipped, mask, member, logp.dtype)
        )
    if config.espo_every_token:
        adaptive = (
            config.espo_alpha
            * jax.lax.stop_gradient(jnp.where(mask, old_entropy, jnp.zeros((), old_entropy.dtype)))
            / math.log(vocab_size)
        )
        epsilon, floored = jnp.maximum(adaptive, config.espo_floor), adaptive < config.espo_floor
        surrogate = clipped_surrogate(ratio, advantage, mask, epsilon, epsilon, config.dual_clip)
        found = {
            "espo/group_0/epsilon": mean_of(epsilon, mask),
            "espo/group_0/floor_frac": share_of(floored, mask, epsilon.dtype),
        }
        return surrogate._replace(
            diagnostics=_clip_diagnostics(surrogate.clipped, mask, member, logp.dtype) | found
        )
    epsilon, floored = clip_range(
        old_entropy, member, config.espo_alpha, config.espo_floor, vocab_size
    )
    per_token = to_tokens(epsilon, member)
    surrogate = clipped_surrogate(ratio, advantage, mask, per_token, per_token, config.dual_clip)
    diagnostics = _clip_diagnostics(
        surrogate.clipped, mask, member, logp.dtype
    ) | _range_diagnostics(epsilon, floored, member)
    return surrogate._replace(diagnostics=diagnostics)


def _clip_diagnostics(
    clipped: Bool[Array, "b t"], mask: Bool[Array, "b t"], member: Bool[Array, "b t n"], dtype
) -> Diagnostics:
    """Per group: the share of its tokens that are clipped, and its share of all tokens."""
    found: Diagnostics = {}
    for i in range(member.shape[2]):
        found[f"espo/group_{i}/clip_frac"] = share_of(clipped, member[:, :, i], dtype)
        found[f"espo/group_{i}/token_frac"] = share_of(member[:, :, i], mask, dtype)
    return found


def _range_diagnostics(
    epsilon: Float[Array, "b n"], floored: Bool[Array, "b n"], member: Bool[Array, "b t n"]
) -> Diagnostics:
    """Per group, over the responses in which it is not empty: mean clip range, share held up by the
    floor.
    """
    filled = jnp.any(member, axis=1)
    found: Diagnostics = {}
    for i in range(member.shape[2]):
        found[f"espo/group_{i}/epsilon"] = mean_of(epsilon[:, i], filled[:, i])
        found[f"espo/group_{i}/floor_frac"] = share_of(floored[:, i], filled[:, i], epsilon.dtype)
    return found
