"""The inputs of a router."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class RouterInputs(NamedTuple):
    """The inputs of a router: the logits of a layer's tokens, and its settings."""

    logits: Float[Array, "n e"]  # in at least float32
    bias: Float[Array, "e"] | None  # of the choice; None for a router without one
    top_k: int  # experts of a token
    normalised: bool  # model.moe.norm_top_k


def at_ids(scores: Float[Array, "n e"], ids: Int[Array, "n k"]) -> Float[Array, "n k"]:
    """Returns the scores of each token's experts."""
    return jnp.take_along_axis(scores, ids, axis=-1)
