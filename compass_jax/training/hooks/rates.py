"""Factors of the learning rate that a step's tokens and groups give (rl.optim)."""

from __future__ import annotations

import math

from compass_jax.base.aliases import JsonObject
from compass_jax.config import OptimConfig
from compass_jax.experience.growth import varies
from compass_jax.training.hooks.base import Hook, StepRecord


class RateFactors(Hook):
    """Scales the learning rate of a step's updates: by cosine decay over the tokens that the run
    generated before the step (rl.optim.schedule_tokens), and by the number of its groups whose
    rewards vary, against `groups` (rl.optim.rate_by_groups).
    """

    name = "rate"

    def __init__(self, optim: OptimConfig, groups: int):
        self._optim, self._groups, self._tokens = optim, groups, 0

    def on_arrays(self, step: StepRecord) -> None:
        """Scales the step's rate, once held groups have their places in it."""
        if self._optim.schedule_tokens:
            share = min(self._tokens / self._optim.schedule_tokens, 1.0)
            step.scale_rate(0.5 * (1 + math.cos(math.pi * share)))
        if self._optim.rate_by_groups:
            # the square-root scaling of Adam's rate with the batch's size (arXiv 2205.10287); only
            # groups with an advantage count
            step.scale_rate(math.sqrt(sum(map(varies, step.trained)) / self._groups))

    def on_metrics(self, step: StepRecord) -> None:
        """Counts the step's tokens."""
        self._tokens += round(step.metrics["waste/tokens_generated"])

    def state(self) -> JsonObject:
        """Returns the number of tokens, where the schedule depends on it."""
        return {"tokens": self._tokens} if self._optim.schedule_tokens else {}

    def restore(self, state: JsonObject, number: int) -> None:
        """Returns to a number of tokens."""
        self._tokens = state["tokens"]
