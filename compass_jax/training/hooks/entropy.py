"""A notice where the policy's entropy collapses."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.training.hooks.base import Hook, StepRecord

FIRST, LATEST = 4, 8  # steps of the mean at the start, and of the latest mean
COLLAPSED = 0.25  # share of the first steps' entropy; not measured


class EntropyWatch(Hook):
    """Tells once where the policy's entropy falls below COLLAPSED times that of the run's first
    steps. `tell` prints the first notice of a kind.
    """

    name = "entropy"

    def __init__(self, tell: Callable[[str, str], None]):
        self._tell = tell
        self._first: list[float] = []
        self._latest: list[float] = []

    def on_metrics(self, step: StepRecord) -> None:
        """Compares the latest steps with the first ones."""
        entropy = step.metrics.get("entropy_nats", math.nan)
        if not math.isfinite(entropy):
            return
        if len(self._first) < FIRST:
            self._first.append(entropy)
            return
        self._latest = [*self._latest, entropy][-LATEST:]
        before, now = float(np.mean(self._first)), float(np.mean(self._latest))
        if len(self._latest) == LATEST and now < COLLAPSED * before:
            self._tell(
                "entropy",
                f"the policy's entropy is {now:.3g} nats a token, {now / before:.0%} of that of the"
                " first steps: answers to one prompt become alike, and fewer groups vary. If the"
                " held-out reward stands still too, lower rl.optim.learning_rate, or hold the"
                " entropy by rl.entropy.keep (docs/howto/failures.md)",
            )

    def state(self) -> JsonObject:
        """Returns the entropies that the next steps are compared with."""
        return {"first": self._first, "latest": self._latest} if self._first else {}

    def restore(self, state: JsonObject, number: int) -> None:
        """Returns to `state`."""
        self._first, self._latest = list(state["first"]), list(state["latest"])
