"""Turns a step's groups into the learner's arrays, on the host."""

from __future__ import annotations

from collections.abc import Container, Sequence

import numpy as np

from compass_jax.aliases import Tree
from compass_jax.records import EARLIER, GOLD, HOTTER, Group, Rollout, StepArrays
from compass_jax.rewards.penalties import repetition_frac


def assemble(
    groups: Sequence[Group],
    size: int,
    length: int,
    ngram: int,
    routes: Tree = None,
    gold: bool = False,
    hotter_from: int | None = None,
    earlier: Container[int] | None = None,
) -> StepArrays:
    """Returns arrays of `length` tokens, row n * size + c for sample c of group n, as in `routes`.
    Repetition is of `ngram` tokens. With `gold` they hold the scores' gold labels.

    Rows without a sample (of groups that did not grow) have length 0 and group -1.

    Args:
        hotter_from: samples of a group from this index on were drawn at another temperature than
            training's (rl.zero_variance.grow_temperature); None: none were.
        earlier: places of groups of earlier steps; None: no hook holds groups.
    """
    rows = len(groups) * size
    shape = (rows, length)
    out = StepArrays(
        tokens=np.zeros(shape, np.int32),
        lengths=np.zeros(rows, np.int32),
        mask=np.zeros(shape, bool),
        rollout_logp=np.zeros(shape, np.float32),
        reward=np.zeros(rows, np.float32),
        known=np.zeros(rows, bool),
        repetition=np.zeros(rows, np.float32),
        group=np.full(rows, -1, np.int32),
        routes=routes,
    )
    columns = out.columns
    if gold:
        columns[GOLD] = np.full(rows, np.nan, np.float32)
    if hotter_from is not None:
        columns[HOTTER] = np.arange(rows) % size >= hotter_from
    if earlier is not None:
        columns[EARLIER] = np.repeat([g in earlier for g in range(len(groups))], size)
    for g, group in enumerate(groups):
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            i = g * size + rollout.sample
            n, start = len(rollout.tokens), len(rollout.prompt.tokens)
            out.tokens[i, :n], out.lengths[i], out.group[i] = rollout.tokens, n, g
            out.mask[i, start:n] = rollout.generated
            out.rollout_logp[i, :n] = rollout.logp
            out.reward[i], out.known[i] = score.reward, score.known
            if gold:
                columns[GOLD][i] = score.components.get(GOLD, np.nan)
            out.repetition[i] = repetition(rollout, ngram)
    return out


def repetition(rollout: Rollout, ngram: int) -> float:
    """Returns the share of a response's n-grams of generated tokens that repeat an earlier one."""
    return repetition_frac(rollout.response[rollout.generated], ngram)
