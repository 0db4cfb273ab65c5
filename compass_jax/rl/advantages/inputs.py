"""The inputs of an advantage."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from compass_jax.rl.grouping import GroupStatistics, group_statistics


class AdvantageInputs(NamedTuple):
    """Every row of one update, one row a response, in any order."""

    reward: Float[Array, "b"]  # after shaping; an unknown reward may have any value
    known: Bool[Array, "b"]  # False for padding rows too
    group: Int[Array, "b"]  # the prompt of each row; -1: padding
    n_groups: int
    divides_by_std: bool  # False where the objective forbids a division (Dr.GRPO)
    columns: dict[str, Array]  # [b] or [b t], by name (records.StepArrays)
    right_at: float | Float[Array, ""] = 1.0  # the reward at a pass rate of 1, without shaping
    wrong_at: float | Float[Array, ""] = 0.0  # the reward at a pass rate of 0
    # factor that makes a sample's weight in the objective the same in groups of every size; None: 1
    sample_factor: Float[Array, "b"] | None = None

    @property
    def statistics(self) -> GroupStatistics:
        """Number, mean, standard deviation and range of the known rewards of each group `[g]`."""
        return group_statistics(self.reward, self.known, self.group, self.n_groups)
