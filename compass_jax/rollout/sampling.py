"""Sampling: logits -> token, log-prob and entropy. Every draw's key is folded from (run seed,
purpose, prompt, visit, sample, position).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from compass_jax.model.logprobs import known_columns, log_softmax_entropy


class Purpose(enum.IntEnum):
    """The purpose of a sample, which is part of its key: evaluation does not repeat training's
    draws.
    """

    TRAIN = 0
    EVAL = 1
    FILTER = 2
    JUDGE = 3
    SERVE = 4
    COUPLED = 5  # training with the noise of coupled drafts
    ACCEPT = 6  # which tokens of a draft are accepted


@dataclass(frozen=True)
class Sampler:
    """Static sampling parameters. Temperature 0 is greedy, with log-probs at temperature 1.

    With `per_request` each sequence has separate parameters (`RowSampling`) instead of these three.
    `top_logprobs`: number of the likeliest tokens whose log-probs are returned with each token.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    per_request: bool = False
    top_logprobs: int = 0

    @property
    def truncates(self) -> bool:
        """Whether it truncates the distribution (`truncate`)."""
        return self.top_k > 0 or self.top_p < 1.0


class RowSampling(NamedTuple):
    """The parameters of each sequence for a `per_request` sampler. Values as in `truncate`."""

    temperature: Float[Array, "n"]
    top_k: Int[Array, "n"]
    top_p: Float[Array, "n"]

    @classmethod
    def plain(cls, n: int) -> RowSampling:
        """Returns parameters of `n` greedy rows without truncation."""
        zeros, ones = jnp.zeros((n,), jnp.float32), jnp.ones((n,), jnp.float32)
        return cls(zeros, jnp.zeros((n,), jnp.int32), ones)


def sample_keys(
    seed: int,
    purpose: Purpose,
    prompt_ids: UInt32[Array, "n"],
    visits: UInt32[Array, "n"],
    samples: UInt32[Array, "n"],
) -> UInt32[Array, "n 2"]:
    """Returns one key per sequence; `sample` folds in the position of each draw."""
    base = jax.random.fold_in(jax.random.key(seed), int(purpose))

    def one(prompt, visit, sample):
        return jax.random.key_data(
            jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(base, prompt), visit), sample)
        )

    return jax.vmap(one)(prompt_ids, visits, samples)


def truncate(
    logits: Float[Array, "n v"], top_k: int | Int[Array, "n"], top_p: float | Float[Array, "n"]
) -> Float[Array, "n v"]:
    """Returns logits with -inf outside the top-k and outside the smallest set of tokens with mass
    >= top-p. Ties with the last token stay. 0 or less for top_k, 1 for top_p: all tokens.

    The threshold is found bit by bit: a sort of the vocabulary takes 8 to 30 times as long on a
    CPU, and needs whole rows on a mesh.
    """
    n = logits.shape[0]
    top_k = jnp.broadcast_to(jnp.asarray(top_k, jnp.int32), (n,))
    # top_p = 0 keeps only the likeliest token
    top_p = jnp.clip(jnp.broadcast_to(jnp.asarray(top_p, jnp.float32), (n,)), 1e-12, None)
    order = _ordered(logits)

    def at_least_k(bound):
        return jnp.sum(order >= bound[:, None], axis=-1, dtype=jnp.int32) >= top_k

    lowest = jnp.where(top_k > 0, _highest(at_least_k, n), 0)
    top = jnp.where(order >= lowest[:, None], logits, -jnp.inf)
    # Top-p counts the mass of the tokens that top-k leaves, renormalised.
    mass = jax.nn.softmax(top.astype(jnp.float32), axis=-1)

    def at_least_p(bound):
        return jnp.sum(jnp.where(order >= bound[:, None], mass, 0.0), axis=-1) >= top_p

    lowest = jnp.maximum(lowest, jnp.where(top_p < 1, _highest(at_least_p, n), 0))
    return jnp.where(order >= lowest[:, None], logits, jnp.array(-jnp.inf, logits.dtype))


