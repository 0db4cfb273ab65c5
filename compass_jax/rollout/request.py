"""One sample on its way through the batcher."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from compass_jax.records import Prompt, Rollout
from compass_jax.rollout.logprobs import TopLogprobs


@dataclass(eq=False)
class Request:
    """One sample on its way, in a slot or waiting for one. What it has so far is its own: a
    preempted or carried one goes on where it stopped.

    Its log-probs and entropies so far are on the host, its routes in row `row` of the route buffer;
    a prefill over its tokens, replaying these routes (live ones without a buffer), brings back the
    cache, and draws the next token with the key that the decoding step would have used.
    """

    prompt: Prompt
    column: int  # its index in the group
    row: int
    limit: int  # tokens, prompt included, at which it is cut
    tokens: np.ndarray  # int32 [t], prompt included
    logp: np.ndarray  # float32 [t]
    entropy: np.ndarray  # float32 [t]
    versions: np.ndarray  # int32 [t]
    length: int = 0  # tokens by now, those in the slot included
    slot: int = -1
    temperature: float = 0.0  # for a `per_request` sampler, like the next two
    top_k: int = 0  # 0: all tokens
    top_p: float = 1.0
    logprobs: bool = False  # whether somebody wants those of the likeliest tokens
    top: TopLogprobs | None = None  # [n k], of the tokens after the prompt
    cancelled: bool = False  # nobody wants it any more
    ended: bool = False  # by its end token, its limit, or because it was cancelled

    @classmethod
    def of(
        cls, prompt: Prompt, column: int, row: int, limit: int, version: int, **others: Any
    ) -> Self:
        """A sample that has not begun; `version` of the policy that begins it."""
        n = len(prompt.tokens)
        zeros, versions = np.zeros(n, np.float32), np.full(n, version, np.int32)
        held = (prompt.tokens, zeros, zeros, versions)
        return cls(prompt, column, row, limit, *held, **others)

    @classmethod
    def again(cls, was: Rollout, limit: int) -> Request:
        """A sample that was cut goes on."""
        held = (was.tokens, was.logp, was.entropy, was.versions)
        return cls(was.prompt, was.sample, was.row, limit, *held, length=len(was.tokens))

    @property
    def begun(self) -> bool:
        """Whether the host has tokens of it beside the prompt."""
        return len(self.tokens) > len(self.prompt.tokens)

    def take(self, tokens: np.ndarray, logp: np.ndarray, entropy: np.ndarray, version: int) -> int:
        """Appends what follows the tokens that it has, up to `length`; how many these are. `[n]`
        arrays, which may be longer.
        """
        n = self.length - len(self.tokens)
        self.tokens = np.concatenate([self.tokens, tokens[:n]])
        self.logp = np.concatenate([self.logp, logp[:n]])
        self.entropy = np.concatenate([self.entropy, entropy[:n]])
        self.versions = np.concatenate([self.versions, np.full(n, version, np.int32)])
        return n

    def take_top(self, top: TopLogprobs) -> None:
        """Appends those `[n k]` of its newest tokens."""
        held = top if self.top is None else map(np.concatenate, zip(self.top, top, strict=True))
        self.top = TopLogprobs(*held)

    def rollout(self, end_ids: Container[int]) -> Rollout:
        """Returns the tokens so far as a Rollout, truncated where none of `end_ids` is the last."""
        truncated = int(self.tokens[-1]) not in end_ids
        held = (self.tokens, self.logp, self.entropy, truncated, self.versions)
        return Rollout(self.prompt, self.column, *held, self.row)
