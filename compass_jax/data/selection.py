"""Stage 1 of the zero-variance elimination: which prompts are worth a rollout (GRESO, arXiv 2506.02177)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from compass_jax.config import ZeroVarianceConfig
from compass_jax.data.stream import PromptStream
from compass_jax.records import Prompt

KINDS = ("easy", "hard")  # all right, all wrong
LEAST_CHANCE = 0.01  # of a prompt, however often its groups were uniform
STEP, LOWEST, HIGHEST = 0.01, 0.05, 0.95


class PromptSelector:
    """Skips a prompt whose z most recent consecutive groups were uniform of one kind with probability 1 - max(p^z, 0.01).

    p starts at 0.5 for each kind. After a step of the second epoch or later: if the share of that kind among the groups rolled out reaches its
    target, p falls by 0.01 (more is skipped), else it rises; it stays in 0.05..0.95. Draws depend on (seed, place in the stream) alone.
    """

    def __init__(self, config: ZeroVarianceConfig, seed: int):
        self._config, self._seed = config, seed
        self._chance = dict.fromkeys(KINDS, 0.5)
        self._streak: dict[str, list] = {}  # prompt id -> [kind, z]
        self.skipped = 0  # in the last batch

    def next_batch(self, stream: PromptStream, n: int) -> list[Prompt]:
        """The next `n` prompts that are not skipped. After a whole pass without enough of them, the rest is taken as it comes."""
        chosen: list[Prompt] = []
        self.skipped, looked_at = 0, 0
        while len(chosen) < n:
            place = stream.position
            prompt = stream.next_batch(1)[0]
            looked_at += 1
            if self._config.select and looked_at <= len(stream) and self._skips(prompt, place):
                self.skipped += 1
            else:
                chosen.append(prompt)
        return chosen

    def _skips(self, prompt: Prompt, place: int) -> bool:
        kind, z = self._streak.get(str(prompt.id), ("", 0))
        if z == 0:
            return False
        chance = max(self._chance[kind] ** z, LEAST_CHANCE)
        return float(np.random.default_rng((self._seed, 17, place)).random()) >= chance

    def update(self, results: Iterable[tuple[Prompt, str]], epoch: float) -> None:
        """Takes in a step's groups: (prompt, "easy", "hard" or "" for any other)."""
        results = list(results)
        for prompt, kind in results:
            before, z = self._streak.get(str(prompt.id), ("", 0))
            self._streak[str(prompt.id)] = [kind, (z + 1 if kind == before else 1) if kind else 0]
        if epoch < 1 or not results:
            return
        for kind, target in zip(KINDS, self._config.select_targets, strict=True):
            share = sum(k == kind for _, k in results) / len(results)
            moved = self._chance[kind] - STEP if share >= target else self._chance[kind] + STEP
            self._chance[kind] = min(HIGHEST, max(LOWEST, round(moved, 10)))

    def metrics(self) -> dict[str, float]:
        """The chance of a prompt of each kind whose last group was uniform."""
        return {f"zero_variance/keep_{k}": p for k, p in self._chance.items()}

    def state(self) -> dict[str, Any]:
        """Everything that later choices depend on, as JSON."""
        return {"chance": dict(self._chance), "streak": {k: list(v) for k, v in self._streak.items()}}

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self._chance, self._streak = dict(state["chance"]), {k: list(v) for k, v in state["streak"].items()}
