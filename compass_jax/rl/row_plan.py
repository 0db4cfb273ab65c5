"""Which rows of a rollout are scored, trained and computed together, before any of them is scored.

The rows' rewards and lengths decide it, so it is one pure function of them on every process. What
needs scores, the advantages and weights, comes after (rl/prepare.py). A row is *silent* where its
gradient is known to be 0; *idle* where it is silent and has no gradient computed; *skipped* where
it is idle and not even scored. To *score* is to compute log-probs and entropies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from compass_jax.config import UpdatesConfig
from compass_jax.rl.bucketing import MicroBatch, plan, row_counts


class UpdatePlan(NamedTuple):
    """The micro-batches of one update."""

    rows: slice  # of the rollout
    trained: list[MicroBatch]  # with a gradient
    idle: list[MicroBatch]  # that are only scored

    @property
    def scored(self) -> list[MicroBatch]:
        """The micro-batches that are scored."""
        return [*self.trained, *self.idle]


class RowPlan(NamedTuple):
    """The micro-batches of a rollout's updates.

    fused: whether the first update takes scores and gradient from one forward pass. idle: the rows
    without a gradient `[b]`. skipped: of these, the ones that are not scored; None: all are.
    """

    updates: list[UpdatePlan]
    fused: bool
    idle: Bool[np.ndarray, "b"]
    skipped: Bool[np.ndarray, "b"] | None

    @property
    def scored(self) -> list[MicroBatch]:
        """The micro-batches that are scored, of every update."""
        return [micro for update in self.updates for micro in update.scored]

    @property
    def scored_first(self) -> list[MicroBatch]:
        """The micro-batches with a forward pass of their own before the first update."""
        first, *later = self.updates
        of_later = [micro for update in later for micro in update.scored]
        return [*of_later, *first.idle] if self.fused else [*first.scored, *of_later]

    def passes(self, epochs: int) -> int:
        """Returns the number of forward passes over micro-batches of all epochs."""
        trained = sum(len(update.trained) for update in self.updates)
        return len(self.scored_first) + trained * epochs


def row_plan(
    lengths: Int[np.ndarray, "b"],
    silent: Bool[np.ndarray, "b"],
    updates: Sequence[slice],
    config: UpdatesConfig,
    *,
    rows_multiple: int,
    reads_idle: bool,
    fused: bool,
    traced: Sequence[int] | np.ndarray = (),
) -> RowPlan:
    """Plans the rows of a rollout. Rows of length 0 have no sample and are in no micro-batch.

    Some silent rows fill the last micro-batch with a gradient, which would otherwise be padded or
    have another shape to compile. If all rows of an update are silent they form a whole
    micro-batch, so that the optimiser gets a gradient, of 0, and the step has its metrics.

    Args:
        silent: rows whose gradient is known to be 0.
        updates: the rows of each update.
        rows_multiple: the number that a micro-batch's rows must be a multiple of.
        reads_idle: whether more than metrics depends on the scores of idle rows. Otherwise only a
            micro-batch of them is scored, evenly spaced, from which the metrics are estimated.
        traced: rows that are scored in any case.
    """
    full = row_counts(config.longest_row, config.micro_batch_tokens, rows_multiple)[0]
    idle = silent & (lengths > 0)
    for rows in updates:
        trained = int(np.sum((lengths[rows] > 0) & ~idle[rows]))
        spare = -trained % full if trained else full
        idle[rows][np.flatnonzero(idle[rows])[:spare]] = False
    skipped = None
    if not reads_idle:
        # on any mesh the same rows
        most = row_counts(config.longest_row, config.micro_batch_tokens, 1)[0]
        skipped = _skipped(idle, most, traced)
    scored = idle if skipped is None else idle & ~skipped

    def micros(rows: slice, chosen: Bool[np.ndarray, "b"]) -> list[MicroBatch]:
        return _micros(lengths, rows, chosen, config, rows_multiple)

    parts = [UpdatePlan(x, micros(x, (lengths > 0) & ~idle), micros(x, scored)) for x in updates]
    return RowPlan(parts, fused, idle, skipped)


def _skipped(
    idle: Bool[np.ndarray, "b"], most: int, traced: Sequence[int] | np.ndarray
) -> Bool[np.ndarray, "b"]:
    """Returns the idle rows but for `most` of them and the traced ones."""
    places, skipped = np.flatnonzero(idle), idle.copy()
    few = len(places) <= most
    skipped[places if few else places[np.arange(most) * len(places) // most]] = False
    skipped[np.asarray(traced, np.int64)] = False
    return skipped


def _micros(
    lengths: Int[np.ndarray, "b"],
    rows: slice,
    chosen: Bool[np.ndarray, "b"],
    config: UpdatesConfig,
    rows_multiple: int,
) -> list[MicroBatch]:
    """Returns the micro-batches of an update's chosen rows."""
    places = rows.start + np.flatnonzero(chosen[rows])
    planned = plan(
        lengths[places],
        config.buckets,
        config.micro_batch_tokens,
        rows_multiple=rows_multiple,
        packed_row_tokens=config.packed_row_tokens,
    )
    return [x._replace(rows=np.where(x.rows < 0, -1, places[x.rows])) for x in planned]
