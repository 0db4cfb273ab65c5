"""Rollouts -> host arrays of one step -> micro-batches. Row n * s + c is sample c of prompt n, in
the routing store too; s: the most samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.model.moe import unset_id
from compass_jax.records import Group, Prompt, Rollout, TrainBatch
from compass_jax.rewards.penalties import repetition_frac
from compass_jax.rl.bucketing import MicroBatch, take_rows


@dataclass
class StepArrays:
    """All sequences of one rollout, `[b t]` with t the longest training bucket; `group` numbers the
    prompts.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    mask: np.ndarray
    rollout_logp: np.ndarray
    reward: np.ndarray
    known: np.ndarray
    repetition: np.ndarray  # share of a response's n-grams that it had said before
    group: np.ndarray
    old_logp: np.ndarray
    old_entropy: np.ndarray
    ref_logp: np.ndarray | None = None


def assemble(groups: Sequence[Group], rows: int, length: int, ngram: int) -> StepArrays:
    """Groups -> arrays of `rows` x `length`, each sample in its rollout's row; old log-probs are
    filled in later. Repetition is of `ngram` tokens.

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
        old_logp=np.zeros(shape, np.float32),
        old_entropy=np.zeros(shape, np.float32),
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


@partial(jax.jit, static_argnames="length")
def routing_rows(store, rows, length: int):
    """Rows of the store, cut or padded to `length`; unset where a row is out of range or past the
    store.
    """
    taken = jnp.take(store[:, :length], rows, axis=0, mode="fill", fill_value=unset_id(store.dtype))
    return jnp.pad(
        taken,
        ((0, 0), (0, length - taken.shape[1]), (0, 0), (0, 0)),
        constant_values=unset_id(store.dtype),
    )


@partial(jax.jit, donate_argnums=0)
def put_routing(store, rows, routing):
    """Writes a micro-batch's routes `[m t l k]` to rows of the store; rows out of range are
    dropped.
    """
    length = min(store.shape[1], routing.shape[1])
    return store.at[rows, :length].set(routing[:, :length], mode="drop")


def store_rows(micro: MicroBatch, store) -> jax.Array:
    """The micro-batch's rows for the routing store; padding rows point past its end."""
    return jnp.asarray(np.where(micro.rows < 0, store.shape[0], micro.rows).astype(np.int32))


def micro_batch(
    arrays: StepArrays, micro: MicroBatch, store, prepared=None, offset: int = 0
) -> TrainBatch:
    """One micro-batch for the device.

    `prepared` (rl/prepare.py) holds the update's rows, which start at row `offset` of `arrays`;
    None before it exists, when only scoring is possible.
    """

    def rows(x):
        return None if x is None else take_rows(x, micro.rows, micro.length)

    def local(x):
        if x is None:
            return None
        return take_rows(x, np.where(micro.rows < 0, -1, micro.rows - offset), micro.length)

    batch = TrainBatch(
        tokens=rows(arrays.tokens),
        lengths=rows(arrays.lengths),
        mask=rows(arrays.mask),
        rollout_logp=rows(arrays.rollout_logp),
        routing=None
        if store is None
        else routing_rows(store, store_rows(micro, store), micro.length),
    )
    if prepared is None:
        return batch
    return batch._replace(
        mask=local(prepared.mask),
        old_logp=rows(arrays.old_logp),
        old_entropy=rows(arrays.old_entropy),
        ref_logp=rows(arrays.ref_logp),
        advantage=local(prepared.advantage),
        weight=local(prepared.weight),
        entropy_group=local(prepared.entropy_group),
    )


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
