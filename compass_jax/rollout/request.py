"""One sample that the batcher generates."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from compass_jax.base.records import Prompt, Rollout
from compass_jax.rollout.logprobs import TopLogprobs


@dataclass(eq=False)
class Request:
    """A sample in a slot or in the queue. It holds its tokens, log-probs and entropies, so that a
    preempted or carried sample continues where it stopped.

    Its routes are in row `row` of the route buffer. A prefill over its tokens, which replays these
    routes (live ones without a buffer), restores the cache, and draws the next token with the key
    that the decoding step would have used.
    """

    prompt: Prompt
    column: int  # its index in the group
    row: int
    limit: int  # maximum tokens, prompt included
    tokens: np.ndarray  # int32 [t], prompt included
    logp: np.ndarray  # float32 [t]
    entropy: np.ndarray  # float32 [t]
    versions: np.ndarray  # int32 [t]
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

    @classmethod
    def of(
        cls, prompt: Prompt, column: int, row: int, limit: int, version: int, **fields: Any
    ) -> Self:
        """Returns a new sample; `version` is that of the policy that draws its first token."""
        n = len(prompt.tokens)
        zeros, versions = np.zeros(n, np.float32), np.full(n, version, np.int32)
        arrays = (prompt.tokens, zeros, zeros, versions)
        return cls(prompt, column, row, limit, *arrays, **fields)

    @classmethod
    def resumed(cls, was: Rollout, limit: int) -> Request:
        """Returns the request that continues a sample."""
        arrays = (was.tokens, was.logp, was.entropy, was.versions)
        request = cls(was.prompt, was.sample, was.row, limit, *arrays, length=len(was.tokens))
        request.drafted, request.draft_tokens = was.drafted, was.draft_tokens
        return request

    @property
    def has_tokens(self) -> bool:
        """Whether it has tokens after the prompt."""
        return len(self.tokens) > len(self.prompt.tokens)

    def take(self, tokens: np.ndarray, logp: np.ndarray, entropy: np.ndarray, version: int) -> None:
        """Appends new tokens with their log-probs, entropies and policy version."""
        self.tokens = np.concatenate([self.tokens, tokens])
        self.logp = np.concatenate([self.logp, logp])
        self.entropy = np.concatenate([self.entropy, entropy])
        self.versions = np.concatenate([self.versions, np.full(len(tokens), version, np.int32)])
        self.length = len(self.tokens)

    def drop_last_token(self) -> None:
        """Removes the newest token, so that a finished sample is unfinished."""
        for name in ("tokens", "logp", "entropy", "versions"):
            setattr(self, name, getattr(self, name)[:-1])
        self.length = len(self.tokens)
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
        truncated = int(self.tokens[-1]) not in end_ids
        arrays = (self.tokens, self.logp, self.entropy, truncated, self.versions)
        counts = (self.drafted, self.draft_tokens)
        return Rollout(self.prompt, self.column, *arrays, self.row, *counts)
