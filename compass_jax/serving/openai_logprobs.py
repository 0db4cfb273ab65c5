"""Log-probs as OpenAI's two APIs write them: tokens as texts and bytes, the likeliest beside each.

They are of the model's distribution at temperature 1, whatever the request's temperature is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from compass_jax.data.tokenizer import Tokenizer
from compass_jax.rollout.logprobs import TopLogprobs


class Spelling(NamedTuple):
    """How a token is written. A token that is part of a character is "bytes:" and its bytes, as
    OpenAI writes it. A `control` token is in no answer's text.
    """

    text: str
    bytes: list[int]
    control: bool


class Row(NamedTuple):
    """One token of a choice: its log-prob in nats (None: nothing precedes it), and (spelling,
    log-prob) of the likeliest in its place. `width`: characters of the text that begin with it;
    `inside`: whether it begins inside a character.
    """

    token: Spelling
    logprob: float | None
    top: list[tuple[Spelling, float]]
    width: int
    inside: bool


class Logprobs:
    """Rows of tokens, with the `most` likeliest in each place."""

    def __init__(self, tokenizer: Tokenizer, most: int):
        self._most = most
        self._known = tokenizer.vocab_size
        self._spelt = spellings(tokenizer)

    def rows(self, found: TopLogprobs, prompt: bool = False) -> list[Row]:
        """A row of each token. Of a `prompt`, control tokens are in its text, too, and the first
        token has no log-prob.
        """
        rows = [self._row(*row, prompt) for row in zip(found.ids.tolist(), found.logp.tolist())]
        if prompt:
            rows[0] = rows[0]._replace(logprob=None, top=[])
        return rows

    def _row(self, ids: list[int], logp: list[float], prompt: bool) -> Row:
        # ids beyond the tokenizer's pad the LM head
        best = [(i, p) for i, p in zip(ids[1:], logp[1:]) if i < self._known][: self._most]
        token = self._spelt(ids[0])
        top = [(self._spelt(i), p) for i, p in best]
        starts = [byte & 0xC0 != 0x80 for byte in token.bytes]
        shown = prompt or not token.control
        return Row(token, logp[0], top, sum(starts) * shown, shown and not all(starts[:1]))


@cache
def spellings(tokenizer: Tokenizer):
    """The spelling of each token, found once."""

    @cache
    def spelling(token: int) -> Spelling:
        data = tokenizer.bytes_of(token)
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
        control = bool(data) and not tokenizer.decode_response([token])
        return Spelling(text, list(data), control)

    return spelling


def width(rows: Sequence[Row]) -> int:
    """Characters of the text that begin with these tokens."""
    return sum(row.width for row in rows)


def chat_logprobs(rows: Sequence[Row]) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/chat/completions."""

    def entry(token: Spelling, logprob: float | None) -> dict[str, Any]:
        return {"token": token.text, "logprob": logprob, "bytes": token.bytes}

    content = [
        {**entry(row.token, row.logprob), "top_logprobs": [entry(*other) for other in row.top]}
        for row in rows
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(rows: Sequence[Row], offset: int, most: int) -> dict[str, Any]:
    """`logprobs` of a choice of /v1/completions; offset: characters of the text before `rows`.

    The likeliest are keyed by text: of tokens that are written alike the likelier stays. The token
    itself is always among them.
    """
    starts = []
    for row in rows:
        starts.append(offset - row.inside)
        offset += row.width
    return {
        "tokens": [row.token.text for row in rows],
        "token_logprobs": [row.logprob for row in rows],
        "top_logprobs": [_by_text(row) for row in rows] if most else None,
        "text_offset": starts,
    }


def _by_text(row: Row) -> dict[str, float] | None:
    if row.logprob is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in [*row.top, (row.token, row.logprob)]:
        found[token.text] = max(logprob, found.get(token.text, logprob))
    return found
