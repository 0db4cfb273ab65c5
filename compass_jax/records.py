"""The nouns that cross boundaries, frozen and shaped.

Axes: `b` sequences (one row = one sequence), `t` tokens, `g` groups (one prompt each), `s` samples
of a group, `l` MoE layers, `k` experts per token, `e` experts, `v` vocabulary.

Alignment, everywhere: index `t` of logp, entropy, mask, advantage and weight belongs to *token* t,
the one that was sampled from the hidden state at t-1 (so index 0 is never in a mask). Index `t` of
routing belongs to token t as an *input*; the last token of a sequence is never an input, so T
tokens own T-1 routing rows and its row is unset.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # at run time jaxtyping's Array imports jax, which data preparation does without
    from jaxtyping import Array, Bool, Float, Int, UInt


def stable_id(text: str) -> int:
    """A 32-bit id of a text that is the same in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised. `id` folds into every random key drawn for it; `visit` counts earlier
    rollouts of it.
    """

    id: int  # stable_id(source label + question)
    source: int  # index into data.sources: which scorer checks it
    label: str  # name in the accuracy table
    question: str  # what the user asks, before the chat template
    tokens: np.ndarray  # int32 [t], chat template and generation prompt applied
    answer: str  # reference answer
    item: str = ""  # the procedural dataset's whole entry as JSON, for its scorer; empty for files
    visit: int = 0

    def at_visit(self, visit: int) -> Prompt:
        """The same prompt on its `visit`-th rollout."""
        return dataclasses.replace(self, visit=visit)


@dataclass(frozen=True)
class Rollout:
    """One sample, finished or cut to go on later. Routing stays on the device, in row `row` of the
    collector's routing store.
    """

    prompt: Prompt
    sample: int
    tokens: np.ndarray  # int32 [t], prompt and response, end token included
    logp: np.ndarray  # float32 [t]; 0 on the prompt
    entropy: np.ndarray  # float32 [t], nats; 0 on the prompt
    truncated: bool  # stopped by length, not by the end token
    # int32 [t]: the policy version under which each token was sampled; not read on the prompt
    versions: np.ndarray
    row: int

    @property
    def response_length(self) -> int:
        """Generated tokens, end token included."""
        return len(self.tokens) - len(self.prompt.tokens)

    @property
    def response(self) -> np.ndarray:
        """int32 [response_length]."""
        return self.tokens[len(self.prompt.tokens) :]


@dataclass(frozen=True)
class Score:
    """A verifier's answer. `known` is False after a hang, crash or exception: the sample is then
    excluded.
    """

    reward: float
    known: bool
    outcome: str = "ok"  # ok, timeout, crash, error
    detail: str = ""


@dataclass(frozen=True)
class Group:
    """All samples of one prompt with their scores, in sample order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]


class Outcome(NamedTuple):
    """What is remembered of one group."""

    known: int  # samples with a verdict
    reward_sum: float
    response_tokens: int  # of all samples
    kind: str  # "easy": all right, "hard": all wrong, "": any other
    samples: int


class TrainBatch(NamedTuple):
    """Arrays of sequences for one pass. `routing` None: live; its unset rows fall back to live
    routing, token by token.
    """

    tokens: Int[Array, "b t"]
    lengths: Int[Array, "b"]  # tokens of each sequence; 0 for a padding row
    mask: Bool[Array, "b t"]  # generated tokens that are trained on
    rollout_logp: Float[Array, "b t"]
    routing: UInt[Array, "b t l k"] | None
    old_logp: Float[Array, "b t"] | None = None
    old_entropy: Float[Array, "b t"] | None = None
    ref_logp: Float[Array, "b t"] | None = None
    advantage: Float[Array, "b t"] | None = None
    # the normaliser over the whole update; 0 outside the mask
    weight: Float[Array, "b t"] | None = None
    entropy_group: Int[Array, "b t"] | None = None  # ESPO's tau of each token


class TrainState(NamedTuple):
    """What an update reads and returns; all of it is in the checkpoint."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]  # updates applied
    bad_steps: Int[Array, ""]  # consecutive updates skipped for a non-finite gradient
    skipped: Int[Array, ""]  # all updates ever skipped
