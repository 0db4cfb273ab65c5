"""The sigmoid router of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and GLM-4.5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from compass_jax.config import MoEConfig
from compass_jax.config.errors import check
from compass_jax.config.ranges import Range
from compass_jax.config.router import Router
from compass_jax.model.routers.inputs import RouterInputs, at_ids

_NEVER = -1e30  # a score outside the chosen groups; finite, so that no row is NaN


@dataclass(frozen=True)
class Sigmoid(Router):
    """s = sigmoid(logits). Experts are chosen by s + b, with a bias b that has no gradient and is
    no part of the gates; with groups, within the `top_groups` groups whose two largest s + b sum
    highest. The gates are s of the chosen, over their sum where gates are normalised, times
    `scale`.
    """

    selection_bias: ClassVar[bool] = True

    groups: Annotated[int, Range(1, 65_535)] = 1
    """Number of groups of experts (HF n_group)."""
    top_groups: Annotated[int, Range(1, 65_535)] = 1
    """Number of groups from which a token's experts come (HF topk_group)."""
    scale: Annotated[float, Range(0, 1e6, above=True)] = 1.0
    """Factor of the gates (HF routed_scaling_factor)."""

    def check(self, moe: MoEConfig) -> None:
        """Raises ConfigError for groups that do not divide the experts or hold too few of them."""
        size = moe.experts // self.groups
        check(
            moe.experts % self.groups == 0,
            f"{self.key}.groups = {self.groups} does not divide model.moe.experts = {moe.experts}",
        )
        check(
            self.top_groups <= self.groups,
            f"{self.key}.top_groups = {self.top_groups}: must be in 1..groups = {self.groups}",
        )
        check(
            moe.top_k <= self.top_groups * size,
            f"model.moe.top_k = {moe.top_k} exceeds the {self.top_groups * size} experts of"
            f" {self.key}.top_groups = {self.top_groups} groups",
        )

    def choice(self, inputs: RouterInputs) -> Float[Array, "n e"]:
        """Returns s + b, and a large negative number outside the chosen groups."""
        scores = jax.nn.sigmoid(inputs.logits)
        if inputs.bias is not None:
            scores = scores + jax.lax.stop_gradient(inputs.bias)[None, :]
        if self.groups == 1:
            return scores
        n, e = scores.shape
        by_group = scores.reshape(n, self.groups, e // self.groups)
        strength = jnp.sum(jax.lax.top_k(by_group, min(2, by_group.shape[-1]))[0], axis=-1)
        _, best = jax.lax.top_k(strength, self.top_groups)
        allowed = jnp.any(jax.nn.one_hot(best, self.groups, dtype=jnp.bool_), axis=1)
        masked = jnp.where(allowed[:, :, None], by_group, jnp.array(_NEVER, scores.dtype))
        return masked.reshape(n, e)

    def gates(self, inputs: RouterInputs, ids: Int[Array, "n k"]) -> Float[Array, "n k"]:
        """Returns the gates of the experts `ids`."""
        gates = at_ids(jax.nn.sigmoid(inputs.logits), ids)
        if inputs.normalised:
            # All sigmoids may round to 0: the small number avoids 0 / 0.
            gates = gates / (jnp.sum(gates, axis=-1, keepdims=True) + 1e-20)
        return gates * jnp.asarray(self.scale, gates.dtype)

    def probs(self, inputs: RouterInputs) -> Float[Array, "n e"]:
        """Returns s over the sum of all experts' s."""
        scores = jax.nn.sigmoid(inputs.logits)
        return scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
