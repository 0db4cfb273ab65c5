"""What a run remembers of its prompts: pass rates, lengths, the last result. It is in the checkpoint; later steps may select by it."""

from __future__ import annotations

from collections.abc import Iterable

from compass_jax.config import RewardConfig
from compass_jax.records import Group, Outcome, Prompt
from compass_jax.train.gather import is_uniform, known_rewards


def outcome(group: Group, rewards: RewardConfig) -> Outcome:
    """The group's outcome, judged on its known rewards."""
    known = known_rewards(group.scores)
    kind = ""
    if is_uniform(group.scores):
        kind = "easy" if min(known) >= rewards.right_at else "hard" if max(known) <= rewards.wrong_at else ""
    return Outcome(len(known), float(sum(known)), sum(r.response_length for r in group.rollouts), kind)


class PromptHistory:
    """Prompt id -> [rollouts scored, sum of rewards, sum of response tokens, mean reward of its last group that had any verdict]."""

    def __init__(self) -> None:
        self._entries: dict[str, list[float]] = {}

    def __getitem__(self, prompt_id: int) -> list[float]:
        return self._entries[str(prompt_id)]

    def __len__(self) -> int:
        return len(self._entries)

    def update(self, results: Iterable[tuple[Prompt, Outcome]]) -> None:
        """Takes in a step's groups."""
        for prompt, found in results:
            entry = self._entries.setdefault(str(prompt.id), [0, 0.0, 0, 0.0])
            entry[0] += found.known
            entry[1] += found.reward_sum
            entry[2] += found.response_tokens
            entry[3] = found.reward_sum / found.known if found.known else entry[3]

    def state(self) -> dict[str, list[float]]:
        """All entries, as JSON."""
        return {name: list(entry) for name, entry in self._entries.items()}

    def restore(self, state: dict[str, list[float]]) -> None:
        """Continues from `state`."""
        self._entries = {name: list(entry) for name, entry in state.items()}
