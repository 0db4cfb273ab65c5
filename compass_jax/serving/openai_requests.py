"""What an OpenAI client may ask of `compass serve --openai`: bodies of requests, checked.

A field that would change the answer and is not supported is refused by name, never ignored. Types
are strict: a bool is no number, and nothing that is empty or zero stands for false. What is cheap
to check is checked before anything is tokenised.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.data.tokenizer_folder import TokenizerError
from compass_jax.serving.errors import BadRequest, shown
from compass_jax.serving.openai_messages import characters, read_messages
from compass_jax.serving.openai_tools import read_tools
from compass_jax.untrusted import parse_json

MOST_CHOICES = 64
MOST_STOPS = 4
MOST_LOGPROBS = 5  # likeliest tokens of /v1/completions, as OpenAI has it
MOST_TOP_LOGPROBS = 20  # of /v1/chat/completions
MOST_STOP_CHARACTERS = 256
MOST_TOKENS = 2**31 - 1  # that may be asked for; the answer has what fits
MOST_DIGITS = 4000  # of an integer in a body; larger ones are refused before they are numbers
# Fields that change nothing here, and the types that they may have.
_IGNORED = {"user": str, "metadata": dict, "store": bool, "service_tier": str}
_COMMON = frozenset(
    {
        "model",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "n",
        "seed",
        "stop",
        "stream",
        "stream_options",
        "logprobs",
    }
)
# Accepted at the value that changes nothing, or null.
_NEUTRAL = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}, "min_p": 0}
_NEUTRAL |= {"repetition_penalty": 1}
_COMPLETION = {"best_of": 1, "suffix": ""}
_CHAT = frozenset({"messages", "max_completion_tokens", "top_logprobs", "response_format"})
_CHAT |= {"chat_template_kwargs"}
_TOOLS = frozenset({"tools", "tool_choice", "parallel_tool_calls"})
# what Tokenizer.encode_prompt gives the template itself
_OWN_VARIABLES = frozenset({"self", "messages", "tools", "add_generation_prompt"})


@dataclass(frozen=True)
class Served:
    """What the server offers."""

    model: str
    tokenizer: Tokenizer
    vocab_size: int
    prompt_tokens: int
    max_new_tokens: int
    trust_prompts: bool = (
        False  # special tokens that a prompt of /v1/completions spells are control tokens
    )

    @cached_property
    def most_characters(self) -> int:
        """Characters beyond which a text cannot fit, since no token stands for more than the
        longest one."""
        return self.prompt_tokens * self.tokenizer.longest


@dataclass(frozen=True)
class Asked:
    """One request. `prompts` are token ids; each gets `n` answers."""

    prompts: tuple[np.ndarray, ...]
    n: int
    max_tokens: int
    temperature: float
    top_k: int  # 0: all tokens
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    logprobs: int | None  # likeliest tokens that are told beside each token; None: no log-probs
    usage: bool  # at the end of a stream
    echo: tuple[str, ...] = ()  # the texts of the prompts, with which the answers begin
    tools: tuple[dict[str, Any], ...] = ()  # that the model may call


def read(body: bytes, chat: bool, served: Served) -> Asked:
    """The request that a body of /v1/chat/completions (`chat`) or /v1/completions holds. BadRequest
    for any other."""
    value = parse_json(body, "the body", error=BadRequest, most_digits=MOST_DIGITS)
    return chat_request(value, served) if chat else completion_request(value, served)


def completion_request(body: Any, served: Served) -> Asked:
    """A body of /v1/completions: `prompt` is a text, token ids, or several of either. With `echo`
    `max_tokens` may be 0: the prompt alone, and its log-probs.
    """
    _check_fields(body, _COMMON | {"prompt", "echo"}, {**_NEUTRAL, **_COMPLETION}, served)
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and bool(prompt) and not _is_whole(prompt[0])
    prompts = prompt if several else [prompt]
    if len(prompts) > MOST_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts are more than {MOST_CHOICES}", "prompt")
    logprobs = None
    if body.get("logprobs") is not None:
        logprobs = _whole(body, "logprobs", 0, 0, MOST_LOGPROBS)
    echo = _flag(body, "echo", "echo")
    asked = _settings(body, len(prompts), (16, int(not echo)), "max_tokens", logprobs, served)
    ids = tuple(_tokens(p, served) for p in prompts)
    if echo:
        texts = (p if isinstance(p, str) else served.tokenizer.decode(p, True) for p in prompts)
        asked["echo"] = tuple(texts)
    return Asked(ids, **asked)


def chat_request(body: Any, served: Served) -> Asked:
    """A body of /v1/chat/completions: `messages`, put through the tokenizer's chat template."""
    _check_fields(
        body,
        _COMMON | _CHAT | _TOOLS,
        _NEUTRAL,
        served,
    )
    _check_format(body.get("response_format"))
    tools = read_tools(body)
    messages = _messages(body.get("messages"), tools, served)
    variables = _variables(body.get("chat_template_kwargs"), served)
    told = _flag(body, "logprobs", "logprobs")
    top = _whole(body, "top_logprobs", 0, 0, MOST_TOP_LOGPROBS)
    if top and not told:
        raise BadRequest(f"top_logprobs = {top} needs logprobs = true", "top_logprobs")
    limits = [
        name for name in ("max_tokens", "max_completion_tokens") if body.get(name) is not None
    ]
    if len(limits) > 1:
        raise BadRequest(
            "max_tokens and max_completion_tokens say the same: leave one out", "max_tokens"
        )
    limit = limits[0] if limits else "max_tokens"
    default = served.max_new_tokens, 1
    asked = _settings(body, 1, default, limit, top if told else None, served)
    try:
        ids = served.tokenizer.encode_prompt(messages, tools, **variables)
    except TokenizerError as error:
        raise BadRequest(str(error), "messages") from error
    return Asked((_checked_ids(ids, served),), **asked, tools=tuple(tools))


