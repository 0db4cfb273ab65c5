"""Log-probs in the formats of OpenAI's two APIs: tokens as texts and bytes, and the most likely
tokens of each position.

They are log-probs of the model's distribution at temperature 1, whatever the request's temperature.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from compass_jax.base.aliases import JsonObject
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.logprobs import TopLogprobs
from compass_jax.rollout.serving.text_position import TextPosition


class Spelling(NamedTuple):
    """A token as text. A token that is part of a character is spelled "bytes:" and its bytes, as in
    OpenAI's API. A `hidden` token does not occur in the text of answers; at the beginning of a text
    a token lacks its first `dropped` characters.
    """

    text: str
    bytes: list[int]
    hidden: bool
    dropped: int
    is_byte: bool  # a byte token of a vocabulary that is not byte-level


@cache
def spellings(tokenizer: Tokenizer):
    """Returns a cached function from a token to its spelling."""

    @cache
    def spelling(token: int) -> Spelling:
        data = tokenizer.bytes_of(token)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        dropped = len(tokenizer.text_of(token)) - len(tokenizer.decode([token], special=True))
        hidden, is_byte = token in tokenizer.hidden_ids, tokenizer.is_byte_token(token)
        return Spelling(text, list(data), hidden, dropped, is_byte)

    return spelling


class Logprobs:
    """The log-probs of one choice, with the `most` most likely tokens of each position, in the
    format of /v1/chat/completions (`chat`) or /v1/completions.
    """

    def __init__(self, tokenizer: Tokenizer, most: int, chat: bool):
        self._most, self._chat = most, chat
        self._known = tokenizer.vocab_size
        self._spelling = spellings(tokenizer)
        self._position = TextPosition()
        self._begins = True  # whether the next token begins a text: the prompt's or the answer's

    def push(self, tokens: TopLogprobs, prompt: bool = False) -> JsonObject:
        """Returns the log-probs of new tokens. The first token of a `prompt` has a null log-prob,
        and a prompt's text includes special tokens. The values are lists, so that parts can be
        concatenated.
        """
        entries: list[tuple[Spelling, float | None, list]] = []
        for ids, logp in zip(tokens.ids.tolist(), tokens.logp.tolist()):
            # ids beyond the tokenizer's are padding of the LM head
            likeliest = [(i, p) for i, p in zip(ids[1:], logp[1:]) if i < self._known]
            top = [(self._spelling(i), p) for i, p in likeliest[: self._most]]
            entries.append((self._spelling(ids[0]), logp[0], top))
        if prompt:
            entries[0] = (entries[0][0], None, [])
        if self._chat:
            content = [
                {**_entry(token, logprob), "top_logprobs": [_entry(*other) for other in top]}
                for token, logprob, top in entries
            ]
            return {"content": content, "refusal": None}
        return {
            "tokens": [token.text for token, _, _ in entries],
            "token_logprobs": [logprob for _, logprob, _ in entries],
            "top_logprobs": [_by_text(*entry) for entry in entries] if self._most else None,
            "text_offset": self._next_offsets([token for token, _, _ in entries], prompt),
        }

    def _next_offsets(self, tokens: list[Spelling], prompt: bool) -> list[int]:
        """Returns the offsets of the characters in which tokens begin; advances past them."""
        offsets = [self._next_offset(token, prompt) for token in tokens]
        if prompt:  # the answer is decoded apart from the prompt
            self._begins = True
            self._position.end()
        return offsets

    def _next_offset(self, token: Spelling, prompt: bool) -> int:
        if not token.bytes or (token.hidden and not prompt):
            return self._position.characters
        offset = self._position.push(bytes(token.bytes), token.is_byte)
        if self._begins:
            self._position.drop(token.dropped)
        self._begins = False
        return offset


def joined(parts: list[JsonObject]) -> JsonObject:
    """Returns the log-probs of a choice, concatenated from its parts."""
    return {
        name: None if value is None else [x for part in parts for x in part[name]]
        for name, value in parts[0].items()
    }


def _entry(token: Spelling, logprob: float | None) -> JsonObject:
    return {"token": token.text, "logprob": logprob, "bytes": token.bytes}


def _by_text(token: Spelling, logprob: float | None, top: list) -> dict[str, float] | None:
    """Returns the log-probs of the most likely tokens and of the token itself, by text. Of tokens
    with the same text, the most likely one is reported.
    """
    if logprob is None:
        return None
    by_text: dict[str, float] = {}
    for other, value in [*top, (token, logprob)]:
        by_text[other.text] = max(value, by_text.get(other.text, value))
    return by_text
