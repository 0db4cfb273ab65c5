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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:  # at run time jaxtyping's Array imports jax, which data preparation does without
    from jaxtyping import Array, Int


GOLD = "gold"  # the component of a score that says what the answer is truly worth
GIVEN = -1  # in the place of a version: nobody sampled the token


def stable_id(text: str) -> int:
    """A 32-bit id of a text that is the same in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


class SampleKey(NamedTuple):
    """Who a sample is, wherever it lies: the same numbers key every random draw that made it."""

    prompt: int  # Prompt.id
    visit: int
    index: int  # type: ignore[assignment]  # in its group; the tuple's own is not needed


@dataclass(frozen=True)
class Prompt:
    """One prompt, tokenised. `id` folds into every random key drawn for it; `visit` counts earlier
    rollouts of it.
    """

    id: int  # stable_id(source label + question)
    source: int  # index into data.keyed_sources(): which scorer checks it
    label: str  # name in the accuracy table
    question: str  # what the user asks, before the chat template
    tokens: np.ndarray  # int32 [t], chat template and generation prompt applied
    answer: str  # reference answer, as logs show it
    row: str = "{}"  # all that its verifier reads, as tasks/rows.py writes it
    labels: tuple[str, ...] = ()  # "domain/algebra": its row's own, beside `label`
    visit: int = 0
    turns: int = 0  # most turns of the model, where an environment answers it; 0: none does
    place: str = ""  # "rows.jsonl, line 3"; empty: its source computes it

    @property
    def key(self) -> tuple[int, int]:
        """(id, visit): whose group its samples are."""
        return self.id, self.visit

    def sample(self, index: int) -> SampleKey:
        """The key of one of its samples."""
        return SampleKey(self.id, self.visit, index)

    def at_visit(self, visit: int) -> Prompt:
        """The same prompt on its `visit`-th rollout."""
        return dataclasses.replace(self, visit=visit)


@dataclass(frozen=True)
class Rollout:
    """One sample, finished or paused to go on later. Its routes stay on the device, in row `row` of
    the RouteBuffer.
    """

    prompt: Prompt
    sample: int
    tokens: np.ndarray  # int32 [t], prompt and response, end token included
    logp: np.ndarray  # float32 [t]; 0 on the prompt
    entropy: np.ndarray  # float32 [t], nats; 0 on the prompt
    truncated: bool  # stopped by length, not by the end token
    # int32 [t]: the policy version under which each token was sampled; GIVEN on what an environment
    # said; not read on the prompt
    versions: np.ndarray
    row: int

    @property
    def key(self) -> SampleKey:
        """Who it is."""
        return self.prompt.sample(self.sample)

    @property
    def response_length(self) -> int:
        """Tokens after the prompt: generated ones, end token included, and an environment's."""
        return len(self.tokens) - len(self.prompt.tokens)

    @property
    def response(self) -> np.ndarray:
        """int32 [response_length]."""
        return self.tokens[len(self.prompt.tokens) :]

    @property
    def generated(self) -> np.ndarray:
        """bool [response_length]: the model's tokens; the others an environment said."""
        return self.versions[len(self.prompt.tokens) :] != GIVEN

    @property
    def turns(self) -> list[np.ndarray]:
        """The model's tokens, int32 [t] for each of its turns."""
        return self.stretches[::2]

    @property
    def stretches(self) -> list[np.ndarray]:
        """The response in parts: the model's first turn, the environment's answer, and so on."""
        return np.split(self.response, np.flatnonzero(np.diff(self.generated)) + 1)


@dataclass(frozen=True)
class Score:
    """A verifier's answer. `known` is False after a hang, crash or exception, and where the
    verifier could judge no answer: the sample is then excluded.
    """

    reward: float
    known: bool
    outcome: str = "ok"  # ok, unjudged, timeout, crash, error
    detail: str = ""
    # what the verifier named beside the reward
    components: dict[str, float] = field(default_factory=dict)
    # the response had an answer to judge; nobody knows after a hang, crash or exception
    extracted: bool = True
    says: str = ""  # the messages of an environment that goes on, a list of JSON; else empty
    # of `rewards.conversation_s` the share that such an environment took for this answer; else 0
    spent: float = 0.0


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


@dataclass
class StepArrays:
    """All sequences of one step, on the host: `[b t]` with t the longest training bucket.

    Row n * s + c is sample c of prompt n, where s is the most samples that a group may have. A row
    that no sample has is of length 0 and of group -1.
    """

    tokens: np.ndarray  # int32 [b t], prompt and response
    lengths: np.ndarray  # int32 [b]
    mask: np.ndarray  # bool [b t], generated tokens
    rollout_logp: np.ndarray  # float32 [b t], of the policy that sampled
    reward: np.ndarray  # float32 [b]
    known: np.ndarray  # bool [b]: the verifier gave a reward
    repetition: np.ndarray  # float32 [b], share of a response's n-grams that it had said before
    group: np.ndarray  # int32 [b], numbers the prompts
    # [b t' l k] on the devices, the rollout's, of any length t'; None where it kept none
    routes: Any = None
    # float32 [b], what the answers are truly worth, NaN where nobody knows; None: no source says it
    gold: np.ndarray | None = None
    # bool [b]: sampled at another temperature than the one of training; None: no row was
    hotter: np.ndarray | None = None


class TrainState(NamedTuple):
    """What an update reads and returns; all of it is in the checkpoint."""

    params: Any
    opt_state: Any
    step: Int[Array, ""]  # updates applied
    bad_steps: Int[Array, ""]  # consecutive updates skipped for a non-finite gradient
    skipped: Int[Array, ""]  # all updates ever skipped