def _ordered(x: Float[Array, "n v"]) -> UInt32[Array, "n v"]:
    """Returns integers with the order of the numbers `x` as float32; 0 and -0 are equal."""
    # Bits of positive floats have the floats' order; those of negative ones the reverse order,
    # which flipping all bits corrects. Adding 0 turns -0 into 0.
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32) + 0.0, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _highest(holds: Callable[[Array], Array], n: int) -> UInt32[Array, "n"]:
    """Returns the highest 32-bit number for which the monotone predicate `holds` is true, or 0."""

    def one_bit(i, bound):
        higher = bound | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        return jnp.where(holds(higher), higher, bound)

    return jax.lax.fori_loop(0, 32, one_bit, jnp.zeros((n,), jnp.uint32))


def _argmax(x: Float[Array, "n v"], last: int) -> Int[Array, "n"]:
    """Returns the first index of the largest value, by two plain reductions, because XLA's argmax
    is slow on CPU. A row of NaN gives `last`.
    """
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)[None, :]
    largest = x == jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(largest, index, jnp.int32(last)), axis=-1)


def _truncated(
    scaled: Float[Array, "n v"], sampler: Sampler, rows: RowSampling | None
) -> Float[Array, "n v"]:
    """Returns `truncate` of the logits if the sampler or any drawn sequence truncates, else the
    logits.
    """
    if rows is None:
        return truncate(scaled, sampler.top_k, sampler.top_p) if sampler.truncates else scaled
    truncates = (rows.temperature > 0) & ((rows.top_k > 0) | (rows.top_p < 1))
    return jax.lax.cond(
        jnp.any(truncates), lambda: truncate(scaled, rows.top_k, rows.top_p), lambda: scaled
    )


def scaled_logits(
    logits: Float[Array, "n v"],
    sampler: Sampler,
    rows: RowSampling | None = None,
    known: int | None = None,
) -> Float[Array, "n v"]:
    """Returns logits / T, with logits at T = 0. Ids from `known` on have no probability."""
    logits = known_columns(logits, known)
    if rows is None:
        scaled = logits / (sampler.temperature or 1.0)
    else:
        each = rows.temperature
        positive = jnp.where(each > 0, each, jnp.ones_like(each))
        scaled = logits / positive.astype(logits.dtype)[:, None]
    # masked again, since the lowest logits overflow when divided by a small temperature
    return known_columns(scaled, known)


def sample(
    logits: Float[Array, "n v"],
    keys: UInt32[Array, "n 2"],
    positions: Int[Array, "n"],
    sampler: Sampler,
    rows: RowSampling | None = None,
    known: int | None = None,
) -> tuple[Int[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
    """Returns (token, logp, entropy) at `positions`; logp and entropy are those of softmax(logits /
    T) over the full vocabulary, before truncation.

    `rows` are the parameters of each sequence for a `per_request` sampler. Ids from `known` on are
    not tokens: they are not drawn, and do not count in logp or entropy (`known_columns`).
    """
    if sampler.per_request != (rows is not None):
        raise ValueError("a per_request sampler needs the parameters of each sequence")
    v = logits.shape[-1]
    last = (v if known is None else min(known, v)) - 1
    logits, scaled = known_columns(logits, known), scaled_logits(logits, sampler, rows, known)
    logp, entropy = log_softmax_entropy(scaled)
    if sampler.temperature == 0 and not sampler.per_request:
        token = _argmax(logits, last)
    else:
        # The largest of logits / T + Gumbel noise is a draw from softmax(logits / T). The noise
        # depends on the key alone, so that coupled drafts can repeat it under other logits.
        def noise(key, position):
            key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
            return jax.random.gumbel(key, logits.shape[-1:], logits.dtype)

        truncated = _truncated(scaled, sampler, rows)
        token = _argmax(truncated + jax.vmap(noise)(keys, positions), last)
        if rows is not None:
            token = jnp.where(rows.temperature > 0, token, _argmax(logits, last))
    return token, jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0], entropy


def draw_uniform(
    keys: UInt32[Array, "n 2"], positions: Int[Array, "n"], dtype
) -> Float[Array, "n"]:
    """Returns a number in [0, 1) for each sequence at its position."""

    def one(key, position):
        key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
        return jax.random.uniform(key, (), dtype)

    return jax.vmap(one)(keys, positions)


def is_end(token: Int[Array, "n"], end_ids: tuple[int, ...]) -> Bool[Array, "n"]:
    """Returns which tokens are one of `end_ids`."""
    return (token[:, None] == jnp.array(end_ids, jnp.int32)[None]).any(axis=1)
