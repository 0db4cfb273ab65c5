"""A scored rollout and its micro-batches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, cast

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt

from compass_jax.base.aliases import Tree
from compass_jax.base.records import EARLIER, UNKNOWN_LOGP, StepArrays
from compass_jax.devices.sharding import fetch
from compass_jax.model.routes import put_routes, put_tokens, take_routes, take_tokens
from compass_jax.rl.bucketing import MicroBatch, padding_frac, take_rows
from compass_jax.rl.diagnostics import Diagnostics
from compass_jax.rl.prepare import Prepared, UpdateRows
from compass_jax.rl.row_plan import RowPlan, UpdatePlan
from compass_jax.training import step


@dataclass
class Scored:
    """A rollout with log-probs and entropies at the parameters before its first update."""

    arrays: StepArrays
    routes: UInt[Array, "b n l k"] | None  # replayed in the updates; None: live routing
    old_logp: np.ndarray  # float32 [b t]
    old_entropy: np.ndarray  # float32 [b t], nats
    ref_logp: np.ndarray | None  # float32 [b t], the reference's; None: no reference
    plan: RowPlan
    diagnostics: Diagnostics = field(default_factory=dict)

    @cached_property
    def lengths(self) -> np.ndarray:
        """Numbers of generated tokens, int32 [b]."""
        return np.asarray(self.arrays.mask.sum(1, np.int32))

    @cached_property
    def lacks_logp(self) -> bool:
        """Whether the sampler gave no log-prob to some token (UNKNOWN_LOGP)."""
        return bool(np.any(self.arrays.rollout_logp == UNKNOWN_LOGP))

    def sampler_logp(self, take: Callable[[np.ndarray], np.ndarray] = lambda x: x) -> np.ndarray:
        """Returns the sampler's log-probs of rows that `take` chooses, float32 [n t]; training's
        where the sampler gave none.
        """
        logp = take(self.arrays.rollout_logp)
        if not self.lacks_logp:
            return logp
        return np.where(logp == UNKNOWN_LOGP, take(self.old_logp), logp)

    def rows_of(self, rows: slice, capacity: int, micro: MicroBatch | None = None) -> UpdateRows:
        """Returns the rows of an update, of groups of `capacity` rows, with the tokens of `micro`
        (None: of all). Raises ValueError where they are not whole groups, or a column has other
        rows than the step.
        """
        if rows.start % capacity or rows.stop % capacity or rows.step not in (None, 1):
            raise ValueError(
                f"Learner: rows {rows.start}:{rows.stop} do not cover whole groups of"
                f" {capacity} rows; take one of Learner.updates"
            )
        arrays = self.arrays
        for name, column in arrays.columns.items():
            if len(column) != len(arrays.lengths):
                raise ValueError(
                    f"StepArrays.columns[{name!r}] has {len(column)} rows, the step has"
                    f" {len(arrays.lengths)}"
                )

        def take(x: np.ndarray) -> np.ndarray:
            return x[rows] if micro is None else take_rows(x, micro.rows, micro.length)

        group, places = arrays.group[rows], None
        if micro is not None:
            places = np.where(micro.rows < 0, len(group), micro.rows - rows.start).astype(np.int32)
        inputs: Tree = (
            take(arrays.mask),
            arrays.reward[rows],
            arrays.known[rows],
            # Groups are numbered within the rollout, in `prepare` within the update.
            np.where(group < 0, -1, group - rows.start // capacity),
            take(self.old_entropy),
            take(self.old_logp),
            self.sampler_logp(take),
            None if self.ref_logp is None else take(self.ref_logp),
            arrays.repetition[rows],
            {name: column[rows] for name, column in arrays.columns.items()},
            self.lengths[rows],
            places,
        )
        return UpdateRows(*inputs)

    def entropy_of_responses(self) -> np.ndarray:
        """Returns the mean entropy of each response's generated tokens `[b]`, in nats; NaN for one
        that no pass has scored.
        """
        total = np.sum(self.old_entropy, axis=1, where=self.arrays.mask, dtype=np.float64)
        return np.where(total > 0, total / np.maximum(self.lengths, 1), np.nan)

    def update_of(self, rows: slice) -> UpdatePlan:
        """Returns the plan of the update of these rows. Raises ValueError where there is none."""
        for update in self.plan.updates:
            if update.rows == rows:
                return update
        raise ValueError(
            f"Learner: no update has the rows {rows.start}:{rows.stop}; take one of Learner.updates"
        )


class Sequences(NamedTuple):
    """The model's inputs for a micro-batch."""

    tokens: Int[Array, "b t"]
    lengths: Int[Array, "b"]
    routes: UInt[Array, "b t l k"] | None  # None: live
    segments: Int[Array, "b t"] | None  # see step.forward
    predicted: Bool[Array, "b t"]  # generated tokens


