"""Turns a step's groups into the learner's arrays, on the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from compass_jax.base.aliases import Tree
from compass_jax.base.records import (
    CONCENTRATION,
    EARLIER,
    FIRST,
    GOLD,
    PREDICTED,
    TRUNCATED,
    Group,
    Prompt,
    Rollout,
    Score,
    StepArrays,
)
from compass_jax.config import RLConfig
from compass_jax.rewards.penalties import repetition_frac


class Column(NamedTuple):
    """A number of each sample: `of` its rollout and score; `empty` in rows without a sample."""

    of: Callable[[Rollout, Score], float | bool]
    empty: float | bool


def columns_of(rl: RLConfig, labelled: bool) -> dict[str, Column]:
    """Returns the columns of a run's arrays that its settings ask for, by name."""
    columns: dict[str, Column] = {}
    if labelled:
        columns[GOLD] = Column(lambda _, score: score.components.get(GOLD, math.nan), math.nan)
    if rl.mask_truncated:
        columns[TRUNCATED] = Column(lambda rollout, _: rollout.truncated, False)
    if rl.advantage.reads_prediction:
        first = rl.policy.first_samples(rl.sampling)
        columns[PREDICTED] = Column(lambda rollout, _: predicted_rate(rollout.prompt), 0.0)
        columns[CONCENTRATION] = Column(lambda rollout, _: sum(rollout.prompt.predicted), 0.0)
        columns[FIRST] = Column(lambda rollout, _: rollout.sample < first, False)
    return columns


def predicted_rate(prompt: Prompt) -> float:
    """Returns the mean of the pass rate's distribution that was predicted when the prompt was
    drawn.
    """
    alpha, beta = prompt.predicted
    return alpha / (alpha + beta)


def assemble(
    groups: Sequence[Group],
    size: int,
    length: int,
    ngram: int,
    routes: Tree = None,
    columns: Mapping[str, Column] = MappingProxyType({}),
    earlier: Container[int] | None = None,
) -> StepArrays:
    """Returns arrays of `length` tokens, row n * size + c for sample c of group n, as in `routes`.
    Repetition is of `ngram` tokens.

    Rows without a sample (of groups that did not grow) have length 0 and group -1.

    Args:
        columns: further numbers of the samples, by name.
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
    for name, column in columns.items():
        dtype = bool if isinstance(column.empty, bool) else np.float32
        out.columns[name] = np.full(rows, column.empty, dtype)
    if earlier is not None:
        out.columns[EARLIER] = np.repeat([g in earlier for g in range(len(groups))], size)
    for g, group in enumerate(groups):
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            i = g * size + rollout.sample
            n, start = len(rollout.tokens), len(rollout.prompt.tokens)
            out.tokens[i, :n], out.lengths[i], out.group[i] = rollout.tokens, n, g
            out.mask[i, start:n] = rollout.generated
            out.rollout_logp[i, :n] = rollout.logp
            out.reward[i], out.known[i] = score.reward, score.known
            out.repetition[i] = repetition(rollout, ngram)
            for name, column in columns.items():
                out.columns[name][i] = column.of(rollout, score)
    return out


def repetition(rollout: Rollout, ngram: int) -> float:
    """Returns the share of a response's n-grams of generated tokens that repeat an earlier one."""
    return repetition_frac(rollout.response[rollout.generated], ngram)
