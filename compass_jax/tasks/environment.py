"""A task whose answers are conversations: an environment replies to the model's turns, by what its
tools did.

    def start(row):                     the state of a new conversation: anything, changed by step
        return {"wanted": row["wanted"], "tries": 0}

    def step(state, text):              one turn of the model
        state["tries"] += 1
        if text.strip() == state["wanted"]:
            return Turn(reward=1.0)     it is over
        return Turn([{"role": "tool", "content": "another one"}])

    task = Task(prompts, Environment(start, step, turns=4))

A row's "prompt" and "tools" open the conversation. No state is kept between turns: where a
conversation goes on, in whatever process, it is played again from its start, so `start` and `step`
must do the same for the same row and texts. They run where verifiers do: in a sandbox, and within
`rewards.timeout_s` each time; all times of a conversation that goes on have
`rewards.conversation_s` together.

Imported by reward workers: nothing here may import jax.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from compass_jax.errors import CompassError

DECIMALS = 9  # of a sum of rewards: 0.7 + 0.2 + 0.1 counts as right
MOST_CHARS = 16_384  # of what an environment says at once
ROLES = ("tool", "user", "system")

Message = Mapping[str, Any]


class Turn(NamedTuple):
    """What comes of one turn of the model.

    messages: what the environment says to it, of the roles "tool", "user" or "system"; none: the
        conversation is over.
    reward: of the conversation as if it ended here, or, where rewards are discounted, of this turn
        alone.
    components: numbers with other names, whose means are logged; those of the last turn count.
    """

    messages: Sequence[Message] = ()
    reward: float = 0.0
    components: Mapping[str, float] = {}


class EnvironmentFault(CompassError, RuntimeError):
    """An environment broke its contract: the conversation is left out, and counted."""


@dataclass(frozen=True)
class Environment:
    """What answers the model, as the verifier of a Task.

    Args:
        start: a row -> the state of a new conversation.
        step: (state, the model's text) -> Turn; it may change the state.
        turns: most turns of the model. After the last one nothing more is asked of it, and the
            conversation is judged as it stands.
        discount: None: the reward of a conversation is that of its last turn. A number g in
            [0, 1]: it is sum_k g^k r_k over its turns k = 0, 1, ...
    """

    start: Callable[[Mapping[str, Any]], Any]
    step: Callable[[Any, str], Turn]
    turns: int = 8
    discount: float | None = None

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns = {self.turns}: must be at least 1")
        if self.discount is not None and not 0 <= self.discount <= 1:
            raise ValueError(f"discount = {self.discount}: must be in [0, 1]")

    def play(self, row: Mapping[str, Any], texts: Sequence[str]) -> list[Turn]:
        """What came of each of the model's turns. Raises EnvironmentFault where the conversation
        was over before the last of them: the environment did not do the same again.
        """
        state = self.start(row)
        found: list[Turn] = []
        for text in texts:
            if found and not found[-1].messages:
                raise EnvironmentFault(
                    f"the conversation is over after turn {len(found)} of {len(texts)}, and was not"
                    " before: make start and step depend on the row and the texts alone"
                )
            turn = self.step(state, text)
            if not isinstance(turn, Turn):
                raise EnvironmentFault(f"step gave a {type(turn).__name__}: make it a Turn")
            found.append(turn)
        return found

    def __call__(self, row: Mapping[str, Any], response: str) -> dict[str, Any]:
        """The verdict on a conversation, as verifiers give it. `response` is the JSON list of the
        model's turns; "says" is that of the messages with which it goes on, empty where it is over.
        """
        turns = self.play(row, json.loads(response))
        rewards = [float(turn.reward) for turn in turns]
        total = rewards[-1]
        if self.discount is not None:
            total = math.fsum(self.discount**k * reward for k, reward in enumerate(rewards))
        messages = [checked(message) for message in turns[-1].messages]
        says = json.dumps(messages) if messages else ""
        if len(says) > MOST_CHARS:
            raise EnvironmentFault(
                f"the environment said {len(says):,} characters at once, more than {MOST_CHARS:,}:"
                " shorten what its tools return"
            )
        return {
            **turns[-1].components,
            "reward": round(total, DECIMALS),
            "turns": float(len(turns)),
            "says": says,
        }


def checked(message: Any) -> dict[str, str]:
    """A message of an environment: a role out of ROLES, a text as its content, and no more than a
    name beside them. Raises EnvironmentFault for anything else.
    """
    known = isinstance(message, Mapping) and set(message) <= {"role", "content", "name"}
    if not (known and all(isinstance(value, str) for value in message.values())):
        raise EnvironmentFault(f"{message!r:.100} is no message: write its role and content")
    if message.get("role") not in ROLES or "content" not in message:
        raise EnvironmentFault(
            f"{message!r:.100}: an environment's message has a content, and a role of"
            f" {', '.join(ROLES)}"
        )
    return dict(message)
