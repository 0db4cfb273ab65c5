"""Difficulty of prompts: the pass rate, measured before or during the run, and its band in a
stage's mix (rl.stages).
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Outcome, Prompt
from compass_jax.config import RewardConfig
from compass_jax.config.rl_stage import Band

UNKNOWN = 0.5  # pass rate of a prompt without measurements
MEMORY = 0.9  # decay of a label's counts per step
STRENGTH = 8.0  # weight of a label's pass rate, in samples, against a prompt's own


class Measured(NamedTuple):
    """A pass rate measured before the run: `right` of `known` answers to `prompt` were correct."""

    prompt: Prompt
    right: float
    known: float


def label_of(prompt: Prompt) -> str:
    """Returns the group of prompts of similar difficulty: the prompt's label and, if its row has a
    column "difficulty", that value ("maths/3").
    """
    kinds = [text.partition("/") for text in prompt.labels]
    return "/".join([prompt.label, *(value for kind, _, value in kinds if kind == "difficulty")])


class PassRates:
    """Counts of correct and judged answers for each prompt and each label.

    A reward counts as a pass rate on the scale from `wrong_at` to `right_at`, clipped to [0, 1].

    Args:
        rewards: the reward scale.
        keeps: decay of a prompt's earlier counts at its next group; 0 uses only the last group.
        measured: pass rates from before the run. For a label they weigh STRENGTH samples.
    """

    def __init__(
        self, rewards: RewardConfig, keeps: float = 0.0, measured: Iterable[Measured] = ()
    ):
        self._low, self._high, self._keeps = rewards.wrong_at, rewards.right_at, keeps
        self._prompts: dict[str, list[float]] = {}
        self._labels: dict[str, list[float]] = {}
        for prompt, right, known in measured:
            if known:
                self._prompts[str(prompt.id)] = [right, known]
                self._add(label_of(prompt), right, known)
        for counts in self._labels.values():
            counts[:] = [STRENGTH * counts[0] / counts[1], STRENGTH]

    def _add(self, label: str, right: float, known: float) -> None:
        counts = self._labels.setdefault(label, [0.0, 0.0])
        counts[:] = [counts[0] + right, counts[1] + known]

    def counts_of(self, prompt: Prompt) -> tuple[float, float]:
        """Returns the weighted (right, known) answers of a prompt; zeros without measurements."""
        right, known = self._prompts.get(str(prompt.id), (0.0, 0.0))
        return right, known

    def of_label(self, prompt: Prompt) -> float:
        """Returns the pass rate of the prompt's label; UNKNOWN for a new label."""
        return self.labels().get(label_of(prompt), UNKNOWN)

    def labels(self) -> dict[str, float]:
        """Returns label -> pass rate over the last steps (decay 0.9 per step)."""
        return {label: right / known for label, (right, known) in self._labels.items()}

    def __call__(self, prompt: Prompt) -> float:
        """Returns the measured pass rate of the prompt, or its label's for an unmeasured prompt."""
        right, known = self.counts_of(prompt)
        return right / known if known else self.of_label(prompt)

    def update(self, results: Iterable[tuple[Prompt, Outcome]]) -> None:
        """Adds the outcomes of a step's groups. Groups without a verdict are ignored."""
        for counts in self._labels.values():
            counts[:] = [MEMORY * x for x in counts]
        for prompt, outcome in results:
            if not outcome.known:
                continue
            mean = (outcome.reward_sum / outcome.known - self._low) / (self._high - self._low)
            right = outcome.known * min(1.0, max(0.0, mean))
            previous = [self._keeps * x for x in self.counts_of(prompt)]
            self._prompts[str(prompt.id)] = [previous[0] + right, previous[1] + outcome.known]
            self._add(label_of(prompt), right, float(outcome.known))

    def state(self) -> JsonObject:
        """Returns all counts, as JSON."""
        return copy.deepcopy({"labels": self._labels, "last": self._prompts})

    def restore(self, state: JsonObject) -> None:
        """Restores the counts from `state`."""
        self._labels, self._prompts = copy.deepcopy((state["labels"], state["last"]))


def distance(band: Band, rate: float) -> float:
    """Returns the distance of a pass rate from a band; 0 inside. A band excludes its upper bound,
    which belongs to the next band, unless it is 1.
    """
    low, high, _ = band
    return max(low - rate, rate - high, 0.0)


def band_of(mix: Sequence[Band], rate: float) -> int | None:
    """Returns the index of the band that contains a pass rate, or None."""
    matches = (i for i, (low, high, _) in enumerate(mix) if low <= rate < high or rate == high == 1)
    return next(matches, None)
