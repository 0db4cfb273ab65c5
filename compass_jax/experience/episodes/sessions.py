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

import numpy as np

from compass_jax.errors import CompassError
from compass_jax.records import GIVEN, Prompt, Rollout, SampleKey
from compass_jax.rollout.request import Request

MOST_BRANCHES = 32
BRANCH_COLUMNS = 2**16  # columns of a branch: the sample's plus a multiple of this number


class Refused(CompassError, ValueError):
    """A request that the episode's limits do not allow; the message is for its driver."""


@dataclass(eq=False)
class Branch:
    """A sequence of tokens, given and sampled; `request` while its next turn is sampled."""

    number: int
    agent: str
    prompt: Prompt  # the tokens of its first request
    tokens: np.ndarray  # int32 [t]
    logp: np.ndarray  # float32 [t]
    entropy: np.ndarray  # float32 [t]
    versions: np.ndarray  # int32 [t]; GIVEN on the tokens of requests
    request: Request | None = None

    @property
    def sampled(self) -> int:
        """The number of sampled tokens."""
        return int((self.versions != GIVEN).sum())

    def rollout(self, column: int, row: int) -> Rollout:
        """Returns its tokens as a sample that can be continued."""
        arrays = self.tokens, self.logp, self.entropy
        return Rollout(self.prompt, column, *arrays, True, self.versions, row)


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
            raise Refused(
                f"{len(tokens)} tokens leave no room for a reply: an episode has at most"
                f" {self.most_tokens} (rollout.prompt_buckets[-1] + rollout.max_new_tokens)"
            )
        if self.turns >= self.most_turns * MOST_BRANCHES:
            raise Refused(f"the episode has had {self.turns} replies, more than its turns allow")
        branch = self._continued(tokens, agent) or self._new_branch(tokens, agent)
        column, row = self._place(branch)
        limit = min(len(tokens) + limit, self.most_tokens)
        if branch.sampled:
            request = Request.resumed(branch.rollout(column, row), limit)
            request.temperature = temperature
        else:
            request = Request.of(
                branch.prompt, column, row, limit, version, temperature=temperature
            )
        branch.request = request
        self.turns += 1
        return request

    def replied(self, request: Request, sampled_from: int) -> None:
        """Adds the tokens that a request has sampled, from place `sampled_from` on."""
        branch = next(x for x in self.branches if x.request is request)
        branch.tokens, branch.logp, branch.entropy = request.tokens, request.logp, request.entropy
        new = request.versions[sampled_from:]
        branch.versions = np.concatenate([branch.versions[:sampled_from], new])
        branch.request = None

    def _place(self, branch: Branch) -> tuple[int, int]:
        column = self.key.index + branch.number * BRANCH_COLUMNS
        return column, self.outside if branch.number else self.row

    def _continued(self, tokens: np.ndarray, agent: str) -> Branch | None:
        """Returns the agent's longest branch that the tokens continue, with the new ones as
        given.
        """
        idle = [x for x in self.branches if x.sampled and (x.request, x.agent) == (None, agent)]
        known = [x for x in idle if np.array_equal(x.tokens, tokens[: len(x.tokens)])]
        if not known:
            return None
        branch = max(known, key=lambda x: len(x.tokens))
        n = len(tokens) - len(branch.tokens)
        zeros = np.zeros(n, np.float32)
        branch.tokens = tokens
        branch.logp = np.concatenate([branch.logp, zeros])
        branch.entropy = np.concatenate([branch.entropy, zeros])
        branch.versions = np.concatenate([branch.versions, np.full(n, GIVEN, np.int32)])
        return branch

    def _new_branch(self, tokens: np.ndarray, agent: str) -> Branch:
        if len(tokens) > self.most_prompt:
            raise Refused(
                f"{len(tokens)} tokens continue no earlier request, and a new one has at most"
                f" {self.most_prompt} (rollout.prompt_buckets[-1])"
            )
        # A branch whose first request was cancelled is begun again.
        idle = [x for x in self.branches if x.request is None and not x.sampled]
        number = idle[0].number if idle else len(self.branches)
        if number >= MOST_BRANCHES:
            raise Refused(
                f"the request continues none of the episode's {number} histories, and it may have"
                " no more"
            )
        prompt = dataclasses.replace(self.task, tokens=tokens)
        zeros = np.zeros(len(tokens), np.float32)
        versions = np.full(len(tokens), GIVEN, np.int32)
        branch = Branch(number, agent, prompt, tokens, zeros, zeros, versions)
        self.branches[number : number + 1] = [branch]
        return branch

    @property
    def live(self) -> list[Request]:
        """The requests that are being sampled."""
        return [x.request for x in self.branches if x.request is not None]

    def sample(self, end_ids: frozenset[int], agent: str = "") -> Rollout:
        """Returns the trained branch as the episode's sample, of `agent` where one is named: after
        its placeholder all tokens are those of the response. Without a reply the sample has the
        placeholder alone.
        """
        index = self.key.index
        done = [x for x in self.branches if x.sampled and agent in ("", x.agent)]
        if not done:
            one = np.zeros(1, np.float32)
            versions = np.full(1, GIVEN, np.int32)
            return Rollout(self.task, index, self.task.tokens, one, one, True, versions, self.row)
        best = max(done, key=lambda x: x.sampled)
        n = int(np.flatnonzero(best.versions != GIVEN)[-1]) + 1  # what follows was never read
        arrays = (best.tokens[:n], best.logp[:n], best.entropy[:n])
        truncated = int(best.tokens[n - 1]) not in end_ids
        row = self._place(best)[1]
        return Rollout(self.task, index, *arrays, truncated, best.versions[:n], row)

    @property
    def sampled(self) -> int:
        """The number of sampled tokens in all branches."""
        return sum(x.sampled for x in self.branches)
