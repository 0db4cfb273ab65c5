"""The prompts' history in a run: pass rates, lengths, the last result. It is in the checkpoint, and
later steps may select prompts by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Group, Outcome, Prompt
from compass_jax.config import RewardConfig
from compass_jax.experience.growth import is_uniform, known_rewards

LABEL_DECAY = 0.9  # of a label's sums per step


def outcome(group: Group, rewards: RewardConfig) -> Outcome:
    """Returns the group's outcome by its known rewards."""
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
        sum(r.response_length - r.sampled_length for r in group.rollouts),
    )


class PromptHistory:
    """Per prompt: samples, scored samples, sum of rewards, response tokens, and the mean reward and
    length of its last group.

    Per label: samples and tokens, whose weight halves about every seven steps, as an estimate for
    prompts that have not been sampled yet.
    """

    def __init__(self) -> None:
        # By the prompt's id as text, since JSON has no other keys.
        self._entries: dict[str, dict[str, float]] = {}
        self._labels: dict[str, list[float]] = {}  # label -> [samples, response tokens]

    def __getitem__(self, prompt_id: int) -> dict[str, float]:
        return self._entries[str(prompt_id)]

    def __len__(self) -> int:
        return len(self._entries)

    def update(self, results: Iterable[tuple[Prompt, Outcome]]) -> None:
        """Adds a step's groups."""
        for sums in self._labels.values():
            sums[:] = [LABEL_DECAY * x for x in sums]
        for prompt, outcome in results:
            entry = self._entries.setdefault(
                str(prompt.id),
                dict.fromkeys(("samples", "scored", "reward_sum", "tokens", "last_reward"), 0.0),
            )
            entry["samples"] += outcome.samples
            entry["scored"] += outcome.known
            entry["reward_sum"] += outcome.reward_sum
            entry["tokens"] += outcome.response_tokens
            entry["last_length"] = outcome.response_tokens / outcome.samples
            if outcome.known:
                entry["last_reward"] = outcome.reward_sum / outcome.known
            label = self._labels.setdefault(prompt.label, [0.0, 0.0])
            label[:] = [label[0] + outcome.samples, label[1] + outcome.response_tokens]

    def expected_length(self, prompt: Prompt) -> float:
        """Returns the expected response tokens of a sample: the mean of the prompt's last group, of
        its label for a new prompt, NaN for a new label.
        """
        if str(prompt.id) in self._entries:
            return self._entries[str(prompt.id)]["last_length"]
        samples, tokens = self._labels.get(prompt.label, (0.0, 0.0))
        return tokens / samples if samples else math.nan

    def state(self) -> JsonObject:
        """Returns all entries as JSON."""
        return {
            "prompts": {k: dict(v) for k, v in self._entries.items()},
            "labels": {k: list(v) for k, v in self._labels.items()},
        }

    def restore(self, state: JsonObject) -> None:
        """Restores what `state` returned."""
        self._entries = {name: dict(entry) for name, entry in state["prompts"].items()}
        self._labels = {name: list(sums) for name, sums in state["labels"].items()}
