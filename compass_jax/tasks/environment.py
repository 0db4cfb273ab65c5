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

from compass_jax.config.verifiers import Spread, summed
from compass_jax.errors import CompassError

DECIMALS = 9  # of a sum of rewards: 0.7 + 0.2 + 0.1 counts as right
MOST_CHARS = 16_384  # of what an environment says at once
MOST_MESSAGES = 128
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
        turn_range: (lowest, highest) reward of a turn; None: (0, 1), or to `turn_gap`.
        turn_gap: two rewards of a turn that differ do so by at least this number; None: 1, or the
            width of the range. Rewards are the lowest one and whole steps of it above; 0 is one of
            them where rewards are discounted, since a turn that does not come adds nothing.
    """

    start: Callable[[Mapping[str, Any]], Any]
    step: Callable[[Any, str], Turn]
    turns: int = 8
    discount: float | None = None
    turn_range: tuple[float, float] | None = None
    turn_gap: float | None = None

    def __post_init__(self) -> None:
        if self.turns < 1:
            raise ValueError(f"turns = {self.turns}: must be at least 1")
        if self.discount is not None and not 0 <= self.discount <= 1:
            raise ValueError(f"discount = {self.discount}: must be in [0, 1]")
        low, high, gap = self._turn
        if not 0 < gap <= high - low < math.inf or (self.discount is not None and low * high > 0):
            raise ValueError(
                f"turn_range = {self.turn_range} and turn_gap = {self.turn_gap}: the range must be"
                " two numbers, the lower one first, and hold 0 where rewards are discounted; the"
                " gap a positive number that fits into it"
            )

    @property
    def _turn(self) -> Spread:
        """The rewards of a turn."""
        low, high = self.turn_range or (0.0, max(1.0, self.turn_gap or 0.0))
        return Spread(low, high, min(1.0, high - low) if self.turn_gap is None else self.turn_gap)

    @property
    def _spread(self) -> Spread:
        """The rewards of a conversation."""
        if self.discount is None:
            return self._turn
        weights = (self.discount**k for k in range(self.turns))
        return summed([(self._turn, weight) for weight in weights if weight])

    @property
    def range(self) -> tuple[float, float] | None:
        """(lowest, highest) reward of a conversation, as a verifier says it of an answer's: one
        outside is an error. None: nobody said it of a turn's.
        """
        return None if self.turn_range is None else self._spread[:2]

    @property
    def gap(self) -> float:
        """The smallest difference of two rewards of conversations that differ; discounted ones may
        be closer than those of turns are.
        """
        return self._spread.gap

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
        return {
            **turns[-1].components,
            "reward": round(total, DECIMALS),
            "turns": float(len(turns)),
            "says": _said(turns[-1].messages),
        }


def _said(given: Sequence[Message]) -> str:
    """Returns messages as JSON; nothing where there are too many, as after a text that calls tools
    hundreds of times: the conversation is over then, and judged as it stands.

    Raises EnvironmentFault for one message that is too long.
    """
    messages = [checked(message) for message in given]
    longest = max((len(json.dumps(message)) for message in messages), default=0)
    if longest > MOST_CHARS - len("[]"):
        raise EnvironmentFault(
            f"the environment said {longest:,} characters at once, more than {MOST_CHARS:,}:"
            " shorten what its tools return"
        )
    says = json.dumps(messages) if messages else ""
    return says if len(messages) <= MOST_MESSAGES and len(says) <= MOST_CHARS else ""


def checked(message: Any) -> dict[str, str]:
    """A message of an environment: a role out of ROLES, a text as its content, and no more than a
    name and a tool_call_id beside them. Raises EnvironmentFault for anything else.
    """
    known = isinstance(message, Mapping) and set(message) <= {
        "role",
        "content",
        "name",
        "tool_call_id",
    }
    if not (known and all(isinstance(value, str) for value in message.values())):
        raise EnvironmentFault(f"{message!r:.100} is no message: write its role and content")
    if message.get("role") not in ROLES or "content" not in message:
        raise EnvironmentFault(
            f"{message!r:.100}: an environment's message has a content, and a role of"
            f" {', '.join(ROLES)}"
        )
    return dict(message)
