"""The tokens of an environment's messages, as a chat template writes them after a model's turn.

The model's turn keeps its sampled tokens, whatever the template does to earlier turns. The tokens
after it come from a probe: a short conversation whose assistant message holds a mark. The
template's text after the mark is the end of the turn, followed by the environment's messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.data.templates import call_id
from compass_jax.data.tokenizer import MARK, Tokenizer
from compass_jax.data.vocabulary import TokenizerError

Messages = list[JsonObject]


class _Probe(NamedTuple):
    """A conversation that ends with the marked assistant message, and the reply to it."""

    before: Messages
    reply: Messages
    has_tools: bool = False  # the environment answers with tools


def turn_encoder(tokenizer: Tokenizer) -> Callable[[str, Sequence[int]], list[int]]:
    """Returns a function from an environment's messages (as JSON) and the tokens of the model's
    last turn to the tokens from the end of this turn to the start of the next.

    The function raises TokenizerError if the chat template refuses a message or leaves it out.
    """

    def encode(says: str, turn: Sequence[int]) -> list[int]:
        reply: Messages = json.loads(says)
        failure: TokenizerError | None = None
        for probe in _probes(reply, _called_names(tokenizer, turn)):
            try:
                tail = _tail(tokenizer, probe)
                _check_shown(tokenizer, probe, tail)
                return _following(tokenizer, probe, tail, turn)
            except TokenizerError as error:
                failure = failure or error
        assert failure is not None
        raise failure

    return encode


def _probes(reply: Messages, names: Sequence[str]) -> list[_Probe]:
    """Returns the probes for a reply: after tool calls, if the reply begins with tools' answers,
    then after text.

    Some templates refuse a tool's answer without a preceding call; others show no calls, or refuse
    several calls in one message.
    """
    question = {"role": "user", "content": "?"}
    plain = _Probe([question, {"role": "assistant", "content": MARK}], reply)
    answers = next((i for i, m in enumerate(reply) if m.get("role") != "tool"), len(reply))
    if not answers:
        return [plain]
    calls, replies = [], []
    for n, message in enumerate(reply[:answers]):
        default = names[n] if n < len(names) else "tool"
        name, identity = message.get("name", default), message.get("tool_call_id", call_id(f"{n}"))
        function = {"name": name, "arguments": {"x": MARK}}
        calls.append({"type": "function", "id": identity, "function": function})
        replies.append({**message, "tool_call_id": identity})
    replies += reply[answers:]
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    return [
        _Probe([question, called], replies, True),
        plain._replace(reply=replies, has_tools=True),
    ]


def _called_names(tokenizer: Tokenizer, turn: Sequence[int]) -> list[str]:
    """Returns the names of the tools that a turn calls; gpt-oss's template repeats them."""
    message = tokenizer.chat_format.read(tokenizer.decode_response(turn))
    return [call.name for call in message.calls]


def _tail(tokenizer: Tokenizer, probe: _Probe) -> str:
    """Returns the template's text after the last mark, with the generation prompt."""
    messages = [*probe.before, *probe.reply]
    text = tokenizer.rendered(messages, bool(probe.reply), has_tools=probe.has_tools)
    at = text.rfind(MARK)
    if at < 0:
        raise TokenizerError(
            "the chat template does not show the assistant's turn that an environment answers"
        )
    return text[at + len(MARK) :]


def _check_shown(tokenizer: Tokenizer, probe: _Probe, tail: str) -> None:
    """Raises TokenizerError if the tail does not depend on the content of a message."""
    for n, message in enumerate(probe.reply):
        if not message.get("content", "").strip():
            continue
        changed = [*probe.reply]
        changed[n] = {**message, "content": "another text"}
        if message["content"] != "another text" and tail == _tail(
            tokenizer, probe._replace(reply=changed)
        ):
            raise TokenizerError(
                f"the chat template does not show the {message['role']} message"
                f" {message['content'][:80]!r} after the model's turn: let the environment answer"
                " in another role"
            )


def _following(tokenizer: Tokenizer, probe: _Probe, tail: str, turn: Sequence[int]) -> list[int]:
    """Returns the ids of the tail after the end of the model's turn."""
    turn_end = _tail(tokenizer, probe._replace(reply=[]))
    ends = tokenizer.control_spans(turn_end)
    if tokenizer.closes_turns and ends:
        # The n-th control token ends the turn. It may be another token when messages follow
        # (gpt-oss: <|end|> instead of <|return|>).
        spans = tokenizer.control_spans(tail)
        if len(spans) >= len(ends):
            return tokenizer.ids(tail[spans[len(ends) - 1][0] :])[1:]
    elif tail.startswith(turn_end):
        ids = tokenizer.ids_after(MARK + turn_end, tail[len(turn_end) :])
        # GLM: the sampled end token may be the one that opens the next message.
        return ids[1:] if ids[:1] == list(turn[-1:]) else ids
    raise TokenizerError(
        "the chat template writes the end of the model's turn differently once an environment has"
        f" answered it: {turn_end[-40:]!r} became {tail[:40]!r}"
    )
