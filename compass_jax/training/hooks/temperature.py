"""Control of the rollout's temperature by the policy's entropy (rl.entropy)."""

from __future__ import annotations

import math
from collections.abc import Callable

from compass_jax.base.aliases import JsonObject
from compass_jax.config.entropy import EntropyConfig
from compass_jax.training.hooks.base import Hook, StepRecord

FIRST = 4  # steps, whose mean entropy is the reference


class TemperatureControl(Hook):
    """Moves the temperature T of the next rollouts after each step with the entropy H, in nats a
    token at the step's own temperature:

        log T <- log T + gain (log(keep H_0) - log H),   base <= T <= most base

    H_0 is the mean of the first steps', which are sampled at `base`. Old and new log-probs of a
    step are at the temperature that sampled it.

    Args:
        base: rollout.temperature.
        sample_at: sets the temperature of the rollouts that begin from then on.
        train_at: sets that of the log-probs that the updates compute.
    """

    name = "temperature"

    def __init__(
        self,
        settings: EntropyConfig,
        base: float,
        sample_at: Callable[[float], None],
        train_at: Callable[[float], None],
    ):
        self._settings, self._base = settings, base
        self._sample_at, self._train_at = sample_at, train_at
        self._next = base
        self._first: list[float] = []
        # step -> its temperature; with rl.one_step_off two steps are under way
        self._of: dict[int, float] = {}

    def before_rollout(self, number: int) -> None:
        """Sets the temperature of the step's rollout."""
        self._of = {n: t for n, t in self._of.items() if n >= number - 1} | {number: self._next}
        self._sample_at(self._next)

    def on_groups(self, step: StepRecord) -> None:
        """Sets the temperature of the step's log-probs."""
        self._train_at(self._of[step.number])

    def on_metrics(self, step: StepRecord) -> None:
        """Moves the temperature."""
        step.metrics["rollout/temperature"] = self._of[step.number]
        entropy = step.metrics.get("entropy_nats", math.nan)
        if not (math.isfinite(entropy) and entropy > 0):
            return
        if len(self._first) < FIRST:
            self._first.append(entropy)
            return
        target = self._settings.keep * sum(self._first) / len(self._first)
        temperature = self._next * (target / entropy) ** self._settings.gain
        self._next = min(max(temperature, self._base), self._settings.most * self._base)

    def state(self) -> JsonObject:
        """Returns the temperatures, and the first steps' entropies."""
        return {"next": self._next, "first": self._first, "of": [*self._of.items()]}

    def restore(self, state: JsonObject, number: int) -> None:
        """Returns to `state`, within the rollout that had begun."""
        self._next, self._first = state["next"], list(state["first"])
        self._of = {step: temperature for step, temperature in state["of"]}
        self._sample_at(self._of[max(self._of)] if self._of else self._base)
