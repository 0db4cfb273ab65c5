"""The softmax router of Mixtral and Qwen."""

from __future__ import annotations

from dataclasses import dataclass

import jax
from jaxtyping import Array, Float, Int

from compass_jax.config.router import Router
from compass_jax.model.routers.inputs import RouterInputs, at_ids


@dataclass(frozen=True)
class Softmax(Router):
    """Softmax over the logits: g_i = exp(s_i) / sum_{j in ids} exp(s_j) where gates are normalised,
    exp(s_i) / sum_{all e} exp(s_j) elsewhere.
    """

    def gates(self, inputs: RouterInputs, ids: Int[Array, "n k"]) -> Float[Array, "n k"]:
        """Returns the gates of the experts `ids`."""
        if inputs.normalised:
            return jax.nn.softmax(at_ids(inputs.logits, ids), axis=-1)
        return at_ids(self.probs(inputs), ids)

    def probs(self, inputs: RouterInputs) -> Float[Array, "n e"]:
        """Returns the softmax of the logits."""
        return jax.nn.softmax(inputs.logits, axis=-1)
