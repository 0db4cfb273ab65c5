"""What an evaluation found about a set of prompts, as a whole and by the labels of its rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from compass_jax.config import RewardConfig
from compass_jax.config.data import HELDOUT
from compass_jax.experience.estimators import (
    clustered,
    maj_at_k,
    pass_at_k,
    pass_counts,
    wilson,
)
from compass_jax.experience.judged import extracted_frac, group_shares
from compass_jax.records import Group, Prompt, Rollout, Score

MOST_VALUES = 32  # of a row's domain, language or difficulty in the accuracy table


@dataclass(frozen=True)
class Accuracy:
    """Shares in [0, 1] over prompts: of k samples each, and of one greedy answer. NaN where no
    score is known. Scores that are unknown are left out and counted.
    """

    prompts: int
    k: int
    avg_at_k: float  # over all known samples
    avg_at_k_se: float  # its standard error, clustered by prompt
    interval: tuple[float, float]  # of avg@k: 95%, bootstrap over prompts
    # k' -> unbiased; a prompt with fewer known samples counts with all that it has
    pass_at: dict[int, float]
    maj_at_k: float  # of the prompts whose answers can be counted; NaN: of none
    greedy: float
    greedy_interval: tuple[float, float]  # 95%, Wilson's
    reward: float  # mean of the samples
    length_mean_tokens: float  # of the samples' responses
    truncated_frac: float  # of the samples
    unknown: int  # scores, the greedy answers' included


@dataclass(frozen=True)
class SetResult(Accuracy):
    """The accuracy on a whole set."""

    temperature: float
    extracted: float  # of the samples' responses: in which an answer was found
    kinds: dict[str, float]  # shares of groups of each kind
    overlap: int  # prompts that the training data has too
    by: dict[str, Accuracy] = field(default_factory=dict)  # "domain/algebra", or a source's label

    def metrics(self, name: str) -> dict[str, float]:
        """By their public names, for a set of this name."""
        told = ("avg_at_k", "avg_at_k_se", "maj_at_k", "greedy", "reward", "truncated_frac")
        found = {f"eval/{name}/{key}": float(getattr(self, key)) for key in told}
        low, high = self.interval
        found |= {f"eval/{name}/avg_at_k_low": low, f"eval/{name}/avg_at_k_high": high}
        found[f"eval/{name}/length_mean_tokens"] = self.length_mean_tokens
        found[f"eval/{name}/pass_at_k"] = self.pass_at[self.k]
        found[f"eval/{name}/extracted_frac"] = self.extracted
        return found | {f"eval/{name}/{kind}_frac": x for kind, x in self.kinds.items()}


@dataclass(frozen=True)
class Evaluation:
    """Accuracies in [0, 1] on the held-out prompts, NaN where there are none; `labels` has
    (prompts, avg@k, greedy) of each of their labels, those of the sources first, then those of the
    rows ("domain/algebra"). `sets` has all that was found, of the held-out prompts (HELDOUT) and of
    each of `data.eval_sets`. Unknown scores are left out and counted.
    """

    k: int
    prompts: int
    avg_at_k: float
    pass_at_k: float
    greedy: float
    unknown: int
    labels: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    # of the k samples: responses in which an answer was found, and groups by kind
    extracted: float = math.nan
    kinds: dict[str, float] = field(default_factory=dict)
    warning: str = ""  # where no answer was found, or none is right: with a sample
    reward: float = math.nan  # mean of the k samples' rewards
    right_at: float = 1.0  # an answer with at least this reward is right
    sets: dict[str, SetResult] = field(default_factory=dict)

    def line(self) -> str:
        """The accuracies in one line, the mean reward where some are neither right nor 0, and how
        many samples have no verdict, where there are any.
        """
        told = []
        if self.prompts:
            sampled = f"avg@{self.k} {self.avg_at_k:.3f}, pass@{self.k} {self.pass_at_k:.3f}"
            told.append(f"held-out: {sampled}, greedy {self.greedy:.3f}{_lost(self)}")
            if abs(self.reward - self.avg_at_k) > 5e-4:
                right = f"(right: at least {self.right_at:g})"
                told.append(f"mean reward {self.reward:.3f} {right}")
        for name, one in self.sets.items():
            if name != HELDOUT:
                sampled = f"avg@{one.k} {one.avg_at_k:.3f}, greedy {one.greedy:.3f}"
                told.append(f"{name}: {sampled}{_lost(one)}")
        return "; ".join(told)

    def metrics(self) -> dict[str, float]:
        """By their public names."""
        found: dict[str, float] = {}
        for name, one in self.sets.items():
            found |= one.metrics(name)
        return {**found, **{f"eval/{label}/avg_at_k": v[1] for label, v in self.labels.items()}}


def _lost(found: Accuracy | Evaluation) -> str:
    every = found.prompts * (found.k + 1)  # the greedy answers too
    return f", {found.unknown} of {every} samples have no verdict" if found.unknown else ""


class Tally(NamedTuple):
    """What the estimates of one prompt are made of."""

    prompt: Prompt
    rewards: list[float]  # of the known samples
    right: list[bool]
    majority: float  # NaN where its answers cannot be counted
    greedy: bool | None  # None: unknown
    tokens: list[int]  # of all samples
    truncated: int


Vote = Callable[[Prompt, str], str | None]
TextOf = Callable[[Rollout], str]


def tally(group: Group, right_at: float, votes: Sequence[Vote | None], text_of: TextOf) -> Tally:
    """The counts of a group whose last sample is the greedy answer. `votes` are those of
    rewards/votes.py.
    """
    (*samples, _), (*scores, best) = group.rollouts, group.scores
    known = [s.known for s in scores]
    right = [s.reward >= right_at for s in scores if s.known]
    vote, majority = votes[group.prompt.source], math.nan
    if vote is not None and right:
        said = [vote(group.prompt, text_of(r)) for r, k in zip(samples, known) if k]
        majority = maj_at_k(said, right)
    return Tally(
        group.prompt,
        [s.reward for s in scores if s.known],
        right,
        majority,
        best.reward >= right_at if best.known else None,
        [r.response_length for r in samples],
        sum(r.truncated for r in samples),
    )


def accuracy_of(tallies: Sequence[Tally], k: int, seed: int) -> dict[str, Any]:
    """The fields of `Accuracy` over some prompts; `seed` is that of the bootstrap."""
    right = np.array([sum(one.right) for one in tallies])
    known = np.array([len(one.right) for one in tallies])
    sampled = clustered(right, known, seed)
    best = [one.greedy for one in tallies if one.greedy is not None]
    greedy = mean(best)
    lengths = [n for one in tallies for n in one.tokens]
    return {
        "prompts": len(tallies),
        "k": k,
        "avg_at_k": sampled.mean,
        "avg_at_k_se": sampled.se,
        "interval": (sampled.low, sampled.high),
        "pass_at": {
            few: mean([pass_at_k(c, n, min(few, n)) for c, n in zip(right, known) if n])
            for few in pass_counts(k)
        },
        "maj_at_k": mean([x.majority for x in tallies if not math.isnan(x.majority)]),
        "greedy": greedy,
        "greedy_interval": wilson(greedy, len(best)),
        "reward": mean([x for one in tallies for x in one.rewards]),
        "length_mean_tokens": mean(lengths),
        "truncated_frac": sum(one.truncated for one in tallies) / max(len(lengths), 1),
        "unknown": int((k - known).sum()) + len(tallies) - len(best),
    }


def set_result(
    groups: Sequence[Group],
    tallies: Sequence[Tally],
    temperature: float,
    overlap: str,
    rewards: RewardConfig,
    seed: int,
) -> SetResult:
    """The result of a set. `groups` end with the greedy answers, `tallies` are theirs; `overlap` is
    the label of a prompt that the training data has too.
    """
    scores: list[Sequence[Score]] = [group.scores[:-1] for group in groups]
    k = len(scores[0])
    labels = [{one.prompt.label, *one.prompt.labels} for one in tallies]
    by = {}
    for label in labels_of([one.prompt for one in tallies]):
        mine = [one for one, names in zip(tallies, labels, strict=True) if label in names]
        by[label] = Accuracy(**accuracy_of(mine, k, seed))
    return SetResult(
        **accuracy_of(tallies, k, seed),
        temperature=temperature,
        extracted=extracted_frac([score for row in scores for score in row]),
        kinds=group_shares(scores, rewards),
        overlap=sum(overlap in names for names in labels),
        by=by,
    )


def labels_of(prompts: Sequence[Prompt]) -> list[str]:
    """The labels of the sources in their order; then those of the rows, "domain/algebra", unless
    a kind of them has more than MOST_VALUES values: a table of hundreds of lines says nothing.
    """
    own = sorted({label for p in prompts for label in p.labels})
    values = Counter(label.split("/", 1)[0] for label in own)
    few = [label for label in own if values[label.split("/", 1)[0]] <= MOST_VALUES]
    return list(dict.fromkeys([*(p.label for p in prompts), *few]))


def mean(values: Sequence[float]) -> float:
    """Their mean; NaN of none."""
    return float(np.mean(values)) if len(values) else math.nan
