"""How hard a prompt is: its pass rate, measured before the run or in it, and its band among those
of a stage's mix (rl.stages).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from compass_jax.config import RewardConfig
from compass_jax.config.rl_stage import Band
from compass_jax.records import Outcome, Prompt

UNKNOWN = 0.5  # the pass rate of a prompt of which nothing is known
MEMORY = 0.9  # of a label's counts from step to step
STRENGTH = 8.0  # samples that a label's pass rate is worth beside a prompt's own


class Measured(NamedTuple):
    """A pass rate from before the run: `right` of `known` answers to `prompt` were right."""

    prompt: Prompt
    right: float
    known: float


def label_of(prompt: Prompt) -> str:
    """The prompts that are taken to be as hard as this one: those of its label and, where its row
    has a column "difficulty", of its difficulty ("maths/3").
    """
    kinds = [text.partition("/") for text in prompt.labels]
    return "/".join([prompt.label, *(value for kind, _, value in kinds if kind == "difficulty")])


class PassRates:
    """Right and known answers of each prompt and of each label. A reward is a pass rate on the
    scale from `wrong_at` to `right_at`, cut to 0..1.

    keeps: what a prompt's earlier counts weigh beside those of its next group; 0: the last group
        alone counts. measured: what is known before the run; of a label it is worth STRENGTH
        samples.
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

    def own(self, prompt: Prompt) -> tuple[float, float]:
        """(right, known) answers of a prompt, as they weigh now; (0, 0) where there are none."""
        right, known = self._prompts.get(str(prompt.id), (0.0, 0.0))
        return right, known

    def of_label(self, prompt: Prompt) -> float:
        """The pass rate of the prompt's label over the last steps; UNKNOWN for a new one."""
        return self.labels().get(label_of(prompt), UNKNOWN)

    def labels(self) -> dict[str, float]:
        """Label -> pass rate over the last steps (memory 0.9 a step)."""
        return {label: right / known for label, (right, known) in self._labels.items()}

    def __call__(self, prompt: Prompt) -> float:
        """What was measured of the prompt; of its label, where nothing was."""
        right, known = self.own(prompt)
        return right / known if known else self.of_label(prompt)

    def update(self, results: Iterable[tuple[Prompt, Outcome]]) -> None:
        """Takes in a step's groups; one without a verdict says nothing."""
        for counts in self._labels.values():
            counts[:] = [MEMORY * x for x in counts]
        for prompt, found in results:
            if not found.known:
                continue
            mean = (found.reward_sum / found.known - self._low) / (self._high - self._low)
            right = found.known * min(1.0, max(0.0, mean))
            before = [self._keeps * x for x in self.own(prompt)]
            self._prompts[str(prompt.id)] = [before[0] + right, before[1] + found.known]
            self._add(label_of(prompt), right, float(found.known))

    def state(self) -> dict[str, Any]:
        """All counts, as JSON."""
        return {
            "labels": {k: list(v) for k, v in self._labels.items()},
            "last": {k: list(v) for k, v in self._prompts.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self._labels = {k: list(v) for k, v in state["labels"].items()}
        self._prompts = {k: list(v) for k, v in state["last"].items()}


def distance(band: Band, rate: float) -> float:
    """How far a pass rate lies outside a band; 0 inside. A band ends before its highest pass rate,
    which is the next one's, but for 1.
    """
    low, high, _ = band
    return max(low - rate, rate - high, 0.0)


def band_of(mix: Sequence[Band], rate: float) -> int | None:
    """The band of a pass rate; None outside all of them."""
    inside = (i for i, (low, high, _) in enumerate(mix) if low <= rate < high or rate == high == 1)
    return next(inside, None)
