"""What an OpenAI client may ask of `compass serve --openai`: bodies of requests, checked, and text cut into the pieces of an answer.

A field that would change the answer and is not supported is refused by name, never ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compass_jax.data.tokenizer import Tokenizer, TokenizerError

MOST_CHOICES, MOST_STOPS = 64, 4
_IGNORED = frozenset({"user", "metadata", "store", "service_tier", "stream_options"})
_COMMON = frozenset({"model", "max_tokens", "temperature", "n", "seed", "stop", "stream", "logprobs"}) | _IGNORED
# Accepted at the value that changes nothing.
_NEUTRAL = {"top_p": (1, None), "presence_penalty": (0, None), "frequency_penalty": (0, None), "logit_bias": ({}, None)}
_COMPLETION = {"echo": (False, None), "best_of": (1, None), "suffix": ("", None)}
_CHAT = {"top_logprobs": (0, None), "tools": ([], None), "tool_choice": ("none", None), "response_format": ({"type": "text"}, None)}


class BadRequest(ValueError):
    """A request that cannot be answered; the message goes to the client, with the HTTP `status`."""

    def __init__(self, message: str, param: str | None = None, status: int = 400):
        super().__init__(message)
        self.param, self.status = param, status


@dataclass(frozen=True)
class Served:
    """What the server offers."""

    model: str
    tokenizer: Tokenizer
    vocab_size: int
    prompt_tokens: int
    max_new_tokens: int


@dataclass(frozen=True)
class Asked:
    """One request. `prompts` are token ids; each gets `n` answers."""

    prompts: tuple[np.ndarray, ...]
    n: int
    max_tokens: int
    temperature: float
    seed: int | None
    stop: tuple[str, ...]
    stream: bool
    logprobs: bool
    usage: bool  # at the end of a stream


def completion(body: Any, served: Served) -> Asked:
    """A body of /v1/completions: `prompt` is a text, token ids, or several of either."""
    _check_fields(body, _COMMON | {"prompt"}, {**_NEUTRAL, **_COMPLETION}, served)
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = tuple(_tokens(p, served) for p in (prompt if several else [prompt]))
    logprobs = body.get("logprobs")
    if logprobs not in (None, 0, False):
        raise BadRequest(f"logprobs = {logprobs!r}: 0 gives the log-probs of the tokens that were drawn; those of others are not kept", "logprobs")
    return _asked(body, prompts, 16, "max_tokens", logprobs is not None and logprobs is not False, served)


def chat(body: Any, served: Served) -> Asked:
    """A body of /v1/chat/completions: `messages`, put through the tokenizer's chat template."""
    _check_fields(body, _COMMON | {"messages", "max_completion_tokens"}, {**_NEUTRAL, **_CHAT}, served)
    messages = body.get("messages")
    whole = isinstance(messages, list) and messages and all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
    if not whole or not all(isinstance(m.get("content"), str) for m in messages):
        raise BadRequest("messages must be a list, not empty, of {role, content}, both texts", "messages")
    try:
        ids = served.tokenizer.encode_chat(messages, add_generation_prompt=True)
    except TokenizerError as error:
        raise BadRequest(str(error), "messages") from error
    limit = "max_completion_tokens" if body.get("max_completion_tokens") is not None else "max_tokens"
    logprobs = body.get("logprobs")
    if logprobs not in (None, True, False):
        raise BadRequest(f"logprobs = {logprobs!r}: must be true or false", "logprobs")
    return _asked(body, (_tokens(ids, served),), served.max_new_tokens, limit, bool(logprobs), served)


def _check_fields(body: Any, known: frozenset[str], neutral: Mapping[str, tuple], served: Served) -> None:
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    if body.get("model") not in (None, served.model):
        raise BadRequest(f"the model {body['model']!r} is not served here; {served.model!r} is", "model", 404)
    for name, value in body.items():
        if name in neutral:
            if value not in neutral[name]:
                raise BadRequest(f"{name} = {value!r} is not supported; leave it out", name)
        elif name not in known:
            raise BadRequest(f"{name} is not a field that this server knows", name)


def _asked(body: Mapping[str, Any], prompts: tuple[np.ndarray, ...], default: int, limit: str, logprobs: bool, served: Served) -> Asked:
    most = _whole(body, limit, min(default, served.max_new_tokens), 1, served.max_new_tokens)
    n = _whole(body, "n", 1, 1, MOST_CHOICES)
    if n * len(prompts) > MOST_CHOICES:
        raise BadRequest(f"{len(prompts)} prompts with n = {n} are more than {MOST_CHOICES} answers", "n")
    temperature = 1.0 if body.get("temperature") is None else body["temperature"]
    number = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not number or not (math.isfinite(temperature) and 0 <= temperature <= 2):
        raise BadRequest(f"temperature = {temperature!r}: must be a number from 0 to 2", "temperature")
    stream, options = body.get("stream") or False, body.get("stream_options") or {}
    if not isinstance(stream, bool) or not isinstance(options, dict):
        raise BadRequest("stream must be true or false, stream_options an object", "stream")
    seed = None if body.get("seed") is None else _whole(body, "seed", 0, -(2**63), 2**63 - 1)
    return Asked(prompts, n, most, float(temperature), seed, _stops(body.get("stop")), stream, logprobs, bool(options.get("include_usage")))


def _whole(body: Mapping[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise BadRequest(f"{name} = {value!r}: must be a whole number from {low} to {high}", name)
    return value


def _stops(stop: Any) -> tuple[str, ...]:
    found = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(found, list) or len(found) > MOST_STOPS or not all(isinstance(s, str) and s for s in found):
        raise BadRequest(f"stop must be a text or up to {MOST_STOPS} of them, none empty", "stop")
    return tuple(found)


def _tokens(prompt: Any, served: Served) -> np.ndarray:
    if isinstance(prompt, str):
        prompt = served.tokenizer.encode(prompt)
    if not isinstance(prompt, list) or not all(isinstance(x, int) and not isinstance(x, bool) for x in prompt):
        raise BadRequest("prompt must be a text, a list of token ids, or a list of either", "prompt")
    if not prompt:
        raise BadRequest("the prompt is empty", "prompt")
    if len(prompt) > served.prompt_tokens:
        raise BadRequest(f"the prompt has {len(prompt)} tokens, this server takes {served.prompt_tokens} (--prompt-tokens)", "prompt")
    if min(prompt) < 0 or max(prompt) >= served.vocab_size:
        raise BadRequest(f"token ids must be from 0 to {served.vocab_size - 1}", "prompt")
    return np.asarray(prompt, np.int32)


class TextStream:
    """Tokens in, pieces of text out: bytes of an unfinished character and what may be the beginning of a stop text are held back."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._tokenizer, self._stop = tokenizer, stop
        self._ids: list[int] = []
        self._sent = 0  # characters
        self.stopped = False

    def push(self, ids: Sequence[int], last: bool) -> str:
        """The text that is new and certain; with `last`, all that is left. After a stop text, which is cut off, there is none."""
        if self.stopped:
            return ""
        self._ids += ids
        text = self._tokenizer.decode(self._ids)
        ends = [at for stop in self._stop if (at := text.find(stop, self._sent)) >= 0]
        if ends:
            self.stopped, until = True, min(ends)
        elif last:
            until = len(text)
        else:
            whole = text.rstrip("\ufffd")
            until = len(whole) - self._held(whole)
        piece, self._sent = text[self._sent : until], max(self._sent, until)
        return piece

    def _held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop text."""
        return max((n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)
