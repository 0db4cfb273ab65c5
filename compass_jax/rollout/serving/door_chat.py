"""Turns of episodes by /v1/chat/completions, for harnesses that know only a client of OpenAI's.

A conversation keeps its messages and its tokens. A request continues it if its messages are those
of the conversation, the replies among them as they were sent, and then new ones. Its prompt is the
conversation's tokens, then the new messages as data/turns.py encodes them: no sampled text is
tokenised again. A client may leave out a reply's reasoning, a field that many clients do not know.

The chat template renders any other request: the first one, one whose client has rewritten the
history, and one after a reply that reached its limit, since that reply has no end token.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from anyio import CapacityLimiter, to_thread
from pydantic import ValidationError

from compass_jax.base.aliases import JsonObject
from compass_jax.data.templates import call_id
from compass_jax.data.turns import turn_encoder
from compass_jax.rollout.ask import Reply
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.online import Chunk
from compass_jax.rollout.serving.errors import ApiError, describe_value
from compass_jax.rollout.serving.openai_answers import Choice, answer_head, choice_body, usage_body
from compass_jax.rollout.serving.openai_bodies import ChatBody, Message
from compass_jax.rollout.serving.openai_requests import (
    Job,
    Messages,
    Served,
    chat_job,
    encode_messages,
    read_body,
)

# fields of `compass serve` that are accepted here only at their defaults
REFUSED = {
    "stream": "a turn is sent as a whole; leave it out",
    "stream_options": "a turn is sent as a whole; leave it out",
    "n": "a request samples one turn; send a request for each",
    "seed": "an episode's draws are its own; leave the seed out",
    "stop": "turns end at the end tokens of the run's tokenizer; leave it out",
    "top_logprobs": "only the sampled tokens have log-probs here; leave it out",
    "chat_template_kwargs": "the run renders with data.template_args; leave it out",
}
REASONING = "reasoning_content"


class Conversation(NamedTuple):
    """A conversation that ends with a reply. `tokens` are all of its tokens; those from `start` on
    are the reply's.
    """

    agent: str
    tools: Messages
    messages: Messages
    tokens: np.ndarray
    start: int


class ChatTurn(NamedTuple):
    """A request for a turn. `messages` are those of its conversation, with the earlier replies as
    they were sent.
    """

    session: str
    agent: str
    job: Job
    messages: Messages

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling parameters that the request names."""
        names = {"temperature", "top_p", "top_k"}
        return self.job.body.model_dump(include=names, exclude_unset=True)


class Conversations:
    """The conversations of the open sessions. One thread at a time reads and changes them."""

    def __init__(self, served: Served, is_open: Callable[[str], bool]):
        self._served, self._is_open = served, is_open
        self._encode = turn_encoder(served.tokenizer)
        self._sessions: dict[str, list[Conversation]] = {}
        self._limiter = CapacityLimiter(1)

    async def read(self, data: bytes, session: str, agent: str) -> ChatTurn:
        """Returns the request of a body. Raises ApiError for an invalid one."""
        return await to_thread.run_sync(self._read, data, session, agent, limiter=self._limiter)

    async def answer(self, turn: ChatTurn, reply: Reply) -> JsonObject:
        """Returns the body of the answer with a sampled reply, which later requests continue."""
        return await to_thread.run_sync(self._answer, turn, reply, limiter=self._limiter)

    def _read(self, data: bytes, session: str, agent: str) -> ChatTurn:
        for token in [x for x in self._sessions if not self._is_open(x)]:
            del self._sessions[token]
        body = read_body(data, ChatBody, self._served)
        check_fields(body)
        conversation: Messages = []

        def encode(messages: Messages, tools: Messages) -> list[int]:
            earlier = self._continued(session, agent, messages, tools)
            if earlier is None:
                conversation.extend(messages)
                return encode_messages(messages, tools, self._served)
            new = messages[len(earlier.messages) :]
            conversation.extend([*earlier.messages, *new])
            tokens = earlier.tokens.tolist()
            return [*tokens, *self._encode(json.dumps(new), tokens[earlier.start :])]

        job = chat_job(body, self._served, encode)
        return ChatTurn(session, agent, job, conversation)

    def _continued(
        self, session: str, agent: str, messages: Messages, tools: Messages
    ) -> Conversation | None:
        """Returns the agent's longest conversation that the messages continue, or None."""
        known = [
            x
            for x in self._sessions.get(session, ())
            if (x.agent, x.tools) == (agent, tools) and continues(messages, x.messages)
        ]
        return max(known, key=lambda x: len(x.tokens), default=None)

    def _answer(self, turn: ChatTurn, reply: Reply) -> JsonObject:
        job, tokens = turn.job, np.concatenate([turn.job.prompts[0], reply.tokens])
        top = None
        if job.logprobs is not None:
            columns = (x[:, None] for x in (reply.tokens, reply.logp))
            top = TopLogprobs(*columns)  # type: ignore[arg-type]  # arrays of NumPy
        finish = "stop" if reply.stopped else "length"
        piece = Choice(0, job, self._served).push(Chunk(reply.tokens.tolist(), finish, top))
        # ids of calls are a function of the tokens, so that a repeated episode has the same ones
        calls = [
            {**call, "id": f"call_{call_id(f'{n} {tokens.tolist()}')}"}
            for n, call in enumerate(piece.calls)
        ]
        choice = choice_body(piece._replace(calls=calls), chat=True)
        if reply.stopped and self._is_open(turn.session):
            self._keep(turn, choice["message"], tokens)
        head = answer_head(True, turn.session[:8], self._served.model)
        usage = usage_body(len(job.prompts[0]), len(reply.tokens))
        return {**head, "choices": [choice], "usage": usage}

    def _keep(self, turn: ChatTurn, message: JsonObject, tokens: np.ndarray) -> None:
        """Keeps a conversation with its reply, in the form that requests are read in."""
        try:
            answer = Message.model_validate(message).model_dump(exclude_defaults=True)
        except ValidationError:  # such as a call without a name: no request may have it
            return
        messages, start = [*turn.messages, answer], len(turn.job.prompts[0])
        conversation = Conversation(turn.agent, [*turn.job.tools], messages, tokens, start)
        self._sessions.setdefault(turn.session, []).append(conversation)


def check_fields(body: ChatBody) -> None:
    """Raises ApiError, which names the field, for a value that no turn of an episode can have."""
    for name, reason in REFUSED.items():
        if (value := getattr(body, name)) != ChatBody.model_fields[name].default:
            raise ApiError(f"{name} = {describe_value(value)}: {reason}", name)


def continues(messages: Messages, earlier: Messages) -> bool:
    """Returns whether messages are earlier ones and further ones, none of which is the model's."""
    new = messages[len(earlier) :]
    if not new or any(message["role"] == "assistant" for message in new):
        return False
    for message, sent in zip(messages, earlier, strict=False):
        without = {REASONING} - message.keys()  # a client may leave the reasoning out
        if message != {name: x for name, x in sent.items() if name not in without}:
            return False
    return True