def _check_format(given: Any) -> None:
    """Raises BadRequest for a response format other than text."""
    kind = given.get("type") if isinstance(given, dict) else given
    if given is None or given == {"type": "text"}:
        return
    text = "must be {type: text}"
    if kind in ("json_object", "json_schema"):
        text = "is not supported: this server does not constrain what the model writes; ask for"
        text += " JSON in a message, and check the answer"
    raise BadRequest(f"response_format = {shown(given)} {text}", "response_format")


def _variables(given: Any, served: Served) -> dict[str, Any]:
    """The variables that a request gives to the chat template. What a client writes is no control
    token, here as in messages.
    """
    name = "chat_template_kwargs"
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise BadRequest(f"{name} = {shown(given)}: must be an object", name)
    if own := sorted(_OWN_VARIABLES & given.keys()):
        raise BadRequest(f"{name}.{own[0]} is a field of the request, no variable", name)
    if characters(given) > served.most_characters:
        raise BadRequest(_too_long(f"{name} has", characters(given), served), name)
    for text in _texts(given):
        if served.tokenizer.encode(text) != served.tokenizer.encode(text, trusted=False):
            raise BadRequest(f"{name} has a control token in {shown(text)}", name)
    return given


def _texts(value: Any) -> Iterator[str]:
    """The texts in a value of JSON, and the names of its fields."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            yield from _texts(part)


def _messages(
    given: Any, tools: Sequence[Mapping[str, Any]], served: Served
) -> list[dict[str, Any]]:
    """The messages, as the chat template takes them. A template that does not speak of developers
    has them as the system: OpenAI's clients write the one role for the other.
    """
    messages = read_messages(given, served.prompt_tokens)
    parts = [[m["content"], m.get("tool_calls", [])] for m in messages]
    size = characters([*parts, *tools])
    if size > served.most_characters:
        what = "the messages and tools have" if tools else "the messages have"
        raise BadRequest(_too_long(what, size, served), "messages")
    if not served.tokenizer.template_names("developer"):
        for message in messages:
            message["role"] = message["role"].replace("developer", "system")
    return messages


def _check_fields(
    body: Any, known: frozenset[str], neutral: Mapping[str, Any], served: Served
) -> None:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if body.get("model") is not None and body["model"] != served.model:
        raise BadRequest(
            f"the model {shown(body['model'])} is not served here; {served.model!r} is",
            "model",
            404,
        )
    for name, value in body.items():
        if name in neutral:
            if value is not None and not _same(value, neutral[name]):
                raise BadRequest(f"{name} = {shown(value)} is not supported; leave it out", name)
        elif name in _IGNORED:
            if value is not None and not isinstance(value, _IGNORED[name]):
                raise BadRequest(
                    f"{name} = {shown(value)}: must be of type {_IGNORED[name].__name__}", name
                )
        elif name not in known:
            raise BadRequest(f"{name[:80]} is not a field that this server knows", name[:80])


def _same(value: Any, other: Any) -> bool:
    """Equality as JSON has it: 1 is 1.0, and neither is true."""
    number = isinstance(other, int) and not isinstance(other, bool)
    if number:
        return isinstance(value, int | float) and not isinstance(value, bool) and value == other
    return type(value) is type(other) and value == other


def _settings(
    body: Mapping[str, Any],
    prompts: int,
    tokens: tuple[int, int],
    limit: str,
    logprobs: int | None,
    served: Served,
) -> dict[str, Any]:
    """The fields of Asked, all but the prompts. tokens: the default of `limit`, and the least."""
    # more than fits is cut to what fits: the answer then ends with finish_reason "length"
    most = min(_whole(body, limit, *tokens, MOST_TOKENS), served.max_new_tokens)
    n = _whole(body, "n", 1, 1, MOST_CHOICES)
    if n * prompts > MOST_CHOICES:
        raise BadRequest(
            f"{prompts} prompts with n = {n} are more than {MOST_CHOICES} answers", "n"
        )
    temperature = 1 if body.get("temperature") is None else body["temperature"]
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not 0 <= temperature <= 2 or not math.isfinite(temperature):
        raise BadRequest(
            f"temperature = {shown(temperature)}: must be a number from 0 to 2", "temperature"
        )
    top_p = 1 if body.get("top_p") is None else body["top_p"]
    if isinstance(top_p, bool) or not isinstance(top_p, int | float) or not 0 <= top_p <= 1:
        raise BadRequest(f"top_p = {shown(top_p)}: must be a number from 0 to 1", "top_p")
    stream = _flag(body, "stream", "stream")
    options = body.get("stream_options")
    if options is not None and not (
        isinstance(options, dict) and set(options) <= {"include_usage"}
    ):
        text = (
            f"stream_options = {shown(options)}: must be an object with include_usage "
            f"or nothing in it"
        )
        raise BadRequest(text, "stream_options")
    if options is not None and not stream:
        raise BadRequest("stream_options needs stream = true", "stream_options")
    return {
        "n": n,
        "max_tokens": most,
        "temperature": float(temperature),
        # -1 is vLLM's word for all
        "top_k": min(max(_whole(body, "top_k", 0, -1, MOST_TOKENS), 0), served.vocab_size),
        "top_p": float(top_p),
        "seed": None if body.get("seed") is None else _whole(body, "seed", 0, -(2**63), 2**63 - 1),
        "stop": _stops(body.get("stop")),
        "stream": stream,
        "logprobs": logprobs,
        "usage": _flag(options or {}, "include_usage", "stream_options"),
    }


def _flag(found: Mapping[str, Any], name: str, param: str) -> bool:
    value = found.get(name)
    if value is not None and not isinstance(value, bool):
        raise BadRequest(f"{name} = {shown(value)}: must be true or false", param)
    return bool(value)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not _is_whole(value) or not low <= value <= high:
        raise BadRequest(
            f"{name} = {shown(value)}: must be a whole number from {low} to {high}", name
        )
    return value


def _stops(stop: Any) -> tuple[str, ...]:
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if (
        not isinstance(found, list)
        or len(found) > MOST_STOPS
        or not all(isinstance(s, str) and s for s in found)
    ):
        raise BadRequest(f"stop must be a text or up to {MOST_STOPS} of them, none empty", "stop")
    if (longest := max(map(len, found), default=0)) > MOST_STOP_CHARACTERS:
        text = f"a stop text may have {MOST_STOP_CHARACTERS} characters, this one has {longest}"
        raise BadRequest(text, "stop")
    return tuple(dict.fromkeys(found))


def _tokens(prompt: Any, served: Served) -> np.ndarray:
    if isinstance(prompt, str):
        if len(prompt) > served.most_characters:
            raise BadRequest(_too_long("the prompt has", len(prompt), served), "prompt")
        try:
            prompt = served.tokenizer.encode(prompt, trusted=served.trust_prompts)
        except TokenizerError as error:
            raise BadRequest(str(error), "prompt") from error
    if not isinstance(prompt, list) or not all(map(_is_whole, prompt)):
        raise BadRequest(
            "prompt must be a text, a list of token ids, or a list of either", "prompt"
        )
    return _checked_ids(prompt, served)


def _checked_ids(prompt: list[int], served: Served) -> np.ndarray:
    if not prompt:
        raise BadRequest("the prompt is empty", "prompt")
    if len(prompt) > served.prompt_tokens:
        text = (
            f"the prompt has {len(prompt)} tokens, this server takes "
            f"{served.prompt_tokens} (--prompt-tokens)"
        )
        raise BadRequest(text, "prompt")
    if min(prompt) < 0 or max(prompt) >= served.vocab_size:
        raise BadRequest(f"token ids must be from 0 to {served.vocab_size - 1}", "prompt")
    return np.asarray(prompt, np.int32)


def _too_long(what: str, size: int, served: Served) -> str:
    most = f"{served.prompt_tokens} tokens that this server takes (--prompt-tokens)"
    return f"{what} {size} characters, and the {most} can hold {served.most_characters} at most"
