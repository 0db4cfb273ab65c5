"""The tokens of an episode: its requests, each of which goes on with a branch or begins one.

A request whose tokens begin with all tokens of a branch continues it: the further tokens are given,
those of the reply sampled. Any other request begins a new branch: its harness wrote the history
anew. The branch with the most sampled tokens becomes the sample; the others are dropped tokens.

The first branch has the routes of its tokens in the sample's row, as every sample: a prefill
replays those of earlier turns. Another branch that is trained is routed live, as it has no row.
Branches of one sample draw other random numbers, since their columns differ; a repeated episode
with the same requests has the same draws.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from compass_jax.base.errors import CompassError
from compass_jax.base.records import GIVEN, Prompt, Rollout, SampleKey
from compass_jax.rollout.request import Request

MOST_BRANCHES = 32
BRANCH_COLUMNS = 2**16  # columns of a branch: the sample's plus a multiple of this number


class Refused(CompassError, ValueError):
    """A request that the episode's limits do not allow; the message is for its driver."""


class Timed(NamedTuple):
    """A reply: the branch's tokens at its end, the environment's seconds before its request, and
    the seconds until it came.
    """

    end: int
    environment_s: float
    model_s: float


@dataclass(eq=False)
class Branch:
    """A sequence of given and sampled tokens, which ends with a sampled one; empty before its first
    reply. `request` samples its next turn.
    """

    number: int
    agent: str
    prompt: Prompt  # the tokens of its first request
    tokens: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    logp: np.ndarray = field(default_factory=partial(np.zeros, 0, np.float32))
    entropy: np.ndarray = field(default_factory=partial(np.zeros, 0, np.float32))
    versions: np.ndarray = field(default_factory=partial(np.zeros, 0, np.int32))
    request: Request | None = None
    replies: list[Timed] = field(default_factory=list)

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return int((self.versions != GIVEN).sum())

    def goes_on_to(self, tokens: np.ndarray) -> bool:
        """Returns whether all its tokens begin `tokens`."""
        return bool(self.sampled) and np.array_equal(self.tokens, tokens[: len(self.tokens)])

    def rollout(self, tokens: np.ndarray, column: int, row: int) -> Rollout:
        """Returns the sample of all `tokens`, of which those after its own are given."""
        more = len(tokens) - len(self.tokens)
        logp, entropy = (np.pad(x, (0, more)) for x in (self.logp, self.entropy))
        versions = np.pad(self.versions, (0, more), constant_values=GIVEN)
        return Rollout(self.prompt, column, tokens, logp, entropy, True, versions, row)

    def take(self, request: Request, environment_s: float = 0.0, model_s: float = 0.0) -> None:
        """Takes the tokens of its request, which is done, with the seconds of its turn."""
        self.tokens, self.logp, self.entropy, versions = request.columns
        self.versions, self.request = versions.copy(), None
        self.versions[: len(self.prompt.tokens)] = GIVEN
        self.replies.append(Timed(len(self.tokens), environment_s, model_s))


@dataclass(eq=False)
class Session:
    """An episode.

    Args:
        task: the prompt that stands for it.
        row: the sample's row in the route buffer.
        outside: a row outside of the buffer.
        most_tokens: of its sequence; most_prompt: of the first request of a branch.
        most_turns: requests of a branch.
    """

    key: SampleKey
    task: Prompt
    row: int
    outside: int
    most_tokens: int
    most_prompt: int
    most_turns: int
    branches: list[Branch] = field(default_factory=list)
    turns: int = 0

    def ask(
        self, tokens: np.ndarray, limit: int, version: int, temperature: float, agent: str = ""
    ) -> Request:
        """Returns the request that samples up to `limit` tokens after `tokens`, in a branch of
        `agent`. Raises Refused.
        """
        if len(tokens) >= self.most_tokens:
            # harnesses end a conversation at an error with the words "maximum context length"
            raise Refused(
                f"{len(tokens)} tokens leave no room for a reply: the maximum context length of an"
                f" episode is {self.most_tokens} tokens; end it, or raise rollout.max_new_tokens"
                " (the limit is rollout.prompt_buckets[-1] + rollout.max_new_tokens)"
            )
        if self.turns >= self.most_turns * MOST_BRANCHES:
            raise Refused(f"the episode has had {self.turns} replies, more than its turns allow")
        branch = self._branch(tokens, agent)
        column, row = self._place(branch)
        limit = min(len(tokens) + limit, self.most_tokens)
        if branch.sampled:
            request = Request.resumed(branch.rollout(tokens, column, row), limit)
            request.temperature = temperature
        else:
            request = Request.of(
                branch.prompt, column, row, limit, version, temperature=temperature
            )
        branch.request = request
        self.turns += 1
        return request

    def of(self, request: Request) -> Branch:
        """Returns the branch of a request."""
        return next(x for x in self.branches if x.request is request)

    def column(self, branch: Branch) -> int:
        """Returns the index of a branch's draws."""
        return self.key.index + branch.number * BRANCH_COLUMNS

    def _place(self, branch: Branch) -> tuple[int, int]:
        return self.column(branch), self.outside if branch.number else self.row

    def _branch(self, tokens: np.ndarray, agent: str) -> Branch:
        """Returns the agent's longest branch that goes on to the tokens, or a new one."""
        idle = [x for x in self.branches if x.request is None]
        known = [x for x in idle if x.agent == agent and x.goes_on_to(tokens)]
        if known:
            branch = max(known, key=lambda x: len(x.tokens))
            if len(branch.replies) >= self.most_turns:
                raise Refused(
                    f"the history has {len(branch.replies)} replies, as many as its source in"
                    " data.sources has turns: raise `turns` of the source, or end the episode"
                )
            return branch
        if len(tokens) > self.most_prompt:
            raise Refused(
                f"{len(tokens)} tokens continue no earlier request, and a new one has at most"
                f" {self.most_prompt}; shorten it, or raise rollout.prompt_buckets[-1]"
            )
        # A branch whose first request was cancelled is begun again.
        unanswered = [x.number for x in idle if not x.sampled]
        number = unanswered[0] if unanswered else len(self.branches)
        if number >= MOST_BRANCHES:
            raise Refused(
                f"the request continues none of the episode's {number} histories, and it may have"
                " no more"
            )
        branch = Branch(number, agent, dataclasses.replace(self.task, tokens=tokens))
        self.branches[number : number + 1] = [branch]
        return branch

    @property
    def live(self) -> list[Request]:
        """The requests that are being sampled."""
        return [x.request for x in self.branches if x.request is not None]

    def trained(self, agent: str = "") -> Branch | None:
        """Returns the branch with the most sampled tokens, of `agent` where one is named; None
        without a reply.
        """
        done = [x for x in self.branches if x.sampled and agent in ("", x.agent)]
        return max(done, key=lambda x: x.sampled, default=None)

    def sample(self, end_ids: frozenset[int], agent: str = "") -> Rollout:
        """Returns the trained branch as the episode's sample: after its placeholder all tokens are
        those of the response. Without a reply the sample has the placeholder alone.
        """
        index, best = self.key.index, self.trained(agent)
        if best is None:
            one = np.zeros(1, np.float32)
            versions = np.full(1, GIVEN, np.int32)
            return Rollout(self.task, index, self.task.tokens, one, one, True, versions, self.row)
        truncated = int(best.tokens[-1]) not in end_ids
        arrays = (best.tokens, best.logp, best.entropy, truncated, best.versions)
        return Rollout(self.task, index, *arrays, self._place(best)[1])

    @property
    def sampled(self) -> int:
        """The number of sampled tokens in all branches."""
        return sum(x.sampled for x in self.branches)