def device_rows(micro: MicroBatch, routes: Array) -> Array:
    """Returns the micro-batch's rows of `routes`; padding rows point past their end."""
    return jnp.asarray(np.where(micro.rows < 0, routes.shape[0], micro.rows).astype(np.int32))


def sequences(arrays: StepArrays, micro: MicroBatch, routes: Array | None) -> Sequences:
    """Returns the model's inputs for a micro-batch, from the routes of all rows (None: live)."""
    if micro.packing is not None:
        return _packed_sequences(arrays, micro, routes)
    tokens, lengths, predicted = (
        take_rows(x, micro.rows, micro.length) for x in (arrays.tokens, arrays.lengths, arrays.mask)
    )
    if routes is not None:
        routes = take_routes(routes, device_rows(micro, routes), micro.length)
    return Sequences(tokens, lengths, routes, None, predicted)


def _packed_sequences(arrays: StepArrays, micro: MicroBatch, routes: Array | None) -> Sequences:
    assert micro.packing is not None
    sequence, position = micro.packing.sources()
    real = sequence >= 0
    # For padding the index -1 reads some other row; `real` replaces the result.
    rows = micro.rows[sequence]
    tokens: Tree = np.where(real, arrays.tokens[rows, position], 0)
    predicted: Tree = real & arrays.mask[rows, position]
    lengths, segments = real.sum(axis=1, dtype=np.int32), cast(Tree, sequence + 1)
    if routes is not None:
        routes = take_tokens(routes, *_places(micro, routes))
    return Sequences(tokens, lengths, routes, segments, predicted)


def _places(micro: MicroBatch, routes: Array) -> tuple[Array, Array]:
    """Returns the rows and positions in `routes` of a packed micro-batch's tokens; padding points
    past their end.
    """
    assert micro.packing is not None
    sequence, position = micro.packing.sources()
    rows = np.where(sequence < 0, routes.shape[0], micro.rows[sequence]).astype(np.int32)
    return jnp.asarray(rows), jnp.asarray(position)


def record_routes(routes: Array, micro: MicroBatch, used: Array) -> Array:
    """Writes the routes that a micro-batch used to their rows of `routes`, which are donated."""
    if micro.packing is not None:
        return put_tokens(routes, *_places(micro, routes), used)
    return put_routes(routes, device_rows(micro, routes), used)


def update_batch(
    scored: Scored,
    micro: MicroBatch,
    inputs: Sequences,
    prepared: Prepared,
    offset: int | None = None,
) -> step.UpdateBatch:
    """Returns one micro-batch of an update. `inputs` are its `sequences`; `prepared` has its rows
    or, with an `offset`, the update's, which start at this row of the rollout.
    """

    def take(x, rows):
        return None if x is None else take_rows(x, rows, micro.length)

    local = np.arange(len(micro.rows)) if offset is None else micro.rows - offset
    local, packing = np.where(micro.rows < 0, -1, local), micro.packing
    return step.UpdateBatch(
        inputs.tokens,
        inputs.lengths,
        inputs.routes,
        segments=inputs.segments,
        predicted=inputs.predicted,
        places=None if packing is None else step.Places(packing.row, packing.start, packing.size),
        mask=take(prepared.mask, local),
        old_logp=take(scored.old_logp, micro.rows),
        old_entropy=take(scored.old_entropy, micro.rows),
        ref_logp=take(scored.ref_logp, micro.rows),
        advantage=take(prepared.advantage, local),
        weight=take(prepared.weight, local),
        entropy_group=take(prepared.entropy_group, local),
        kl_weight=take(prepared.kl_weight, local),
    )


