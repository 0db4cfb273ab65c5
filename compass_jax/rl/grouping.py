"""Statistics over groups of rows (one group = all samples of one prompt), for rows in any order."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.rl.shapes import require_shape

UNIFORM_WITHIN = 1e-6  # a group whose known raw rewards differ by at most this has zero variance


class GroupStatistics(NamedTuple):
    """Statistics of the known raw rewards of each group; all 0 where no reward is known."""

    known: Int[Array, "g"]  # number of known rewards
    mean: Float[Array, "g"]
    std: Float[Array, "g"]  # ddof 0
    low: Float[Array, "g"]
    high: Float[Array, "g"]

    @property
    def decided(self) -> Bool[Array, "g"]:
        """True for groups of at least two known rewards: fewer cannot be compared."""
        return self.known >= 2

    @property
    def uniform(self) -> Bool[Array, "g"]:
        """True for decided groups whose known rewards are equal within `UNIFORM_WITHIN`."""
        return self.decided & (self.high - self.low <= UNIFORM_WITHIN)


def group_sum(x: Array, group: Int[Array, "b"], n_groups: int) -> Array:
    """Returns the sum of `x` [b] over each group [g]; rows of group -1 (padding) are left out."""
    return jax.ops.segment_sum(x, _segment(group, n_groups), num_segments=n_groups + 1)[:n_groups]


def group_any(x: Bool[Array, "b"], group: Int[Array, "b"], n_groups: int) -> Bool[Array, "g"]:
    """Returns whether `x` is true for a row of each group."""
    return group_sum(x.astype(jnp.int32), group, n_groups) > 0


def per_row(x: Array, group: Int[Array, "b"]) -> Array:
    """Returns the value [g] of each row's group, as [b]. Mask rows of group -1: their value is
    arbitrary.
    """
    return x[jnp.maximum(group, 0)]


def group_statistics(
    reward: Float[Array, "b"], known: Bool[Array, "b"], group: Int[Array, "b"], n_groups: int
) -> GroupStatistics:
    """Computes the statistics of the known raw rewards of each group; unknown rewards may hold any
    value, NaN included.
    """
    require_shape("group_statistics", reward.shape[:1], reward=reward, known=known, group=group)
    known = known & (group >= 0)
    zero = jnp.zeros((), reward.dtype)
    count = group_sum(known.astype(jnp.int32), group, n_groups)
    n = jnp.maximum(count, 1).astype(reward.dtype)
    mean = group_sum(jnp.where(known, reward, zero), group, n_groups) / n
    # Two passes, because E[x^2] - E[x]^2 cancels in float32 where rewards are large and similar.
    squares = jnp.square(jnp.where(known, reward - per_row(mean, group), zero))
    std = jnp.sqrt(group_sum(squares, group, n_groups) / n)
    # Unknown rewards, which may be NaN, share the segment of padding rows, so that no minimum or
    # maximum sees them. The last line replaces the infinite minimum of a group without known ones.
    segment = _segment(jnp.where(known, group, -1), n_groups)
    low = jax.ops.segment_min(reward, segment, num_segments=n_groups + 1)[:n_groups]
    high = jax.ops.segment_max(reward, segment, num_segments=n_groups + 1)[:n_groups]
    return GroupStatistics(
        count, mean, std, jnp.where(count > 0, low, zero), jnp.where(count > 0, high, zero)
    )


class SampleRows(NamedTuple):
    """Rows of which several may be one sample, such as the branches of an episode. They have its
    reward in common, count once among their group's samples, and share its weight by their tokens.
    """

    first: Int[Array, "b"]  # the place of the first row of each row's sample

    @property
    def counted(self) -> Bool[Array, "b"]:
        """True for the first row of each sample."""
        return self.first == jnp.arange(self.first.shape[0], dtype=self.first.dtype)

    def sum(self, x: Array) -> Array:
        """Returns the sum of `x` [b] over the rows of each row's sample, [b]."""
        return jax.ops.segment_sum(x, self.first, num_segments=x.shape[0])[self.first]

    def any(self, x: Bool[Array, "b"]) -> Bool[Array, "b"]:
        """Returns whether `x` is true for a row of each row's sample."""
        return self.sum(x.astype(jnp.int32)) > 0


def sample_rows(
    group: Int[Array, "b"], sample: Int[Array, "b"] | None, n_groups: int
) -> SampleRows:
    """Finds the rows of each sample. `sample`: its number in its group, from 0 to b - 1; None: each
    row is one. Padding rows (group -1) stand alone.
    """
    rows = jnp.arange(group.shape[0], dtype=jnp.int32)
    if sample is None:
        return SampleRows(rows)
    key = jnp.maximum(group, 0) * group.shape[0] + sample
    # Padding rows share the last segment, whose minimum they do not take.
    segments = n_groups * group.shape[0] + 1
    key = jnp.where(group < 0, segments - 1, key)
    first = jax.ops.segment_min(rows, key, num_segments=segments)[key]
    return SampleRows(jnp.where(group < 0, rows, first))


def _segment(group: Int[Array, "b"], n_groups: int) -> Int[Array, "b"]:
    """Returns segment ids that put padding rows into an extra last segment, which the caller cuts
    off.
    """
    return jnp.where(group < 0, n_groups, group)
