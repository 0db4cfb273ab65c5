"""Conversion of OpenAI requests into jobs for the batcher: bodies become token ids.

Cheap checks run before tokenisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
from pydantic import ValidationError

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.base.chat.base import UnknownMarks
from compass_jax.base.untrusted import parse_json
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.vocabulary import TokenizerError
from compass_jax.rollout.serving.errors import ApiError, describe_value
from compass_jax.rollout.serving.openai_bodies import (
    MOST_CHOICES,
    ChatBody,
    CompletionBody,
    GenerateBody,
    OfModel,
    refusal,
)

MOST_DIGITS = 4000  # maximum length of an integer in a body, checked before conversion
Messages = list[JsonObject]  # of a conversation, or the descriptions of its tools
Encode = Callable[[Messages, Messages], list[int]]  # from messages and tools to a prompt's ids


@dataclass(frozen=True)
class Served:
    """The served model and its limits. `limit` names the setting of `prompt_tokens`.

    With `trust_prompts`, special tokens spelled in a prompt of /v1/completions are control tokens.
    """

    model: str
    tokenizer: Tokenizer
    vocab_size: int
    prompt_tokens: int
    max_new_tokens: int
    trust_prompts: bool = False
    limit: str = "--prompt-tokens"

    @cached_property
    def unknown_marks(self) -> UnknownMarks:
        """The notice of marks that the tokenizer's chat format does not know."""
        return UnknownMarks(self.tokenizer.chat_format)

    @cached_property
    def most_characters(self) -> int:
        """The most characters of a text that can fit, by the length of the longest token."""
        return self.prompt_tokens * self.tokenizer.longest


class GenerateJob(NamedTuple):
    """A validated request of /inference/v1/generate: the prompt's ids, and the maximum number of
    tokens, limited to what fits.
    """

    body: GenerateBody
    prompt: np.ndarray
    max_tokens: int


@dataclass(frozen=True)
class Job:
    """A validated request. Each of `prompts`, token ids, gets `body.n` answers.

    max_tokens: maximum number of tokens of each answer, limited to what fits; the finish reason of
    an
        answer that reaches it is "length".
    logprobs: number of most likely tokens reported with each token; None: no log-probs.
    echo: texts of the prompts, which the answers repeat first.
    tools: tools that the model may call, in the format of chat templates.
    """

    body: CompletionBody | ChatBody
    prompts: tuple[np.ndarray, ...]
    max_tokens: int
    logprobs: int | None
    echo: tuple[str, ...] = ()
    tools: tuple[JsonObject, ...] = ()

    @property
    def chat(self) -> bool:
        """Whether the request is one of /v1/chat/completions."""
        return isinstance(self.body, ChatBody)


B = TypeVar("B", bound=OfModel)


def read_body(data: bytes, kind: type[B], served: Served) -> B:
    """Returns a request body of a kind, for the served model. Raises ApiError for another one."""
    value = parse_json(data, "the body", error=ApiError, most_digits=MOST_DIGITS)
    if not isinstance(value, dict):
        raise ApiError("the body must be a JSON object")
    try:
        body = kind.model_validate(value)
    except ValidationError as error:
        raise refusal(error) from error
    if body.model not in (None, served.model):
        text = f"the model {describe_value(body.model)} is not served here; {served.model!r} is"
        raise ApiError(text, "model", 404)
    return body


def read_generate(data: bytes, served: Served) -> GenerateJob:
    """Returns the job for a body of /inference/v1/generate. Raises ApiError for an invalid one."""
    body = read_body(data, GenerateBody, served)
    limit = body.sampling_params.max_tokens or served.max_new_tokens
    ids = checked_ids(body.token_ids, served, "token_ids")
    return GenerateJob(body, ids, min(limit, served.max_new_tokens))


def read_job(data: bytes, kind: type[CompletionBody | ChatBody], served: Served) -> Job:
    """Returns the job for a request body. Raises ApiError for an invalid request."""
    body = read_body(data, kind, served)
    if body.stream_options is not None and not body.stream:
        raise ApiError("stream_options needs stream = true", "stream_options")
    if isinstance(body, ChatBody):
        return chat_job(body, served)
    return completion_job(body, served)


def completion_job(body: CompletionBody, served: Served) -> Job:
    """Returns the job for a body of /v1/completions. With `echo`, `max_tokens` may be 0; the answer
    is then the prompt with its log-probs.
    """
    if body.n * len(body.prompt) > MOST_CHOICES:
        text = f"{len(body.prompt)} prompts with n = {body.n} are more than {MOST_CHOICES} answers"
        raise ApiError(text, "n")
    if body.max_tokens < 1 and not body.echo:
        raise ApiError("max_tokens = 0: must be at least 1 without echo", "max_tokens")
    prompts = tuple(_tokens(prompt, served) for prompt in body.prompt)
    decode = served.tokenizer.decode
    echo = [x if isinstance(x, str) else decode(x, True) for x in body.prompt if body.echo]
    most = min(body.max_tokens, served.max_new_tokens)
    return Job(body, prompts, most, body.logprobs, echo=tuple(echo))


