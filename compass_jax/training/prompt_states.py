"""The policy's hidden states of prompts, for the predictor that reads them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from compass_jax.base.aliases import Tree
from compass_jax.base.records import Prompt
from compass_jax.devices.sharding import fetch
from compass_jax.model.transformer import Transformer, apply

ROWS = 32  # prompts of a forward pass, at most; a multiple of the mesh's rows


@partial(jax.jit, static_argnames="model")
def last_states(
    model: Transformer, params: Tree, tokens: Int[Array, "b t"], lengths: Int[Array, "b"]
) -> Float[Array, "b h"]:
    """Computes the hidden state, before the LM head, of each row's last token; routes are chosen
    live. That of a row of length 0 is undefined.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32)[None], tokens.shape)
    out = apply(model, params, tokens, positions, mask=positions < lengths[:, None])
    last = jnp.maximum(lengths - 1, 0)[:, None, None]
    return jnp.take_along_axis(out.hidden, last, axis=1)[:, 0].astype(jnp.float32)


def prompt_states(
    model: Transformer, params: Tree, prompts: Sequence[Prompt], buckets: Sequence[int]
) -> Float[np.ndarray, "n h"]:
    """Returns the states of prompts, float32, the same numbers in every process. Prompts of one
    bucket share forward passes of equal shape, so that there is a program for each bucket.
    """
    multiple = 1 if model.placement is None else model.placement.rows_multiple
    rows = -(-ROWS // multiple) * multiple
    out: dict[int, Float[np.ndarray, " h"]] = {}
    for length, places in _by_bucket(prompts, buckets):
        for first in range(0, len(places), rows):
            part = places[first : first + rows]
            tokens, lengths = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
            for row, place in enumerate(part):
                ids = prompts[place].tokens
                tokens[row, : len(ids)], lengths[row] = ids, len(ids)
            states = np.asarray(fetch(last_states(model, params, tokens, lengths)))
            out |= dict(zip(part, states[: len(part)], strict=True))
    return np.array([out[place] for place in range(len(prompts))])


def _by_bucket(
    prompts: Sequence[Prompt], buckets: Sequence[int]
) -> Iterable[tuple[int, list[int]]]:
    by_length: dict[int, list[int]] = {}
    for place, prompt in enumerate(prompts):
        length = next(x for x in buckets if len(prompt.tokens) <= x)
        by_length.setdefault(length, []).append(place)
    return sorted(by_length.items())
