"""The records that cross module boundaries, frozen and shaped.

Axes: `b` sequences (one row = one sequence), `t` tokens, `g` groups (one prompt each), `s` samples
of a group, `l` MoE layers, `k` experts per token, `e` experts, `v` vocabulary.

Alignment, everywhere: index `t` of logp, entropy, mask, advantage and weight belongs to *token* t,
which was sampled from the hidden state at t-1 (so index 0 is never in a mask). Index `t` of routing
belongs to token t as an *input*; the last token of a sequence is never an input, so T tokens have
T-1 routing rows and the last row is unset.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from compass_jax.base.aliases import JsonObject, Tree

if TYPE_CHECKING:  # at run time jaxtyping's Array imports jax, which data preparation does without
    from collections.abc import Sequence

    from jaxtyping import Array, Int


GOLD = "gold"  # the component of a score with the answer's gold label
# Columns of `StepArrays`; one that is missing has the value in brackets.
# GOLD: float32 [b], gold labels of the answers, NaN where unknown (NaN)
TRUNCATED = "truncated"  # bool [b]: cut off by length, and not trained on (False)
PREDICTED = "predicted"  # float32 [b]: predicted pass rate of the prompt (an error if it is read)
CONCENTRATION = "concentration"  # float32 [b]: alpha + beta of that prediction (an error, too)
FIRST = "first"  # bool [b]: sampled whatever the rewards of the group's other samples are (True)
SAMPLE = "sample"  # int32 [b]: number of a row's sample in its group (each row is a sample)
EARLIER = "earlier"  # bool [b]: of a group that an earlier step sampled (False)
SAMPLED = "sampled"  # bool [b t]: tokens of the mask that were sampled, not given (the mask)
GIVEN = -1  # the version of a token that was not sampled
EPISODE = -1  # turns of a prompt that stands for an episode, which a driver plays
UNKNOWN_LOGP = 1.0  # of a token whose sampler gave no log-prob; no log-prob is positive


def stable_id(text: str) -> int:
    """Returns a 32-bit id of a text that is the same in every process (unlike `hash`)."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big")


class SampleKey(NamedTuple):
    """A sample's identity. The same numbers key every random draw of the sample."""

    prompt: int  # Prompt.id
    visit: int
    index: int  # type: ignore[assignment]  # in its group; hides tuple.index


@dataclass(frozen=True)
class Prompt:
    """One tokenised prompt. `id` keys its random draws; `visit` counts earlier rollouts."""

    id: int  # stable_id(source label + question)
    source: int  # index into data.keyed_sources(): which scorer checks it
    label: str  # name in the accuracy table
    question: str  # the user's message, before the chat template
    tokens: np.ndarray  # int32 [t], chat template and generation prompt applied
    answer: str  # reference answer, for logs
    row: str = "{}"  # the fields for its verifier, as rewards/tasks/rows.py writes them
    labels: tuple[str, ...] = ()  # the row's labels besides `label`, such as "domain/algebra"
    visit: int = 0
    # largest number of the model's turns with an environment; 0: no environment; EPISODE: its
    # tokens are a placeholder, and those of its samples come with the requests of a driver
    turns: int = 0
    place: str = ""  # such as "rows.jsonl, line 3"; empty for a computed prompt
    # alpha and beta of the Beta distribution of the pass rate, as predicted when it was drawn
    predicted: tuple[float, float] = (1.0, 1.0)

    @classmethod
    def of_tokens(cls, tokens: Sequence[int], id: int, visit: int = 0) -> Prompt:
        """Returns a prompt for callers with their own data and rewards, without a verifier's row.

        Samples of equal id and visit draw the same random numbers; a prompt that is sampled again
        needs another visit.
        """
        array = np.asarray(tokens, np.int32)
        return cls(id, source=0, label="", question="", tokens=array, answer="", visit=visit)

    @property
    def key(self) -> tuple[int, int]:
        """(id, visit): the key of its samples' group."""
        return self.id, self.visit

    def sample(self, index: int) -> SampleKey:
        """Returns the key of one of its samples."""
        return SampleKey(self.id, self.visit, index)

    def at_visit(self, visit: int) -> Prompt:
        """Returns the same prompt at its `visit`-th rollout."""
        return dataclasses.replace(self, visit=visit)


class Draft(NamedTuple):
    """An earlier answer to a prompt, or its first tokens."""

    tokens: np.ndarray  # int32 [n]
    logp: np.ndarray  # float32 [n], of the policy that answered


