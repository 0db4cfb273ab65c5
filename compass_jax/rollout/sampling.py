"""Logits -> token, log-prob, entropy. Every draw's key is folded from (run seed, purpose, prompt,
visit, sample, position).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from compass_jax.model.logprobs import known_columns, log_softmax_entropy


class Purpose(enum.IntEnum):
    """What a sample is drawn for; part of its key, so evaluation never repeats training's draws."""

    TRAIN = 0
    EVAL = 1
    FILTER = 2
    JUDGE = 3
    SERVE = 4


@dataclass(frozen=True)
class Sampler:
    """Static sampling parameters. Temperature 0 is greedy, its log-probs are those of temperature
    1.

    With `per_request` each sequence brings a temperature of its own, and `temperature` says
    nothing. `top_logprobs`: so many of the likeliest tokens are told beside each drawn one.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    per_request: bool = False
    top_logprobs: int = 0

    @property
    def truncates(self) -> bool:
        """Whether it draws from a part of the vocabulary alone (`truncate`)."""
        return self.top_k > 0 or self.top_p < 1.0


def sample_keys(
    seed: int,
    purpose: Purpose,
    prompt_ids: UInt32[Array, "n"],
    visits: UInt32[Array, "n"],
    samples: UInt32[Array, "n"],
) -> UInt32[Array, "n 2"]:
    """One key per sequence; `sample` folds in the position of each draw."""
    base = jax.random.fold_in(jax.random.key(seed), int(purpose))

    def one(prompt, visit, sample):
        return jax.random.key_data(
            jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(base, prompt), visit), sample)
        )

    return jax.vmap(one)(prompt_ids, visits, samples)


def truncate(logits: Float[Array, "n v"], top_k: int, top_p: float) -> Float[Array, "n v"]:
    """Logits outside the top-k, or outside the smallest set of tokens with mass >= top-p, become
    -inf. Ties with the last token kept stay.
    """
    lowest = jnp.array(-jnp.inf, logits.dtype)
    if top_k:
        kth = jax.lax.top_k(logits, min(top_k, logits.shape[-1]))[0][:, -1:]
        logits = jnp.where(logits >= kth, logits, lowest)
    if top_p < 1.0:
        ordered = jnp.sort(logits, axis=-1, descending=True)
        before = jnp.cumsum(jax.nn.softmax(ordered, axis=-1), axis=-1) - jax.nn.softmax(
            ordered, axis=-1
        )
        last = jnp.min(
            jnp.where(before < top_p, ordered, jnp.array(jnp.inf, logits.dtype)),
            axis=-1,
            keepdims=True,
        )
        logits = jnp.where(logits >= last, logits, lowest)
    return logits


def _argmax(x: Float[Array, "n v"], last: int) -> Int[Array, "n"]:
    """The first index of the largest value: as two plain reductions, because XLA's argmax on CPU is
    one slow one. A row of NaN gives `last`.
    """
    index = jnp.arange(x.shape[-1], dtype=jnp.int32)[None, :]
    largest = x == jnp.max(x, axis=-1, keepdims=True)
    return jnp.min(jnp.where(largest, index, jnp.int32(last)), axis=-1)


def sample(
    logits: Float[Array, "n v"],
    keys: UInt32[Array, "n 2"],
    positions: Int[Array, "n"],
    sampler: Sampler,
    temperature: Float[Array, "n"] | None = None,
    known: int | None = None,
) -> tuple[Int[Array, "n"], Float[Array, "n"], Float[Array, "n"]]:
    """(token, logp, entropy) at `positions`; logp and entropy are of softmax(logits / T) over the
    full vocabulary, before truncation.

    `temperature` is that of each sequence where the sampler is `per_request`. Ids from `known` on
    are no tokens: they are not drawn, and count neither in logp nor in the entropy
    (`known_columns`).
    """
    if sampler.per_request and temperature is None:
        raise ValueError("a sampler per request needs the temperature of each sequence")
    each = temperature if sampler.per_request else None
    v = logits.shape[-1]
    last = (v if known is None else min(known, v)) - 1
    logits = known_columns(logits, known)
    if each is not None:
        positive = jnp.where(each > 0, each, jnp.ones_like(each))
        scaled = logits / positive.astype(logits.dtype)[:, None]
    else:
        scaled = logits / (sampler.temperature or 1.0)
    # again: divided by a small temperature, the lowest would overflow
    scaled = known_columns(scaled, known)
    logp, entropy = log_softmax_entropy(scaled)
    if sampler.temperature == 0 and not sampler.per_request:
        token = _argmax(logits, last)
    else:

        def noise(key, position):
            key = jax.random.fold_in(jax.random.wrap_key_data(key), position)
            return jax.random.gumbel(key, logits.shape[-1:], logits.dtype)

        kept = truncate(scaled, sampler.top_k, sampler.top_p)
        token = _argmax(kept + jax.vmap(noise)(keys, positions), last)
        if each is not None:
            token = jnp.where(each > 0, token, _argmax(logits, last))
    return token, jnp.take_along_axis(logp, token[:, None], axis=-1)[:, 0], entropy


def is_end(token: Int[Array, "n"], end_ids: tuple[int, ...]) -> Bool[Array, "n"]:
    """Returns which tokens are one of `end_ids`; none is where there are none."""
    return (token[:, None] == jnp.array(end_ids, jnp.int32)[None]).any(axis=1)
