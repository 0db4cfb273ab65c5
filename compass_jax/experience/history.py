"""What a run remembers of its prompts: pass rates, lengths, the last result. It is in the
checkpoint; later steps may select by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from compass_jax.config import RewardConfig
from compass_jax.experience.policies import is_uniform, known_rewards
from compass_jax.records import Group, Outcome, Prompt

LABEL_MEMORY = 0.9  # of a label's sums from step to step


def outcome(group: Group, rewards: RewardConfig) -> Outcome:
    """The group's outcome, judged on its known rewards."""
    known = known_rewards(group.scores)
    kind = ""
    if is_uniform(group.scores):
        kind = (
            "easy"
            if min(known) >= rewards.right_at
            else "hard"
            if max(known) <= rewards.wrong_at
            else ""
        )
    return Outcome(
        len(known),
        float(sum(known)),
        sum(r.response_length for r in group.rollouts),
        kind,
        len(group.rollouts),
    )


class PromptHistory:
    """Of each prompt: samples, those scored, sum of rewards, response tokens, and of its last group
    the mean reward and length.

    `samples` and `tokens` of each label too, halved in weight about every seven steps, for prompts
    that have not come yet.
    """

    def __init__(self) -> None:
        self._entries: dict[str, dict[str, float]] = {}
        self._labels: dict[str, list[float]] = {}  # label -> [samples, response tokens]

    def __getitem__(self, prompt_id: int) -> dict[str, float]:
        return self._entries[str(prompt_id)]

    def __len__(self) -> int:
        return len(self._entries)

    def update(self, results: Iterable[tuple[Prompt, Outcome]]) -> None:
        """Takes in a step's groups."""
        for sums in self._labels.values():
            sums[:] = [LABEL_MEMORY * x for x in sums]
        for prompt, found in results:
            entry = self._entries.setdefault(
                str(prompt.id),
                dict.fromkeys(("samples", "scored", "reward_sum", "tokens", "last_reward"), 0.0),
            )
            entry["samples"] += found.samples
            entry["scored"] += found.known
            entry["reward_sum"] += found.reward_sum
            entry["tokens"] += found.response_tokens
            entry["last_length"] = found.response_tokens / found.samples
            if found.known:
                entry["last_reward"] = found.reward_sum / found.known
            label = self._labels.setdefault(prompt.label, [0.0, 0.0])
            label[:] = [label[0] + found.samples, label[1] + found.response_tokens]

    def expected_length(self, prompt: Prompt) -> float:
        """Response tokens of a sample: the mean of the prompt's last group, of its label where it
        is new, NaN where the label is new too.
        """
        if str(prompt.id) in self._entries:
            return self._entries[str(prompt.id)]["last_length"]
        samples, tokens = self._labels.get(prompt.label, (0.0, 0.0))
        return tokens / samples if samples else math.nan

    def state(self) -> dict[str, Any]:
        """All entries, as JSON."""
        return {
            "prompts": {k: dict(v) for k, v in self._entries.items()},
            "labels": {k: list(v) for k, v in self._labels.items()},
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continues from `state`."""
        self._entries = {name: dict(entry) for name, entry in state["prompts"].items()}
        self._labels = {name: list(sums) for name, sums in state["labels"].items()}