@dataclass(frozen=True)
class Rollout:
    """One sample, finished or paused. Its routes are in row `row` of the RouteBuffer."""

    prompt: Prompt
    sample: int
    tokens: np.ndarray  # int32 [t], prompt and response, end token included
    logp: np.ndarray  # float32 [t]; 0 on the prompt
    entropy: np.ndarray  # float32 [t], nats; 0 on the prompt
    truncated: bool  # stopped by length, not by the end token
    # int32 [t]: the policy version that sampled each token; GIVEN on an environment's tokens and an
    # episode's prompt; else unused on the prompt
    versions: np.ndarray
    row: int
    drafted: int = 0  # number of tokens after the prompt that a draft gave; they were not sampled
    draft_tokens: int = 0  # number of tokens of that draft

    @property
    def key(self) -> SampleKey:
        """The sample's identity."""
        return self.prompt.sample(self.sample)

    @property
    def response_length(self) -> int:
        """The number of tokens after the prompt: generated ones, and an environment's."""
        return len(self.tokens) - len(self.prompt.tokens)

    @property
    def sampled_length(self) -> int:
        """The number of tokens after the prompt without those of drafts and environments."""
        return int(self.generated.sum()) - self.drafted

    @property
    def response(self) -> np.ndarray:
        """The tokens after the prompt, int32 [response_length]."""
        return self.tokens[len(self.prompt.tokens) :]

    @property
    def generated(self) -> np.ndarray:
        """Whether each token was generated, bool [response_length], or an environment's."""
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
    """A verifier's verdict. `known` is False after a hang, crash or exception, and where the
    verifier could not judge the answer: the sample is then excluded.
    """

    reward: float
    known: bool
    outcome: str = "ok"  # ok, unjudged, timeout, crash, error
    detail: str = ""
    # parts of the reward by name
    components: dict[str, float] = field(default_factory=dict)
    # whether the response had an answer; meaningless after a hang, crash or exception
    extracted: bool = True
    says: str = ""  # messages of an environment that continues, as a JSON list; else empty
    # share of `rewards.conversation_s` that such an environment took for this answer; else 0
    spent: float = 0.0
    # how an episode went, with its seconds (experience/episodes/record.py); else empty
    episode: JsonObject = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Group:
    """All samples of one prompt with their scores, in sample order."""

    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]


class Outcome(NamedTuple):
    """The result of one group, for the prompts' history."""

    known: int  # samples with a verdict
    reward_sum: float
    response_tokens: int  # of all samples
    kind: str  # "easy": all right, "hard": all wrong, "": any other
    samples: int
    given_tokens: int = 0  # of the response tokens, those of drafts and environments

    @property
    def sampled_tokens(self) -> int:
        """The number of response tokens that were sampled."""
        return self.response_tokens - self.given_tokens


@dataclass
class StepArrays:
    """All sequences of one step, on the host: `[b t]` with t the longest training bucket.

    Row n * s + c is sample c of prompt n, where s is the largest number of samples in a group. A
    row without a sample has length 0 and group -1.
    """

    tokens: np.ndarray  # int32 [b t], prompt and response
    lengths: np.ndarray  # int32 [b]
    mask: np.ndarray  # bool [b t], generated tokens
    rollout_logp: np.ndarray  # float32 [b t], of the policy that sampled; or UNKNOWN_LOGP
    reward: np.ndarray  # float32 [b]
    known: np.ndarray  # bool [b]: the verifier gave a reward
    repetition: np.ndarray  # float32 [b], share of a response's n-grams that are repeated
    group: np.ndarray  # int32 [b], numbers the prompts
    # [b t' l k] on the devices: the rollout's routes, of any length t'; None without router replay
    routes: Tree = None
    # further arrays [b] or [b t] by name, those below and a hook's own, which advantages can read
    columns: dict[str, np.ndarray] = field(default_factory=dict)


class TrainState(NamedTuple):
    """The state that an update reads and returns; all of it is in the checkpoint."""

    params: Tree
    opt_state: Tree
    step: Int[Array, ""]  # updates applied
    bad_steps: Int[Array, ""]  # consecutive updates skipped for a non-finite gradient
    skipped: Int[Array, ""]  # all updates ever skipped
    average: Tree = None  # of `params`, in at least float32; None: rl.optim.average is off
