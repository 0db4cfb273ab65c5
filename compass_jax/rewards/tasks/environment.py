"""Environments: a task whose answers are conversations. The environment replies to each turn of the
model with the results of its tools.

    def start(row):                     returns the state of a new conversation (any object)
        return {"wanted": row["wanted"], "tries": 0}

    def step(state, text):              handles one turn of the model; may change the state
        state["tries"] += 1
        if text.strip() == state["wanted"]:
            return Turn(reward=1.0)     ends the conversation
        return Turn([{"role": "tool", "content": "another one"}])

    task = Task(prompts, Environment(start, step, turns=4))

A step with a parameter `message` also gets the turn as a Message (compass_jax/base/chat/base.py):
its thought, its content and its tool calls, read in the model's own form.

    def step(state, text, message):
        replies = [run(call.name, call.arguments) for call in message.calls]

A row's "prompt" and "tools" open the conversation. No state is stored between turns: to continue a
conversation, a worker replays it from its start, possibly in another process. `start` and `step`
must therefore be deterministic functions of the row and the texts. They run in the sandbox of the
verifiers. Each call has a timeout of `rewards.timeout_s`, and all calls of a conversation together
have `rewards.conversation_s`.

Reward workers import this module, so it must not import jax.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from compass_jax.base.aliases import Json, JsonMapping, JsonObject
from compass_jax.base.chat.base import AUTO
from compass_jax.base.errors import CompassError
from compass_jax.config.chat import find_format
from compass_jax.config.verifiers import Spread, summed

DECIMALS = 9  # a sum of rewards is rounded, so that 0.7 + 0.2 + 0.1 equals 1
MOST_CHARS = 16_384  # maximum length of an environment's reply to one turn
MOST_MESSAGES = 128
ROLES = ("tool", "user", "system")

Message = JsonMapping


class Turn(NamedTuple):
    """The result of one turn of the model."""

    # the environment's reply, with the roles "tool", "user" or "system"; empty: the end
    messages: Sequence[Message] = ()
    # of the conversation if it ended here; with a discount, of this turn alone
    reward: float = 0.0
    components: Mapping[str, float] = {}  # numbers whose means are logged; the last turn's count


class EnvironmentFault(CompassError, RuntimeError):
    """An environment broke its contract. The conversation is excluded from training and counted."""


@dataclass(frozen=True)
class Environment:
    """An environment that replies to the model, used as the verifier of a Task.

    Args:
        start: maps a row to the state of a new conversation.
        step: maps (state, the model's text) to a Turn. It may change the state. A parameter
            `message` gets the Message that the text is.
        turns: maximum number of model turns. After the last one the conversation ends and is scored
            in its present state.
        discount: None: the reward of a conversation is that of its last turn. A number g in [0, 1]:
            it is sum_k g^k r_k over its turns k = 0, 1, ...
        turn_range: (lowest, highest) reward of a turn; None: (0, 1), or (0, `turn_gap`) if that is
            wider.
        turn_gap: smallest difference of two different rewards of a turn; None: 1, or the width of
            the range. Rewards are the lowest one plus whole multiples of the gap. With a discount,
            0 must be one of them, because a missing turn adds nothing.
    """

    start: Callable[[JsonMapping], Any]
    step: Callable[..., Turn]
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
        """Returns the range and gap of a turn's reward."""
        low, high = self.turn_range or (0.0, max(1.0, self.turn_gap or 0.0))
        return Spread(low, high, min(1.0, high - low) if self.turn_gap is None else self.turn_gap)

    @property
    def _spread(self) -> Spread:
        """Returns the range and gap of a conversation's reward."""
        if self.discount is None:
            return self._turn
        weights = (self.discount**k for k in range(self.turns))
        return summed([(self._turn, weight) for weight in weights if weight])

    @property
    def range(self) -> tuple[float, float] | None:
        """The (lowest, highest) reward of a conversation, or None if `turn_range` is None.

        A reward outside the range is an error, as for other verifiers.
        """
        return None if self.turn_range is None else self._spread[:2]

    @property
    def gap(self) -> float:
        """The smallest difference of two rewards of conversations."""
        return self._spread.gap

    @cached_property
    def _reads(self) -> bool:
        """Whether the step takes a Message."""
        return "message" in inspect.signature(self.step).parameters

    def play(self, row: JsonMapping, texts: Sequence[str], chat_format: str = AUTO) -> list[Turn]:
        """Replays a conversation and returns the result of each turn of the model.

        Raises EnvironmentFault if the conversation ends before the last turn, since the environment
        then behaved differently from the first time.
        """
        state = self.start(row)
        done: list[Turn] = []
        for text in texts:
            if done and not done[-1].messages:
                raise EnvironmentFault(
                    f"the conversation is over after turn {len(done)} of {len(texts)}, and was not"
                    " before: make start and step depend on the row and the texts alone"
                )
            options = {"message": find_format(chat_format).read(text)} if self._reads else {}
            turn = self.step(state, text, **options)
            if not isinstance(turn, Turn):
                raise EnvironmentFault(f"step gave a {type(turn).__name__}: make it a Turn")
            done.append(turn)
        return done

    def __call__(self, row: JsonMapping, response: str, chat_format: str = AUTO) -> JsonObject:
        """Returns the verdict on a conversation, whose turns have the form `chat_format`.

        `response` is the JSON list of the model's turns. The verdict's "says" is the JSON list of
        the environment's next messages; it is empty when the conversation is over.
        """
        turns = self.play(row, json.loads(response), chat_format)
        rewards = [float(turn.reward) for turn in turns]
        total = rewards[-1]
        if self.discount is not None:
            total = math.fsum(self.discount**k * reward for k, reward in enumerate(rewards))
        return {
            **turns[-1].components,
            "reward": round(total, DECIMALS),
            "turns": float(len(turns)),
            "says": _encode_messages(turns[-1].messages),
        }


def _encode_messages(replies: Sequence[Message]) -> str:
    """Returns messages as a JSON list. Too many messages, for example after a text that calls tools
    hundreds of times, give an empty text: the conversation is over. Raises EnvironmentFault for a
    single message that is too long.
    """
    messages = [checked(message) for message in replies]
    longest = max((len(json.dumps(message)) for message in messages), default=0)
    if longest > MOST_CHARS - len("[]"):
        raise EnvironmentFault(
            f"the environment said {longest:,} characters at once, more than {MOST_CHARS:,}:"
            " shorten what its tools return"
        )
    says = json.dumps(messages) if messages else ""
    return says if len(messages) <= MOST_MESSAGES and len(says) <= MOST_CHARS else ""


def checked(message: Json) -> dict[str, str]:
    """Returns a message of an environment as a dict: a role out of ROLES, a text as its content,
    and optionally a name and a tool_call_id. Raises EnvironmentFault for anything else.
    """
    required, optional = {"role", "content"}, {"name", "tool_call_id"}
    good = isinstance(message, Mapping) and required <= set(message) <= required | optional
    texts = good and all(isinstance(value, str) for value in message.values())
    if not (texts and message["role"] in ROLES):
        raise EnvironmentFault(
            f"{message!r:.100} is no message: write its content, and a role of {', '.join(ROLES)}"
        )
    return dict(message)
