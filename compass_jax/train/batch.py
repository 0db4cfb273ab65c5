"""Rollouts -> host arrays of one step, and to a checkpoint and back. Row n * s + c is sample c of
prompt n, in the routes too; s: the most samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from compass_jax.records import Group, Prompt, Rollout, StepArrays
from compass_jax.rewards.penalties import repetition_frac


def assemble(
    groups: Sequence[Group], rows: int, length: int, ngram: int, routes: Any = None
) -> StepArrays:
    """Groups -> arrays of `rows` x `length`, each sample in its rollout's row, as in `routes`.
    Repetition is of `ngram` tokens.

    Rows that no sample has (of groups that did not grow) have length 0 and group -1.
    """
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
    for g, group in enumerate(groups):
        for rollout, score in zip(group.rollouts, group.scores, strict=True):
            i, n, start = rollout.row, len(rollout.tokens), len(rollout.prompt.tokens)
            out.tokens[i, :n], out.lengths[i], out.group[i] = rollout.tokens, n, g
            out.mask[i, start:n] = True
            out.rollout_logp[i, :n] = rollout.logp
            out.reward[i], out.known[i], out.repetition[i] = (
                score.reward,
                score.known,
                repetition_frac(rollout.response, ngram),
            )
    return out


ROLLOUT_ARRAYS = {
    "tokens": np.int32,
    "logp": np.float32,
    "entropy": np.float32,
    "versions": np.int32,
}


def from_arrays(
    prompts: Sequence[Prompt], saved: Mapping[str, np.ndarray], samples: int, eos_id: int
) -> tuple[dict, dict]:
    """(finished, begun) rollouts of an interrupted step, each by row: `to_arrays`'s inverse."""
    finished: dict[int, Rollout] = {}
    begun: dict[int, Rollout] = {}
    for row in map(int, np.flatnonzero(saved["lengths"])):
        n, prompt = int(saved["lengths"][row]), prompts[row // samples]
        tokens, logp, entropy, versions = (
            np.asarray(saved[name][row, :n]) for name in ROLLOUT_ARRAYS
        )
        rollout = Rollout(
            prompt, row % samples, tokens, logp, entropy, int(tokens[-1]) != eos_id, versions, row
        )
        (finished if saved["finished"][row] else begun)[row] = rollout
    return finished, begun


def to_arrays(
    finished: Mapping[int, Rollout], begun: Mapping[int, Rollout], rows: int, length: int
) -> dict[str, np.ndarray]:
    """Rollouts by row -> arrays of `rows` rows; length 0 where a row has not begun."""
    out = {name: np.zeros((rows, length), dtype) for name, dtype in ROLLOUT_ARRAYS.items()}
    out |= {"lengths": np.zeros(rows, np.int32), "finished": np.zeros(rows, bool)}
    for row, rollout in (*finished.items(), *begun.items()):
        n = len(rollout.tokens)
        out["lengths"][row], out["finished"][row] = n, row in finished
        for name in ROLLOUT_ARRAYS:
            out[name][row, :n] = getattr(rollout, name)
    return out