def chat_job(body: ChatBody, served: Served, encode: Encode | None = None) -> Job:
    """Returns the job for a body of /v1/chat/completions, with the prompt of `encode` if it is
    given, else as the chat template renders it.
    """
    if body.top_logprobs and not body.logprobs:
        raise ApiError(f"top_logprobs = {body.top_logprobs} needs logprobs = true", "top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        text = "max_tokens and max_completion_tokens say the same: leave one out"
        raise ApiError(text, "max_tokens")
    if body.tool_choice == "auto" and not body.tools:
        raise ApiError("tool_choice = 'auto' needs tools", "tool_choice")
    offered = body.tools if body.tool_choice != "none" else []
    tools = [tool.model_dump(exclude_defaults=True) for tool in offered]
    messages = [m.model_dump(exclude_defaults=True) for m in body.messages]
    _check_sizes(messages, tools, served)
    _check_variables(body.chat_template_kwargs, served)
    try:
        if encode is None:
            ids = encode_messages(messages, tools, served, **body.chat_template_kwargs)
        else:
            ids = encode(messages, tools)
    except TokenizerError as error:
        raise ApiError(str(error), "messages") from error
    limit = body.max_tokens or body.max_completion_tokens or served.max_new_tokens
    most = min(limit, served.max_new_tokens)
    logprobs = body.top_logprobs if body.logprobs else None
    return Job(body, (checked_ids(ids, served),), most, logprobs, tools=tuple(tools))


def encode_messages(
    messages: Messages, tools: Messages, served: Served, **variables: Json
) -> list[int]:
    """Returns the ids of a conversation as the chat template renders it, with the generation
    prompt. Raises TokenizerError if the template refuses the messages.
    """
    messages = _shown_thoughts(messages, served)
    return served.tokenizer.encode_prompt(messages, tools, **variables)


def _shown_thoughts(messages: Messages, served: Served) -> Messages:
    """Returns the messages without the thoughts of earlier turns if the chat template shows none;
    clients send back the thoughts of this server's answers.
    """
    name = "reasoning_content"
    if not any(name in message for message in messages):
        return messages
    if any(map(served.tokenizer.template_names, (name, "thinking"))):
        return messages
    return [{key: x for key, x in message.items() if key != name} for message in messages]


def _check_sizes(messages: Messages, tools: Messages, served: Served) -> None:
    most = served.prompt_tokens
    if len(messages) > most:
        text = f"{len(messages)} messages cannot fit into the {most} tokens that this server takes"
        raise ApiError(f"{text} ({served.limit})", "messages")
    fields = ("content", "reasoning_content", "tool_calls")
    parts = [[m[name] for name in fields if name in m] for m in messages]
    size = sum(map(len, _texts([*parts, *tools], keys=False)))
    _check_size("the messages and tools have" if tools else "the messages have", size, served)


def _check_size(what: str, size: int, served: Served, param: str = "messages") -> None:
    if size > served.most_characters:
        most = f"{served.prompt_tokens} tokens that this server takes ({served.limit})"
        text = f"{what} {size} characters, and the {most} can hold {served.most_characters} at most"
        raise ApiError(text, param)


def _check_variables(variables: JsonObject, served: Served) -> None:
    """Raises ApiError for chat template variables that are too long or that contain control tokens.
    A client's text is never a control token, here as in messages.
    """
    name = "chat_template_kwargs"
    texts = list(_texts(variables))
    _check_size(f"{name} has", sum(map(len, texts)), served, name)
    for text in texts:
        if served.tokenizer.encode(text) != served.tokenizer.encode(text, trusted=False):
            raise ApiError(f"{name} has a control token in {describe_value(text)}", name)


def _texts(value: Json, keys: bool = True) -> Iterator[str]:
    """Yields the texts in a JSON value, with the names of its fields if `keys` is true."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        parts = list(value.values()) if isinstance(value, dict) else value
        for part in [*value, *parts] if keys and isinstance(value, dict) else parts:
            yield from _texts(part, keys)


def _tokens(prompt: str | list[int], served: Served) -> np.ndarray:
    if isinstance(prompt, str):
        _check_size("the prompt has", len(prompt), served, "prompt")
        try:
            prompt = served.tokenizer.encode(prompt, trusted=served.trust_prompts)
        except TokenizerError as error:
            raise ApiError(str(error), "prompt") from error
    return checked_ids(prompt, served)


def checked_ids(prompt: list[int], served: Served, param: str = "prompt") -> np.ndarray:
    """Returns the ids of a prompt. Raises ApiError, which names `param`, for a prompt that is empty
    or too long, and for ids that are no tokens.
    """
    if not prompt:
        raise ApiError("the prompt is empty", param)
    if len(prompt) > served.prompt_tokens:
        text = f"the prompt has {len(prompt)} tokens, this server takes {served.prompt_tokens}"
        raise ApiError(f"{text}: shorten it, or raise {served.limit}", param)
    if min(prompt) < 0 or max(prompt) >= served.vocab_size:
        raise ApiError(f"token ids must be from 0 to {served.vocab_size - 1}", param)
    return np.asarray(prompt, np.int32)
