"""Conversations with an environment (tasks/environment.py): a sample whose turn is over gets what
the environment says, and is queued again.

A conversation is one sequence and one sample. What the environment says is no token of the
policy's: it has version GIVEN, no log-prob, and is not trained on. The prefill with which the
sample goes on, in whatever slot, replays the routes of the tokens that it has and records those of
the new ones. Rounds end when the last sample's turn does, so that nothing depends on a clock but
this: an environment has `rewards.conversation_s` for all its answers in a conversation, the seconds
of the model and of waiting left out, and one that takes longer is left out as a timeout.

The seconds are no number of a run, and no checkpoint has them: after a kill a conversation that was
under way has all its time again. A resume is exact for conversations that need less than the limit;
that of one near it may end either way, as that of a check near `rewards.timeout_s` may. A verdict
that is in the checkpoint stands.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compass_jax.errors import CompassError
from compass_jax.records import GIVEN, Rollout, SampleKey, Score

logger = logging.getLogger(__name__)

TextOf = Callable[[Rollout], str]
SLOW = "the environment took longer for its {} answers than rewards.conversation_s allows"


@dataclass(frozen=True)
class Turns:
    """How conversations cross between tokens and texts.

    Args:
        decode: the tokens of a response, or of a turn -> its text.
        encode: what an environment says (`Score.says`) and the tokens of the turn before it -> the
            tokens between the end token of this turn and the next turn.
        most_tokens: after the prompt.
        opened: the tokens before a turn -> the text with which they open a thought; empty: none.
    """

    decode: Callable[[Any], str]
    encode: Callable[[str, Sequence[int]], Sequence[int]]
    most_tokens: int
    opened: Callable[[Any], str] = lambda tokens: ""
    # what conversations that go on have had of their time
    _spent: dict[SampleKey, float] = field(default_factory=dict, init=False, compare=False)
    _warned: set[str] = field(default_factory=set, init=False, compare=False)

    def text(self, rollout: Rollout) -> str:
        """What a verifier reads: the response, or the JSON list of the model's turns where an
        environment answers them.
        """
        if not rollout.prompt.turns:
            return self.response(rollout)
        texts, start = [], len(rollout.prompt.tokens)
        for n, part in enumerate(rollout.stretches):
            if n % 2 == 0:
                texts.append(self.opened(rollout.tokens[:start]) + self.decode(part))
            start += len(part)
        return json.dumps(texts)

    def response(self, rollout: Rollout) -> str:
        """The response's text. Where the chat template opens a thought in the prompt, the text
        begins with this "<think>": a verifier reads what the model wrote as a thought.
        """
        return self.opened(rollout.prompt.tokens) + self.decode(rollout.response)

    def settled(self, rollout: Rollout, score: Score) -> tuple[Rollout, Score | None]:
        """The sample as it goes on with what the environment says, and no verdict; or, where the
        conversation is over, as it was and the verdict.

        It is over when the environment says nothing, after the last turn that is allowed, and where
        a turn was cut or no token is left for the next one. An environment that would go on and has
        had all its time leaves the sample out, and so does what the chat template cannot write.
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
    def after(held: np.ndarray, value: float) -> np.ndarray:
        return np.concatenate([held, np.full(len(new), value, held.dtype)])

    return replace(
        rollout,
        tokens=np.concatenate([rollout.tokens, new]),
        logp=after(rollout.logp, 0),
        entropy=after(rollout.entropy, 0),
        versions=after(rollout.versions, GIVEN),
        truncated=True,  # it goes on
    )
