"""The inputs of an objective: `PolicyInputs` of its surrogate, `WeightInputs` of its weights; and
the means that several objectives share.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from compass_jax.rl.grouping import SampleRows, group_sum, per_row


class PolicyInputs(NamedTuple):
    """One micro-batch, one response a row; only `logp` carries a gradient."""

    logp: Float[Array, "b t"]
    old_logp: Float[Array, "b t"]
    old_entropy: Float[Array, "b t"]
    advantage: Float[Array, "b t"]
    mask: Bool[Array, "b t"]
    entropy_group: Int[Array, "b t"] | None  # from `Objective.groups`
    vocab_size: int


def response_weight(
    group: Int[Array, "b"], known: Bool[Array, "b"], n_groups: int, dtype
) -> Float[Array, "b"]:
    """Computes 1 / (G s_g): every group with a known sample weighs the same, whatever its number of
    samples s_g; unknown and padding rows weigh 0.
    """
    known = known & (group >= 0)
    samples = group_sum(known.astype(jnp.int32), group, n_groups)
    groups = jnp.sum(samples > 0, dtype=jnp.int32)
    share = jnp.ones((), dtype) / jnp.maximum(per_row(samples, group) * groups, 1).astype(dtype)
    return jnp.where(known, share, jnp.zeros((), dtype))


class UpdateShares(NamedTuple):
    """Shares of rows in an update, and its number of tokens."""

    whole_responses: Float[Array, "b 1"]
    responses: Float[Array, "b 1"]
    tokens: Int[Array, ""]


def update_shares(
    group: Int[Array, "b"],
    known: Bool[Array, "b"],
    n_groups: int,
    lengths: Int[Array, "b"],
    dtype,
    samples: SampleRows | None = None,
) -> UpdateShares:
    """Computes the shares of all rows of an update, of `lengths` in tokens (samples: None: each row
    is one).
    """
    known = known & (group >= 0)
    tokens = jnp.sum(jnp.where(known, lengths, 0), dtype=jnp.int32)
    if samples is None:
        weight = response_weight(group, known, n_groups, dtype)[:, None]
        return UpdateShares(weight, weight, tokens)
    weight = response_weight(group, known & samples.counted, n_groups, dtype)
    weight, total = weight[samples.first][:, None], jnp.maximum(samples.sum(lengths), 1)
    share = lengths.astype(dtype) / total.astype(dtype)
    return UpdateShares(weight, weight * share[:, None], tokens)


class WeightInputs(NamedTuple):
    """Rows of one update: all of them or, while it is scored, those of a micro-batch."""

    mask: Bool[Array, "b t"]
    group: Int[Array, "b"]  # the prompt of each row; -1: padding
    known: Bool[Array, "b"]
    n_groups: int
    entropy_group: Int[Array, "b t"] | None
    max_new_tokens: int | None
    dtype: jnp.dtype
    # the weight of each response in a mean over responses; all rows of one have it
    whole_responses: Float[Array, "b 1"]
    # that of each row: the response's, which its rows share by their tokens
    responses: Float[Array, "b 1"]
    tokens: Int[Array, ""]  # of all rows of the update that have a known reward


def token_mean(x: WeightInputs) -> Float[Array, "b t"]:
    """Returns the weights of a mean over responses of the mean over a response's tokens."""
    count = jnp.maximum(jnp.sum(x.mask, axis=1, keepdims=True), 1).astype(x.dtype)
    return x.responses * (x.mask.astype(x.dtype) / count)


def all_token_mean(x: WeightInputs) -> Float[Array, "b t"]:
    """Returns the weights of a mean over all tokens of the update, in which a long response weighs
    more (DAPO, arXiv 2503.14476, section 3.3).
    """
    counted = x.mask & (x.known & (x.group >= 0))[:, None]
    return counted.astype(x.dtype) / jnp.maximum(x.tokens, 1).astype(x.dtype)
