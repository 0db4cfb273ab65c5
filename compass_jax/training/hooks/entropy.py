"""The entropy of a step's responses by label and by verdict, and a notice where it collapses."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator

import numpy as np
from jaxtyping import Bool

from compass_jax.aliases import JsonObject
from compass_jax.config import RewardConfig
from compass_jax.data.difficulty import label_of
from compass_jax.training.hooks.base import Hook, StepRecord
from compass_jax.training.hooks.step_metrics import MAX_LABELS

FIRST, LATEST = 4, 8  # steps of the mean at the start, and of the latest mean
COLLAPSED = 0.25  # share of the first steps' entropy


class EntropyMetrics(Hook):
    """Adds the mean entropy of right and wrong responses, and of each label's, over those that the
    step's passes scored. Tells once where the policy's entropy falls below COLLAPSED times that of
    the run's first steps.
    """

    name = "entropy"

    def __init__(
        self, rewards: RewardConfig, labels: Collection[str], tell: Callable[[str, str], None]
    ):
        """Creates the hook of a run with these labels; `tell` prints the first notice of a kind."""
        self._right_at, self._tell = rewards.right_at, tell
        self._by_label = 1 < len(labels) <= MAX_LABELS
        self._first: list[float] = []
        self._latest: list[float] = []

    def on_metrics(self, step: StepRecord) -> None:
        """Adds the metrics, and tells of a collapse."""
        for name, rows in self._parts(step):
            values = step.entropy[rows & np.isfinite(step.entropy)]
            if len(values):
                step.metrics[name] = float(values.mean())
        self._watch(step.metrics.get("entropy_nats", math.nan))

    def _parts(self, step: StepRecord) -> Iterator[tuple[str, Bool[np.ndarray, " b"]]]:
        """Yields (metric, rows of its responses)."""
        arrays = step.filled
        known, right = arrays.known, arrays.reward >= self._right_at
        yield "entropy/right", known & right
        yield "entropy/wrong", known & ~right
        if not self._by_label:
            return
        labels = [label_of(group.prompt) for group in step.trained]
        for label in dict.fromkeys(labels):
            places = [g for g, one in enumerate(labels) if one == label]
            yield f"label/{label}/entropy_nats", np.isin(arrays.group, places)

    def _watch(self, entropy: float) -> None:
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
                " held-out reward stands still too, lower rl.optim.learning_rate, or raise"
                " rollout.temperature (docs/howto/failures.md)",
            )

    def state(self) -> JsonObject:
        """Returns the entropies that the next steps are compared with."""
        return {"first": self._first, "latest": self._latest} if self._first else {}

    def restore(self, state: JsonObject, number: int) -> None:
        """Returns to `state`."""
        self._first, self._latest = list(state["first"]), list(state["latest"])
