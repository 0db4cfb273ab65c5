"""Stage 3 of the zero-variance elimination: penalties that make right answers differ, and never put
a wrong one above a right one.

The penalties apply to right answers only; DAPO's overlong penalty, a baseline, applies to all.
Their ranges sum to less than the smallest difference of two raw rewards (a configuration in which
they do not is an error), so shaping cannot reverse the order of two answers.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.base.masked import masked_mean
from compass_jax.config import ShapingConfig
from compass_jax.rl.diagnostics import Diagnostics, share_of
from compass_jax.rl.grouping import UNIFORM_WITHIN
from compass_jax.rl.shapes import require_shape


def penalties(
    reward: Float[Array, "b"],
    length: Int[Array, "b"],
    repetition: Float[Array, "b"],
    config: ShapingConfig,
    *,
    right_at: float,
    max_new_tokens: int,
) -> dict[str, Float[Array, "b"]]:
    """Computes each penalty, by name; `length` in generated tokens, `repetition` in [0, 1]
    (rewards/penalties.py).

        length       of right answers, w_len * clip((n - free) / (max - free), 0, 1)
        repetition   of right answers, w_rep * repetition
        overlong     of all answers, w_over * clip((n - (max - buffer)) / buffer, 0, 1)        DAPO,
                     arXiv 2503.14476, eq. 13

    Shaped reward = raw reward - their sum.
    """
    require_shape(
        "penalties", reward.shape[:1], reward=reward, length=length, repetition=repetition
    )
    dtype = reward.dtype
    n, zero, right = length.astype(dtype), jnp.zeros((), dtype), reward >= right_at

    def ramp(start: int) -> Float[Array, "b"]:
        return jnp.clip((n - start) / max(max_new_tokens - start, 1), 0.0, 1.0).astype(dtype)

    too_long = config.length_penalty * ramp(config.length_free_tokens)
    overlong = config.overlong_penalty * ramp(max_new_tokens - config.overlong_buffer_tokens)
    right_only = {"length": too_long, "repetition": config.repetition_penalty * repetition}
    return {name: jnp.where(right, x.astype(dtype), zero) for name, x in right_only.items()} | {
        "overlong": overlong.astype(dtype)
    }


def inversion(
    reward: Float[Array, "b"],
    known: Bool[Array, "b"],
    advantage: Float[Array, "b t"],
    mask: Bool[Array, "b t"],
    group: Int[Array, "b"],
) -> Diagnostics:
    """Computes the share of a group's pairs with unequal raw rewards in which the better answer has
    the lower advantage. With gold labels, pass them as `reward`, and as `known` where they exist.

        share of pairs with (R_i - R_j)(A_i - A_j) < 0,    A = mean over the response's tokens
    """
    require_shape("inversion", mask.shape, advantage=advantage)
    mean = masked_mean(advantage, mask, axis=1)
    counted = known & (group >= 0) & jnp.any(mask, axis=1)
    # [b, b]: row i is the better response and column j the worse one, so a pair counts once.
    better = (
        (reward[:, None] - reward[None, :] > UNIFORM_WITHIN)
        & (group[:, None] == group[None, :])
        & counted[:, None]
        & counted[None, :]
    )
    wrong_way = better & (mean[:, None] < mean[None, :])
    return {"advantage/inversion_frac": share_of(wrong_way, better, advantage.dtype)}
