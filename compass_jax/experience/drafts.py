"""The last answers to each prompt, which are drafts at its next visit (rollout/drafts.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from compass_jax.base.aliases import JsonMapping, JsonObject
from compass_jax.base.records import Draft, Group, Prompt, SampleKey
from compass_jax.config import ConfigError, Drafts

ARRAYS = {"tokens": np.int32, "logp": np.float32}


class DraftStore:
    """The answers of each prompt's last visit, by prompt and sample index, on the host.

    It holds at most `drafts.kept_tokens` tokens: the prompts that were visited longest ago are
    forgotten first.
    """

    def __init__(self, drafts: Drafts):
        self.drafts = drafts
        self.tokens = 0  # number of tokens of all drafts
        # prompt id -> (visit, sample index -> draft), the prompt visited last at the end
        self._answers: dict[int, tuple[int, dict[int, Draft]]] = {}

    def add(self, groups: Iterable[Group]) -> None:
        """Replaces the drafts of the groups' prompts by the groups' answers."""
        for group in groups:
            answers = {}
            for x in group.rollouts:
                start = len(x.prompt.tokens)
                answers[x.sample] = Draft(x.tokens[start:], x.logp[start:].astype(np.float32))
            self._put(group.prompt.id, group.prompt.visit, answers)

    def decided(self, groups: Sequence[Group]) -> dict[str, float]:
        """Takes the answers of groups that a step keeps or drops; returns `draft_counts`."""
        self.add(groups)
        return draft_counts(groups)

    def find(self, key: SampleKey) -> Draft | None:
        """Returns the draft of a sample, None where there is none."""
        visit, answers = self._answers.get(key.prompt, (key.visit, {}))
        noise_visit = self.drafts.noise_visit
        return answers.get(key.index) if noise_visit(visit) == noise_visit(key.visit) else None

    def state(self) -> JsonObject:
        """Returns the prompts with their visits and the lengths of their drafts, and the drafts'
        tokens and log-probs `[tokens]`, one after the other.
        """
        prompts = [
            [prompt, visit, [[index, len(draft.tokens)] for index, draft in answers.items()]]
            for prompt, (visit, answers) in self._answers.items()
        ]
        drafts = [x for _, answers in self._answers.values() for x in answers.values()]
        arrays = {
            name: np.concatenate([np.zeros(0, dtype), *(getattr(x, name) for x in drafts)])
            for name, dtype in ARRAYS.items()
        }
        return {"prompts": prompts, **arrays}

    def restore(self, state: JsonMapping | None) -> None:
        """Restores a state, up to `drafts.kept_tokens`."""
        if not state:
            return
        columns, start = [np.asarray(state[name]) for name in ARRAYS], 0
        for prompt, visit, lengths in state["prompts"]:
            answers = {}
            for index, length in lengths:
                part = slice(start, start + length)
                answers[index] = Draft(*(column[part] for column in columns))
                start += length
            self._put(prompt, visit, answers)

    def _put(self, prompt: int, visit: int, answers: dict[int, Draft]) -> None:
        # Removed first, since a key that is replaced keeps its place in a dict: the order must be
        # that of the last visits.
        self._forget(prompt)
        self._answers[prompt] = visit, answers
        self.tokens += sum(len(x.tokens) for x in answers.values())
        while self.tokens > self.drafts.kept_tokens:
            self._forget(next(iter(self._answers)))

    def _forget(self, prompt: int) -> None:
        _, answers = self._answers.pop(prompt, (0, {}))
        self.tokens -= sum(len(x.tokens) for x in answers.values())


def check_turns(drafts: Drafts, prompts: Iterable[Prompt]) -> None:
    """Raises ConfigError for drafts with prompts whose answers are conversations."""
    label = next((x.label for x in prompts if x.turns), None)
    if label is not None:
        raise ConfigError(
            f"{drafts.key}.name = {drafts.name!r}: the prompts of {label!r} have an environment,"
            " whose answers to other turns than the draft's would differ; leave out one of the two"
        )


def draft_counts(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the number of answers that began with a draft, the tokens of these drafts, and the
    accepted ones.
    """
    rollouts = [x for group in groups for x in group.rollouts]
    return {
        "drafts/used": float(sum(x.draft_tokens > 0 for x in rollouts)),
        "drafts/scored_tokens": float(sum(x.draft_tokens for x in rollouts)),
        "waste/tokens_drafted": float(sum(x.drafted for x in rollouts)),
    }
