"""The losses of the Tinker API by name, as objectives of this package.

A loss is a sum over tokens, and the gradients of several requests add up. Names that begin with
"compass." are this package's objectives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from compass_jax.apps.tinker.errors import RequestError, refuse
from compass_jax.base.aliases import JsonObject
from compass_jax.config import ConfigError, Objective
from compass_jax.config.seam import seam_class
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.objectives.inputs import PolicyInputs, WeightInputs
from compass_jax.rl.policy import policy_objective
from compass_jax.rl.surrogate import Surrogate, token_log_ratio

PREFIX = "compass."
CLIPS = ("clip_low_threshold", "clip_high_threshold")
POLICY = frozenset({"target_tokens", "logprobs", "advantages"})
RATIO_MASK = "sequence_ratio_mask"
# settings of this package's objectives that need what the protocol does not carry
_UNUSED = ("kl_coef", "router_aux_coef")


@dataclass(frozen=True)
class TokenSum(Objective):
    """A loss of the Tinker API: every token weighs 1."""

    def weights(self, inputs: WeightInputs) -> Float[Array, "b t"]:
        """Returns 1 at each trained token."""
        return inputs.mask.astype(inputs.dtype)


@dataclass(frozen=True)
class CrossEntropy(TokenSum):
    """The weighted log-likelihood, w_t log pi(t); the weights are the inputs' advantages."""

    def surrogate(self, inputs: PolicyInputs) -> Surrogate:
        """Computes the weighted log-prob of each token."""
        zero, one = jnp.zeros((), inputs.logp.dtype), jnp.ones((), inputs.logp.dtype)
        value = jnp.where(inputs.mask, inputs.advantage * inputs.logp, zero)
        return Surrogate(value, jnp.broadcast_to(one, value.shape), inputs.mask & False, {})


@dataclass(frozen=True)
class ImportanceSampling(TokenSum):
    """The policy gradient with the ratio to the sampler, (pi(t) / q(t)) A_t."""

    def surrogate(self, inputs: PolicyInputs) -> Surrogate:
        """Computes the product of ratio and advantage of each token."""
        ratio = jnp.exp(token_log_ratio(inputs.logp, inputs.old_logp, inputs.mask))
        value = jnp.where(inputs.mask, ratio * inputs.advantage, jnp.zeros((), ratio.dtype))
        return Surrogate(value, ratio, inputs.mask & False, {})


@dataclass(frozen=True)
class ClippedWeights(TokenSum):
    """CISPO with both bounds, sg[clip(pi(t) / q(t), low, high)] A_t log pi(t)."""

    low: float = 0.8
    """Lower bound of a token's weight (a ratio)."""
    high: float = 1.2
    """Upper bound of a token's weight (a ratio)."""

    def surrogate(self, inputs: PolicyInputs) -> Surrogate:
        """Computes the weighted log-prob of each token."""
        logp, mask = inputs.logp, inputs.mask
        ratio = jax.lax.stop_gradient(jnp.exp(token_log_ratio(logp, inputs.old_logp, mask)))
        bounded = jnp.clip(ratio, self.low, self.high)
        value = jnp.where(mask, bounded * inputs.advantage * logp, jnp.zeros((), logp.dtype))
        return Surrogate(value, ratio, mask & (ratio != bounded), {})


class Loss(NamedTuple):
    """A loss by its name: its objective, and the names of a datum's inputs."""

    name: str
    objective: Objective
    inputs: frozenset[str]

    @property
    def is_policy(self) -> bool:
        """Whether it compares with the sampler's log-probs."""
        return "logprobs" in self.inputs


def loss_named(name: str, config: Mapping[str, float | str]) -> Loss:
    """Returns the loss of a request. Raises RequestError for a name or a setting that is not
    served.
    """
    if name.startswith(PREFIX):
        return Loss(name, _of_package(name, config), POLICY)
    if name not in LOSSES:
        names = ", ".join([*LOSSES, *(PREFIX + x for x in Objective.classes if x != "espo")])
        raise refuse(f"loss_fn = {name[:60]!r}", f"the losses are {names}")
    settings = CLIPS if name in ("ppo", "cispo", "gspo") else ()
    _check_names(name, config, settings)
    if name == "cross_entropy":
        return Loss(name, CrossEntropy(), frozenset({"target_tokens", "weights"}))
    if name == "importance_sampling":
        return Loss(name, ImportanceSampling(), POLICY)
    low, high = _clips(name, config)
    if name == "cispo":
        return Loss(name, ClippedWeights(low=low, high=high), POLICY)
    if name == "gspo":
        return Loss(name, Gspo(clip_low=1 - low, clip_high=high - 1), POLICY | {RATIO_MASK})
    return Loss(name, Grpo(clip_low=1 - low, clip_high=high - 1), POLICY)


LOSSES = ("cross_entropy", "importance_sampling", "ppo", "cispo", "gspo")


def _clips(name: str, config: Mapping[str, float | str]) -> tuple[float, float]:
    """Returns the bounds of the ratio; ppo and cispo have defaults."""
    if name == "gspo" and not set(CLIPS) <= set(config):
        raise RequestError(f"gspo: loss_fn_config lacks {' and '.join(CLIPS)}; set both")
    values = [config.get(key, default) for key, default in zip(CLIPS, (0.8, 1.2), strict=True)]
    low, high = (float(x) if isinstance(x, float | int) else -1.0 for x in values)
    if not 0 <= low <= 1 <= high <= 1e6:
        text = f"{CLIPS[0]} = {values[0]}, {CLIPS[1]} = {values[1]}"
        raise RequestError(f"{name}: {text}: must be numbers, at most 1 and at least 1")
    return low, high


def _of_package(name: str, config: Mapping[str, float | str]) -> Objective:
    short = name.removeprefix(PREFIX)
    if short not in Objective.classes:
        names = ", ".join(PREFIX + x for x in Objective.classes if x != "espo")
        raise refuse(f"loss_fn = {name[:60]!r}", f"the objectives are {names}")
    if short == "espo":
        raise refuse(name, "it needs the sampler's entropies, which no datum carries")
    cls = seam_class(Objective, short)
    _check_names(name, config, [x.name for x in fields(cls) if x.name not in _UNUSED])
    settings: JsonObject = dict(config)
    try:
        objective = cls(**settings)
        objective.validate()
    except ConfigError as error:
        raise RequestError(f"{name}: {error}") from error
    return objective


def _check_names(name: str, config: Mapping[str, float | str], known: Collection[str]) -> None:
    """Raises RequestError for a setting that is not `known`."""
    if names := sorted(set(config) - set(known)):
        has = ", ".join(known) or "none"
        raise refuse(f"{name}: loss_fn_config {names[0][:60]!r}", f"its settings are: {has}")


@partial(jax.jit, static_argnames=("objective", "columns"))
def loss_of(logp, old_logp, advantage, weight, mask, *, objective: Objective, columns: int):
    """Computes the loss of a micro-batch without a gradient, and its diagnostics."""
    per_token, diagnostics = policy_objective(
        logp,
        old_logp,
        jnp.zeros_like(old_logp),
        advantage,
        weight,
        objective,
        mask=mask,
        vocab_size=columns,
    )
    return {**diagnostics, "loss": (-jnp.sum(per_token),)}
