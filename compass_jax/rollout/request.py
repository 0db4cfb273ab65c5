"""One sample that the batcher generates."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np

from compass_jax.base.records import Prompt, Rollout
from compass_jax.rollout.logprobs import TopLogprobs


class Columns(NamedTuple):
    """Tokens with their numbers."""

    tokens: np.ndarray  # int32 [t]
    logp: np.ndarray  # float32 [t]
    entropy: np.ndarray  # float32 [t]
    versions: np.ndarray  # int32 [t], policy versions

    @classmethod
    def of(cls, tokens: np.ndarray, logp: np.ndarray, entropy: np.ndarray, version: int) -> Columns:
        """Returns the columns of tokens of one policy version."""
        return cls(tokens, logp, entropy, np.full(len(tokens), version, np.int32))

    def rows(self) -> np.ndarray:
        """Returns the numbers of each token side by side, int32 [t n]: tokens, versions, and the
        bits of log-probs and entropies. A sample's tokens are then one slice of those of many.
        """
        rows = np.empty((len(self.tokens), 2 + 2 * self.logp.itemsize // 4), np.int32)
        rows[:, 0], rows[:, 1] = self.tokens, self.versions
        numbers = rows.view(self.logp.dtype)
        numbers[:, -2], numbers[:, -1] = self.logp, self.entropy
        return rows

    @classmethod
    def of_rows(cls, rows: np.ndarray) -> Columns:
        """Returns views of the columns of `rows`."""
        numbers = rows.view(np.float32 if rows.shape[1] == 4 else np.float64)
        return cls(rows[:, 0], numbers[:, -2], numbers[:, -1], rows[:, 1])


@dataclass(eq=False)
class Request:
    """A sample in a slot or in the queue. It holds its tokens, log-probs and entropies, so that a
    preempted or carried sample continues where it stopped. New ones are joined with those before
    when they are read: after every call it would take a time that grows with the square of their
    number.

    Its routes are in row `row` of the route buffer. A prefill over its tokens, which replays these
    routes (live ones without a buffer), restores the cache, and draws the next token with the key
    that the decoding step would have used.
    """

    prompt: Prompt
    column: int  # its index in the group
    row: int
    limit: int  # maximum tokens, prompt included
    joined: Columns  # prompt included, without `parts`
    length: int = 0  # number of tokens so far, including those in the slot
    slot: int = -1
    drafted: int = 0  # as in Rollout, like the next
    draft_tokens: int = 0
    temperature: float = 0.0  # for a `per_request` sampler, like the next two
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    logprobs: bool = False  # whether the log-probs of the likeliest tokens are collected
    top: TopLogprobs | None = None  # [n k], of the tokens after the prompt
    cancelled: bool = False
    is_finished: bool = False  # finished by an end token, by its limit, or cancelled
    parts: list[np.ndarray] = field(default_factory=list, init=False)  # the newest tokens, as rows
    count: int = field(init=False)  # number of tokens, those of `parts` included

    def __post_init__(self) -> None:
        self.count = len(self.joined.tokens)

    @classmethod
    def of(
        cls, prompt: Prompt, column: int, row: int, limit: int, version: int, **fields: Any
    ) -> Self:
        """Returns a new sample; `version` is that of the policy that draws its first token."""
        zeros = np.zeros(len(prompt.tokens), np.float32)
        columns = Columns.of(prompt.tokens, zeros, zeros, version)
        return cls(prompt, column, row, limit, columns, **fields)

    @classmethod
    def resumed(cls, was: Rollout, limit: int) -> Request:
        """Returns the request that continues a sample."""
        columns = Columns(was.tokens, was.logp, was.entropy, was.versions)
        request = cls(was.prompt, was.sample, was.row, limit, columns, length=len(was.tokens))
        request.drafted, request.draft_tokens = was.drafted, was.draft_tokens
        return request

    @property
    def columns(self) -> Columns:
        """The tokens so far with their numbers, prompt included, without those in the slot."""
        if self.parts:
            new = Columns.of_rows(np.concatenate(self.parts))
            joined = map(np.concatenate, zip(self.joined, new, strict=True))
            self.joined, self.parts = Columns(*joined), []
        return self.joined

    @property
    def tokens(self) -> np.ndarray:
        """The column of the tokens."""
        return self.columns.tokens

    @property
    def logp(self) -> np.ndarray:
        """The column of their log-probs."""
        return self.columns.logp

    @property
    def has_tokens(self) -> bool:
        """Whether it has tokens after the prompt."""
        return self.count > len(self.prompt.tokens)

    def put(self, columns: Columns) -> None:
        """Replaces the tokens."""
        self.joined, self.parts = columns, []
        self.count = self.length = len(columns.tokens)

    def take(self, rows: np.ndarray) -> None:
        """Appends new tokens, which are rows of `Columns`."""
        self.parts.append(rows)
        self.count += len(rows)
        self.length = self.count

    def drop_last_token(self) -> None:
        """Removes the newest token, so that a finished sample is unfinished."""
        self.put(Columns(*(x[:-1] for x in self.columns)))
        self.drafted = min(self.drafted, self.length - len(self.prompt.tokens))
        self.is_finished = False

    def take_top(self, top: TopLogprobs) -> None:
        """Appends the top log-probs `[n k]` of its newest tokens."""
        rows = top if self.top is None else map(np.concatenate, zip(self.top, top, strict=True))
        self.top = TopLogprobs(*rows)

    def rollout(self, end_ids: Container[int]) -> Rollout:
        """Returns the tokens so far as a Rollout; it is truncated unless the last token is one of
        `end_ids`.
        """
        tokens, logp, entropy, versions = self.columns
        truncated = int(tokens[-1]) not in end_ids
        arrays = (tokens, logp, entropy, truncated, versions)
        counts = (self.drafted, self.draft_tokens)
        return Rollout(self.prompt, self.column, *arrays, self.row, *counts)
