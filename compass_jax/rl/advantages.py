"""Advantages of whole responses."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.rl.grouping import UNIFORM_WITHIN, group_statistics, spread

STD_EPSILON = 1e-6


def group_advantage(
    reward: Float[Array, "b"],
    known: Bool[Array, "b"],
    group: Int[Array, "b"],
    n_groups: int,
    normalize_std: bool,
    shaped: Float[Array, "b"] | None = None,
) -> tuple[Float[Array, "b"], Bool[Array, "b"]]:
    """How much better a response is than the others to the same prompt (arXiv 2402.03300, section
    4.1.2), and whether shaping alone says so.

        varied by raw reward:     A_i = (S_i - mean S) / (std S + 1e-6),   without the division if
                                  not `normalize_std` (arXiv 2503.20783)
        uniform by raw reward:    A_i =  S_i - mean S, never divided: penalties of 0..0.07 must not
                                  become advantages of +-1.5

    S is `shaped` (rl/shaping.py), the raw `reward` without it; mean and std (ddof 0) over the known
    samples of the group. Exactly 0 for a group that shaping leaves uniform too, for one with fewer
    than two known rewards, for an unknown reward and for padding rows (group -1).
    """
    shaped = reward if shaped is None else shaped
    raw, stats = (
        group_statistics(reward, known, group, n_groups),
        group_statistics(shaped, known, group, n_groups),
    )
    counted = known & (group >= 0)
    difference = shaped - spread(stats.mean, group)
    scaled = difference / (spread(stats.std, group) + STD_EPSILON) if normalize_std else difference
    varied = spread(raw.decided & ~raw.uniform, group) & counted
    by_shaping = spread(raw.uniform & (stats.high - stats.low > UNIFORM_WITHIN), group) & counted
    return jnp.where(
        varied, scaled, jnp.where(by_shaping, difference, jnp.zeros((), reward.dtype))
    ), by_shaping
