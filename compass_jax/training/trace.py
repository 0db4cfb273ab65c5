"""What the learner knows of single tokens: the numbers of a few rows of a rollout, for the log."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from compass_jax.config import Objective
from compass_jax.rl.bucketing import MicroBatch
from compass_jax.rl.objectives.inputs import PolicyInputs
from compass_jax.rl.prepare import Prepared
from compass_jax.sharding import fetch


class TokenTrace:
    """Numbers of the tokens of some rows of a rollout; `Learner.train` fills it in.

    `values` has an array `[n t]` for each: entropy (nats), logp, logp_diff (that of training less
    that of the rollout), advantage; and where a rollout has more than one update, so that the ratio
    is not 1 throughout, ratio and clipped (0 or 1), both as the objective forms them in the last
    update that trained on the row. `mask` `[n t]` says which tokens were trained on.
    """

    def __init__(self, rows: Sequence[int]):
        self.rows = np.asarray(rows, np.int64)
        self.values: dict[str, np.ndarray] = {}
        self.mask = np.zeros((0, 0), bool)
        self._groups: np.ndarray | None = None  # of the objective, as `Prepared.entropy_group`
        self._seen: list[tuple[MicroBatch, jax.Array]] = []

    def begin(self, scored: Any, prepared: Sequence[tuple[slice, Prepared]]) -> None:
        """Takes what is fixed before the first update.

        Args:
            scored: the learner's `Scored`.
            prepared: the rows of each update, in order, and what `prepare` made of them.
        """

        def of_rows(name: str) -> np.ndarray:
            parts = [np.asarray(getattr(made, name)) for _, made in prepared]
            return np.concatenate(parts)[self.rows]

        logp = scored.old_logp[self.rows]
        self.mask = of_rows("mask")
        self.values = {
            "entropy": scored.old_entropy[self.rows],
            "logp": logp,
            "logp_diff": logp - scored.arrays.rollout_logp[self.rows],
            "advantage": of_rows("advantage"),
        }
        if prepared[0][1].entropy_group is not None:
            self._groups = of_rows("entropy_group")

    def update(self, micro: MicroBatch, logp: jax.Array) -> None:
        """Remembers the log-probs `[m t]` of a micro-batch of an update, where it has such rows."""
        if np.isin(micro.rows, self.rows).any():
            self._seen.append((micro, logp))

    def finish(self, objective: Objective, vocab_size: int) -> None:
        """Adds ratio and clipped, where any update was seen. Each process must call it: what they
        hold in parts is gathered.
        """
        if not self._seen:
            return
        logp = self.values["logp"].copy()
        for micro, found in self._seen:  # a later update takes the place of an earlier one
            at = {row: i for i, row in enumerate(micro.rows) if row >= 0}
            numbers, length = fetch(found), min(micro.length, logp.shape[1])
            for i, row in enumerate(self.rows):
                if row in at:
                    logp[i, :length] = numbers[at[row], :length]
        self._seen = []
        old, entropy, advantage = (self.values[x] for x in ("logp", "entropy", "advantage"))
        inputs = (logp, old, entropy, advantage, self.mask, self._groups)
        ratio, clipped = jax.device_get(_clip(*inputs, objective, vocab_size))
        self.values |= {"ratio": ratio, "clipped": clipped.astype(np.float32)}


@partial(jax.jit, static_argnames=("objective", "vocab_size"))
def _clip(logp, old_logp, entropy, advantage, mask, groups, objective, vocab_size):
    """(ratio, whether it is clipped) of each token."""
    inputs = PolicyInputs(logp, old_logp, entropy, advantage, mask, groups, vocab_size)
    found = objective.surrogate(inputs)
    return found.ratio, found.clipped
