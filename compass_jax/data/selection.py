"""Which prompts are worth a rollout: all, those whose groups varied lately (stage 1, GRESO, arXiv
2506.02177), or those that may be solved next.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from compass_jax.config import RewardConfig, RLConfig, ZeroVarianceConfig
from compass_jax.data.stream import PromptStream
from compass_jax.records import Outcome, Prompt

KINDS = ("easy", "hard")  # all right, all wrong
LEAST_CHANCE = 0.01  # of a prompt, however often its groups were uniform
STEP, LOWEST, HIGHEST = 0.01, 0.05, 0.95
STRENGTH = 8.0  # samples that a label's pass rate is worth beside a prompt's own
MEMORY = 0.9  # of a label's counts from step to step
LEAST_EXPLORED = 0.05  # chance of a prompt whose group is expected to be uniform


class PromptSelector:
    """Every prompt, in the order of the stream. What is derived from it skips some.

    Draws depend on (seed, place in the stream) alone, and what else a choice depends on is in
    `state`.
    """

    acts = False  # whether it ever skips

    def __init__(self, seed: int):
        self._seed = seed
        self.skipped = 0  # in the last batch

    def next_batch(self, stream: PromptStream, n: int) -> list[Prompt]:
        """The next `n` prompts that are not skipped. After a whole pass without enough of them, the
        rest is taken as it comes.
        """
        chosen: list[Prompt] = []
        self.skipped, looked_at = 0, 0
        while len(chosen) < n:
            place = stream.position
            prompt = stream.next_batch(1)[0]
            looked_at += 1
            if looked_at <= len(stream) and self._skips(prompt, place):
                self.skipped += 1
            else:
                chosen.append(prompt)
        return chosen

    def _skips(self, prompt: Prompt, place: int) -> bool:
        chance = self.chance(prompt)
        return (
            chance < 1 and float(np.random.default_rng((self._seed, 17, place)).random()) >= chance
        )

    def chance(self, prompt: Prompt) -> float:
        """Of a rollout, when the prompt comes."""
        return 1.0

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Takes in the outcomes of a step's groups; `epoch`: passes over the data so far."""

    def metrics(self) -> dict[str, float]:
        """What it has come to, by public names."""
        return {}

    def state(self) -> dict[str, Any]:
        """Everything that later choices depend on, as JSON."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""


class StreakSelector(PromptSelector):
    """Skips a prompt whose z most recent consecutive groups were uniform of one kind with
    probability 1 - max(p^z, 0.01).

    p starts at 0.5 for each kind. After a step of the second epoch or later: if the share of that
    kind among the groups rolled out reaches its target, p falls by 0.01 (more is skipped), else it
    rises; it stays in 0.05..0.95.
    """

    acts = True

    def __init__(self, config: ZeroVarianceConfig, seed: int):
        super().__init__(seed)
        self._targets = config.select_targets
        self._chance = dict.fromkeys(KINDS, 0.5)
        self._streak: dict[str, list] = {}  # prompt id -> [kind, z]

    def chance(self, prompt: Prompt) -> float:
        """max(p^z, 0.01)."""
        kind, z = self._streak.get(str(prompt.id), ("", 0))
        return 1.0 if z == 0 else max(self._chance[kind] ** z, LEAST_CHANCE)

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Moves streaks, and the chances from the second epoch on."""
        kinds = [(prompt, found.kind) for prompt, found in results]
        for prompt, kind in kinds:
            before, z = self._streak.get(str(prompt.id), ("", 0))
            self._streak[str(prompt.id)] = [kind, (z + 1 if kind == before else 1) if kind else 0]
        if epoch < 1 or not kinds:
            return
        for kind, target in zip(KINDS, self._targets, strict=True):
            share = sum(k == kind for _, k in kinds) / len(kinds)
            moved = self._chance[kind] - STEP if share >= target else self._chance[kind] + STEP
            self._chance[kind] = min(HIGHEST, max(LOWEST, round(moved, 10)))

    def metrics(self) -> dict[str, float]:
        """The chance of a prompt of each kind whose last group was uniform."""
        return {f"zero_variance/keep_{k}": p for k, p in self._chance.items()}

    def state(self) -> dict[str, Any]:
        """Chances and streaks."""
        return {
            "chance": dict(self._chance),
            "streak": {k: list(v) for k, v in self._streak.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self._chance, self._streak = (
            dict(state["chance"]),
            {k: list(v) for k, v in state["streak"].items()},
        )


class CurriculumSelector(PromptSelector):
    """Rolls a prompt out with the chance that its group varies: 1 - p^n - (1 - p)^n for n samples,
    at least 0.05.

    p is the pass rate expected of it: (its last group's right answers + 8 q) / (that group's known
    answers + 8), q the pass rate of its label over the last steps (memory 0.9 a step), 0.5 for a
    label not seen yet. Where the labels are tasks or difficulties this moves from what is solved
    now and then to what is solved next, without a rollout of every hopeless prompt, which stage 1
    needs. A pass rate is the reward on a scale from `wrong_at` to `right_at`, cut to 0..1.
    """

    acts = True

    def __init__(self, samples: int, rewards: RewardConfig, seed: int):
        super().__init__(seed)
        self._samples, self._rewards = samples, rewards
        self._labels: dict[str, list[float]] = {}  # label -> [right, known]
        self._last: dict[str, list[float]] = {}  # prompt id -> [right, known] of its last group

    def chance(self, prompt: Prompt) -> float:
        """1 - p^n - (1 - p)^n, at least 0.05."""
        right, known = self._last.get(str(prompt.id), (0.0, 0.0))
        p = (right + STRENGTH * self._rate(prompt.label)) / (known + STRENGTH)
        return max(LEAST_EXPLORED, 1 - p**self._samples - (1 - p) ** self._samples)

    def _rate(self, label: str) -> float:
        right, known = self._labels.get(label, (0.0, 0.0))
        return right / known if known else 0.5

    def update(self, results: Iterable[tuple[Prompt, Outcome]], epoch: float) -> None:
        """Moves the pass rates; a group without a verdict moves none."""
        for entry in self._labels.values():
            entry[:] = [MEMORY * x for x in entry]
        low, high = self._rewards.wrong_at, self._rewards.right_at
        for prompt, found in results:
            if found.known:
                right = found.known * min(
                    1.0, max(0.0, (found.reward_sum / found.known - low) / (high - low))
                )
                self._last[str(prompt.id)] = [right, float(found.known)]
                entry = self._labels.setdefault(prompt.label, [0.0, 0.0])
                entry[:] = [entry[0] + right, entry[1] + found.known]

    def metrics(self) -> dict[str, float]:
        """The expected pass rate of each label."""
        return {f"curriculum/{label}": self._rate(label) for label in self._labels}

    def state(self) -> dict[str, Any]:
        """Pass rates of labels and prompts."""
        return {
            "labels": {k: list(v) for k, v in self._labels.items()},
            "last": {k: list(v) for k, v in self._last.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self._labels, self._last = (
            {k: list(v) for k, v in state[name].items()} for name in ("labels", "last")
        )


def prompt_selector(config: RLConfig, rewards: RewardConfig, seed: int) -> PromptSelector:
    """The selector that the configuration asks for."""
    if config.zero_variance.select:
        return StreakSelector(config.zero_variance, seed)
    return (
        CurriculumSelector(config.group_size, rewards, seed)
        if config.zero_variance.curriculum
        else PromptSelector(seed)
    )
