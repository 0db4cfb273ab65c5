"""Numbers of single tokens: a few rows of a rollout, for the log."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
import numpy as np

from compass_jax.base.aliases import Tree
from compass_jax.config import Objective
from compass_jax.rl.bucketing import MicroBatch
from compass_jax.rl.objectives.inputs import PolicyInputs
from compass_jax.rl.prepare import Prepared
from compass_jax.training.scored import by_sequence


class TokenTrace:
    """Numbers of the tokens of some rows of a rollout; `Learner.train` fills them in.

    `values` has an array `[n t]` for each of entropy (nats), logp, logp_diff (training's minus the
    rollout's) and advantage. With more than one update in a rollout, so that the ratio is not 1
    throughout, it also has ratio and clipped (0 or 1) as the objective computes them in the last
    update of the row. `mask` `[n t]` marks the tokens that were trained on.
    """

    def __init__(self, rows: Sequence[int]):
        self.rows = np.asarray(rows, np.int64)
        self.values: dict[str, np.ndarray] = {}
        self.mask = np.zeros((0, 0), bool)
        self._groups: np.ndarray | None = None  # of the objective, as `Prepared.entropy_group`
        self._seen: list[tuple[MicroBatch, jax.Array]] = []

    def begin(self, scored: Tree, prepared: Sequence[tuple[slice, Prepared]]) -> None:
        """Stores the values that are fixed before the first update.

        Args:
            scored: the learner's `Scored`.
            prepared: the rows of each update, in order, and their `Prepared`.
        """

        def of_rows(name: str) -> np.ndarray:
            parts = [np.asarray(getattr(rows_prepared, name)) for _, rows_prepared in prepared]
            return np.concatenate(parts)[self.rows]

        logp = scored.old_logp[self.rows]
        self.mask = of_rows("mask")
        self.values = {
            "entropy": scored.old_entropy[self.rows],
            "logp": logp,
            "logp_diff": logp - scored.sampler_logp(lambda x: x[self.rows]),
            "advantage": of_rows("advantage"),
        }
        if prepared[0][1].entropy_group is not None:
            self._groups = of_rows("entropy_group")

    def update(self, micro: MicroBatch, logp: jax.Array) -> None:
        """Stores the log-probs `[m t]` of an update's micro-batch if it has traced rows."""
        if np.isin(micro.rows, self.rows).any():
            self._seen.append((micro, logp))

    def finish(self, objective: Objective, vocab_size: int) -> None:
        """Adds ratio and clipped. Rows of no stored update have a ratio of 1. Every process must
        call it, since it gathers their parts.
        """
        logp = self.values["logp"].copy()
        for micro, row_logp in self._seen:  # a later update overwrites an earlier one
            at = {row: i for i, row in enumerate(micro.rows) if row >= 0}
            numbers, length = by_sequence(micro, row_logp), min(micro.length, logp.shape[1])
            for i, row in enumerate(self.rows):
                if row in at:
                    logp[i, :length] = numbers[at[row], :length]
        self._seen = []
        # The objective computes ratio and clip itself, since its ratio may be of a group of tokens.
        old, entropy, advantage = (self.values[x] for x in ("logp", "entropy", "advantage"))
        inputs = (logp, old, entropy, advantage, self.mask, self._groups)
        ratio, clipped = jax.device_get(_clip(*inputs, objective, vocab_size))
        self.values |= {"ratio": ratio, "clipped": clipped.astype(np.float32)}


@partial(jax.jit, static_argnames=("objective", "vocab_size"))
def _clip(logp, old_logp, entropy, advantage, mask, groups, objective, vocab_size):
    """Computes (ratio, whether it is clipped) of each token."""
    inputs = PolicyInputs(logp, old_logp, entropy, advantage, mask, groups, vocab_size)
    with objective.calling("surrogate"):
        surrogate = objective.surrogate(inputs)
    return surrogate.ratio, surrogate.clipped
