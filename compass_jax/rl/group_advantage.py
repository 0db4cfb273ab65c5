"""Advantages of whole responses, in varied groups and in groups that only shaping distinguishes."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.config import Advantage
from compass_jax.rl.advantages.inputs import AdvantageInputs
from compass_jax.rl.grouping import UNIFORM_WITHIN, group_statistics, per_row
from compass_jax.rl.shapes import require_shape


def group_advantage(
    advantage: Advantage,
    reward: Float[Array, "b"],
    known: Bool[Array, "b"],
    group: Int[Array, "b"],
    n_groups: int,
    *,
    divides_by_std: bool = True,
    shaped: Float[Array, "b"] | None = None,
    columns: dict[str, Array] | None = None,
    right_at: float | Float[Array, ""] = 1.0,
    wrong_at: float | Float[Array, ""] = 0.0,
    sample_factor: Float[Array, "b"] | None = None,
) -> tuple[Float[Array, "b"], Bool[Array, "b"]]:
    """Returns the advantage of each response, and whether its rewards differ from those of its
    group by shaping alone.

        varied by raw reward:     A_i = `advantage` of S
        uniform by raw reward:    A_i = S_i - mean S, never divided: penalties of 0..0.07 must not
                                  become advantages of +-1.5

    S is `shaped` (rl/shaping.py), the raw `reward` without it. Exactly 0 for a group that shaping
    leaves uniform too, for one with fewer than two known rewards, for an unknown reward and for
    padding rows (group -1). Where `advantage.uniform_teaches`, each known reward has the value of
    `advantage`.

    Args:
        right_at, wrong_at, sample_factor: see AdvantageInputs.
    """
    shaped = reward if shaped is None else shaped
    counted = known & (group >= 0)
    inputs = AdvantageInputs(
        shaped,
        counted,
        group,
        n_groups,
        divides_by_std,
        columns or {},
        right_at,
        wrong_at,
        sample_factor,
    )
    raw, stats = group_statistics(reward, known, group, n_groups), inputs.statistics
    varied = per_row(raw.decided & ~raw.uniform, group) & counted
    by_shaping = per_row(raw.uniform & (stats.high - stats.low > UNIFORM_WITHIN), group) & counted
    zero = jnp.zeros((), reward.dtype)
    with advantage.calling("responses"):
        values = advantage.responses(inputs)
        require_shape("responses", reward.shape, result=values)
    if advantage.uniform_teaches:
        return jnp.where(counted, values, zero), by_shaping
    uniform = jnp.where(by_shaping, shaped - per_row(stats.mean, group), zero)
    # Uniform rewards may differ by up to 1e-6, which GRPO's division by the std would turn into
    # advantages of up to 1. So uniform groups never take the advantage's value.
    return jnp.where(varied, values, uniform), by_shaping
