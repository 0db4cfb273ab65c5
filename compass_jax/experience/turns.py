"""Conversations with an environment (rewards/tasks/environment.py): a sample whose turn is over
gets the environment's answer and is queued again.

A conversation is one sequence and one sample. The environment's tokens are not the policy's: they
have version GIVEN and no log-prob, and are not trained on. The prefill with which the sample
continues, in any slot, replays the routes of its earlier tokens and records those of the new ones.
A round ends when the last sample's turn does, so that nothing depends on a clock but the time
limit: an environment has `rewards.conversation_s` for all its answers in a conversation, without
the time of the model and of waiting. A conversation over the limit is left out as a timeout.

The time spent is in no checkpoint: after a kill, a running conversation has its full time again.
Resume is exact for conversations that need less than the limit; one near it may end either way, as
may a check near `rewards.timeout_s`. A verdict in the checkpoint is final.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from compass_jax.base.aliases import Tree
from compass_jax.base.errors import CompassError
from compass_jax.base.records import GIVEN, Rollout, SampleKey, Score

logger = logging.getLogger(__name__)

SLOW = "the environment took longer for its {} answers than rewards.conversation_s allows"


@dataclass(frozen=True)
class Turns:
    """Conversion of conversations between tokens and texts.

    Args:
        decode: returns the text of a response's, or a turn's, tokens.
        encode: returns the tokens between the end token of a turn and the next turn, from an
            environment's answer (`Score.says`) and the turn's tokens.
        most_tokens: largest number of tokens after the prompt.
        opened: returns the text with which the tokens before a turn open a thought; empty without
            one.
    """

    decode: Callable[[Tree], str]
    encode: Callable[[str, Sequence[int]], Sequence[int]]
    most_tokens: int
    opened: Callable[[Tree], str] = lambda tokens: ""
    # share of their time that running conversations have used
    _spent: dict[SampleKey, float] = field(default_factory=dict, init=False, compare=False)
    _warned: set[str] = field(default_factory=set, init=False, compare=False)

    def text(self, rollout: Rollout) -> str:
        """Returns the text for a verifier: the response, or the JSON list of the model's turns
        where an environment answers them.
        """
        if rollout.prompt.turns < 1:
            return self.response(rollout)
        texts, start = [], len(rollout.prompt.tokens)
        for n, part in enumerate(rollout.stretches):
            if n % 2 == 0:  # a turn of the model; the environment's are between them
                texts.append(self.opened(rollout.tokens[:start]) + self.decode(part))
            start += len(part)
        return json.dumps(texts)

    def response(self, rollout: Rollout) -> str:
        """Returns the response's text. Where the chat template opens a thought in the prompt, the
        text begins with its mark, so that a verifier sees a complete thought.
        """
        return self.opened(rollout.prompt.tokens) + self.decode(rollout.response)

    def settled(self, rollout: Rollout, score: Score) -> tuple[Rollout, Score | None]:
        """Returns the sample with the environment's answer appended and no verdict; or, where the
        conversation is over, the unchanged sample and the verdict.

        It is over when the environment answers nothing, after the last allowed turn, and where a
        turn was cut or no token remains for the next one. A sample without a reward results where
        the environment used all its time, or where the chat template cannot render its answer.
        """
        verdict = replace(score, says="", spent=0.0)
        spent = self._spent.pop(rollout.key, 0.0) + score.spent
        over = not score.says or len(rollout.turns) >= rollout.prompt.turns
        if over or rollout.truncated:
            return rollout, verdict
        if spent > 1:
            slow = SLOW.format(len(rollout.turns))
            return rollout, Score(0.0, False, "timeout", slow, extracted=False)
        try:
            new = np.asarray(self.encode(score.says, rollout.turns[-1].tolist()), np.int32)
        except CompassError as error:
            if "template" not in self._warned:
                self._warned.add("template")
                logger.warning(
                    "an environment's answer could not be written: %s. The sample is left out;"
                    " later ones are counted in reward/unknown_frac",
                    error,
                )
            return rollout, Score(0.0, False, "error", str(error), extracted=False)
        if rollout.response_length + len(new) >= self.most_tokens:
            return rollout, verdict
        self._spent[rollout.key] = spent
        return _answered(rollout, new), None


def _answered(rollout: Rollout, new: np.ndarray) -> Rollout:
    def after(values: np.ndarray, value: float) -> np.ndarray:
        return np.concatenate([values, np.full(len(new), value, values.dtype)])

    return replace(
        rollout,
        tokens=np.concatenate([rollout.tokens, new]),
        logp=after(rollout.logp, 0),
        entropy=after(rollout.entropy, 0),
        versions=after(rollout.versions, GIVEN),
        truncated=True,  # until its next turn ends
    )
