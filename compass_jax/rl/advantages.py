"""Advantages of whole responses."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.rl.grouping import group_statistics, spread

STD_EPSILON = 1e-6


def group_advantage(
    reward: Float[Array, "b"], known: Bool[Array, "b"], group: Int[Array, "b"], n_groups: int, normalize_std: bool
) -> Float[Array, "b"]:
    """How much better a response is than the others to the same prompt (arXiv 2402.03300, section 4.1.2).

        A_i = (R_i - mean R) / (std R + 1e-6),    without the division if not `normalize_std` (arXiv 2503.20783)

    mean and std (ddof 0) over the known rewards of the group. Exactly 0 for a uniform group, for a group with fewer than two
    known rewards, for a response whose reward is unknown, and for padding rows (group -1).
    """
    stats = group_statistics(reward, known, group, n_groups)
    advantage = reward - spread(stats.mean, group)
    if normalize_std:
        advantage = advantage / (spread(stats.std, group) + STD_EPSILON)
    varied = spread(stats.decided & ~stats.uniform, group)
    return jnp.where(varied & known & (group >= 0), advantage, jnp.zeros((), reward.dtype))