def same_numbers(a: step.UpdateBatch, b: step.UpdateBatch) -> bool:
    """Returns whether two batches of the same rows have the same masks, advantages and weights."""
    names = ("mask", "advantage", "weight", "entropy_group", "kl_weight")
    return all(
        getattr(a, name) is getattr(b, name)  # None in both
        or np.array_equal(getattr(a, name), getattr(b, name))
        for name in names
    )


def by_sequence(micro: MicroBatch, values: Array) -> np.ndarray:
    """Returns a micro-batch's values, a row for each of `micro.rows`; of a packed one [n length],
    with zeros past a sequence's end.
    """
    numbers, packing = fetch(values), micro.packing
    if packing is None:
        return numbers
    out = np.zeros((len(micro.rows), micro.length), numbers.dtype)
    for i, (row, start, size) in enumerate(
        zip(packing.row, packing.start, packing.size, strict=True)
    ):
        out[i, :size] = numbers[row, start : start + size]
    return out


def put_rows(target: np.ndarray, micro: MicroBatch, values: Array) -> None:
    """Writes a micro-batch's values `[m n]` to their rows of `target`; padding rows are dropped."""
    real = micro.rows >= 0
    length = min(target.shape[1], micro.length)
    target[micro.rows[real], :length] = by_sequence(micro, values)[real, :length]


def score_account(scored: Scored, *, counts_idle: bool) -> Diagnostics:
    """Returns the mismatch to the sampler, the mean entropy, the padding and, if it `counts_idle`
    ones, the share of tokens in rows without a gradient, of a scored rollout.
    Rows of earlier steps have a separate mismatch, since they differ from training by intent and
    would hide a fault of the others. Skipped rows have no mismatch, and are taken to have the
    entropy of the idle rows that are scored.
    """
    arrays, skipped = scored.arrays, scored.plan.skipped
    logp = scored.old_logp, scored.sampler_logp()
    gap: Diagnostics = {}
    mask, lengths = arrays.mask, arrays.lengths
    if skipped is not None:
        mask, lengths = mask & ~skipped[:, None], lengths[~skipped]
    entropy = np.float32(_summed_entropy(scored, mask))
    if EARLIER in arrays.columns:
        earlier = mask & arrays.columns[EARLIER][:, None]
        if earlier.any():
            of_earlier = step.mismatch(*logp, earlier)
            gap = {f"mismatch/earlier/{k.split('/')[1]}": x for k, x in of_earlier.items()}
        mask = mask & ~earlier
    gap |= step.mismatch(*logp, mask)
    tokens = np.float32(max(arrays.mask.sum(), 1))
    if scored.lacks_logp:
        unknown_tokens = np.sum(arrays.rollout_logp == UNKNOWN_LOGP, where=arrays.mask)
        gap["mismatch/unknown_frac"] = (jnp.float32(unknown_tokens), jnp.asarray(tokens))
    if counts_idle:
        of_rows = arrays.lengths.astype(np.float32)
        idle = np.sum(of_rows, where=scored.plan.idle)
        gap["train/idle_frac"] = (jnp.asarray(idle), jnp.asarray(np.sum(of_rows)))
    return gap | {
        "entropy_nats": (jnp.asarray(entropy), jnp.asarray(tokens)),
        "padding_frac": (jnp.float32(padding_frac(scored.plan.scored, lengths)), jnp.float32(1)),
    }


def _summed_entropy(scored: Scored, mask: np.ndarray) -> float:
    """Returns the sum of the entropies of all tokens, of which those of the mask are scored."""
    if scored.plan.skipped is None:
        return float(np.sum(scored.old_entropy, where=mask))
    idle = scored.plan.idle[:, None]
    sums = [float(np.sum(scored.old_entropy, where=mask & part)) for part in (~idle, idle)]
    tokens = [np.sum(x & idle) for x in (scored.arrays.mask, mask)]
    return sums[0] + sums[1] * tokens[0] / max(tokens[1], 1)
