"""Results of an evaluation on sets of prompts, in all and by the labels of their rows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import Group, Prompt, Rollout, Score
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

MAX_LABEL_VALUES = 32  # of a domain, language or difficulty in the accuracy table


@dataclass(frozen=True)
class Accuracy:
    """Shares in [0, 1] over prompts: of k samples each, and of one greedy answer. NaN where no
    score is known. Unknown scores are counted and left out.
    """

    prompts: int
    k: int
    avg_at_k: float  # over all known samples
    avg_at_k_se: float  # its standard error, clustered by prompt
    interval: tuple[float, float]  # of avg@k: 95%, bootstrap over prompts
    # k' -> unbiased estimate; a prompt with fewer known samples uses all of them
    pass_at: dict[int, float]
    maj_at_k: float  # over the prompts whose answers can be compared; NaN: none
    greedy: float
    greedy_interval: tuple[float, float]  # 95%, Wilson's
    reward: float  # mean of the samples
    length_mean_tokens: float  # of the samples' responses
    truncated_frac: float  # of the samples
    unscored: int  # unknown scores, greedy answers included


@dataclass(frozen=True)
class SetResult(Accuracy):
    """The accuracy on one set."""

    temperature: float
    extracted: float  # share of the samples' responses with an answer
    kinds: dict[str, float]  # share of groups of each kind
    overlap: int  # prompts that are also in the training data
    by: dict[str, Accuracy] = field(default_factory=dict)  # "domain/algebra", or a source's label
    lost: dict[str, int] = field(default_factory=dict)  # the unknown scores by outcome

    def metrics(self, name: str) -> dict[str, float]:
        """Returns the metrics of a set with this name."""
        fields = ("avg_at_k", "avg_at_k_se", "maj_at_k", "greedy", "reward", "truncated_frac")
        metrics = {f"eval/{name}/{key}": float(getattr(self, key)) for key in fields}
        low, high = self.interval
        metrics |= {f"eval/{name}/avg_at_k_low": low, f"eval/{name}/avg_at_k_high": high}
        metrics[f"eval/{name}/length_mean_tokens"] = self.length_mean_tokens
        metrics[f"eval/{name}/pass_at_k"] = self.pass_at[self.k]
        metrics[f"eval/{name}/extracted_frac"] = self.extracted
        return metrics | {f"eval/{name}/{kind}_frac": x for kind, x in self.kinds.items()}


@dataclass(frozen=True)
class Evaluation:
    """Accuracies in [0, 1] on the held-out prompts, NaN without such prompts. `labels` has
    (prompts, avg@k, greedy) of each label: those of the sources first, then those of the rows
    ("domain/algebra"). `sets` has the full results of the held-out prompts (HELDOUT) and of each of
    `data.eval_sets`. Unknown scores are counted and left out.
    """

    k: int
    prompts: int
    avg_at_k: float
    pass_at_k: float
    greedy: float
    unscored: int
    labels: dict[str, tuple[int, float, float]] = field(default_factory=dict)
    # of the k samples: share of responses with an answer, and of groups by kind
    extracted: float = math.nan
    kinds: dict[str, float] = field(default_factory=dict)
    warning: str = ""  # with a sample, where no response has an answer or none is right
    reward: float = math.nan  # mean of the k samples' rewards
    right_at: float = 1.0  # smallest reward of a right answer
    sets: dict[str, SetResult] = field(default_factory=dict)

    def line(self) -> str:
        """Returns the accuracies in one line, with the mean reward where some rewards are neither
        right nor 0, and the number of samples without a verdict.
        """
        parts = []
        if self.prompts:
            sampled = f"avg@{self.k} {self.avg_at_k:.3f}, pass@{self.k} {self.pass_at_k:.3f}"
            parts.append(f"held-out: {sampled}, greedy {self.greedy:.3f}{_unknown_note(self)}")
            if abs(self.reward - self.avg_at_k) > 5e-4:
                right = f"(right: at least {self.right_at:g})"
                parts.append(f"mean reward {self.reward:.3f} {right}")
        for name, one in self.sets.items():
            if name != HELDOUT:
                sampled = f"avg@{one.k} {one.avg_at_k:.3f}, greedy {one.greedy:.3f}"
                parts.append(f"{name}: {sampled}{_unknown_note(one)}")
        return "; ".join(parts)

    def metrics(self) -> dict[str, float]:
        """Returns all metrics by name; a set's take precedence over those of a label with its name,
        such as that of a file heldout.jsonl.
        """
        metrics = {f"eval/{label}/avg_at_k": v[1] for label, v in self.labels.items()}
        for name, one in self.sets.items():
            metrics |= one.metrics(name)
        return metrics


def _unknown_note(result: Accuracy | Evaluation) -> str:
    samples = result.prompts * (result.k + 1)  # the greedy answers too
    return f", {result.unscored} of {samples} samples have no verdict" if result.unscored else ""


class Tally(NamedTuple):
    """One prompt's counts, from which the estimates are computed."""

    prompt: Prompt
    rewards: list[float]  # of the known samples
    right: list[bool]
    majority: float  # NaN where answers cannot be compared
    greedy: bool | None  # None: unknown
    tokens: list[int]  # of all samples
    truncated: int


Vote = Callable[[Prompt, str], str | None]
TextOf = Callable[[Rollout], str]


def tally(group: Group, right_at: float, votes: Sequence[Vote | None], text_of: TextOf) -> Tally:
    """Returns the counts of a group whose last sample is the greedy answer. `votes` come from
    rewards/checks.py.
    """
    (*samples, _), (*scores, best) = group.rollouts, group.scores
    known = [s.known for s in scores]
    right = [s.reward >= right_at for s in scores if s.known]
    vote, majority = votes[group.prompt.source], math.nan
    if vote is not None and right:
        answers = [vote(group.prompt, text_of(r)) for r, k in zip(samples, known) if k]
        majority = maj_at_k(answers, right)
    return Tally(
        group.prompt,
        [s.reward for s in scores if s.known],
        right,
        majority,
        best.reward >= right_at if best.known else None,
        [r.response_length for r in samples],
        sum(r.truncated for r in samples),
    )


def accuracy_of(tallies: Sequence[Tally], k: int, seed: int) -> JsonObject:
    """Computes the fields of `Accuracy` over some prompts; `seed` is that of the bootstrap."""
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
            smaller_k: mean([pass_at_k(c, n, min(smaller_k, n)) for c, n in zip(right, known) if n])
            for smaller_k in pass_counts(k)
        },
        "maj_at_k": mean([x.majority for x in tallies if not math.isnan(x.majority)]),
        "greedy": greedy,
        "greedy_interval": wilson(greedy, len(best)),
        "reward": mean([x for one in tallies for x in one.rewards]),
        "length_mean_tokens": mean(lengths),
        "truncated_frac": sum(one.truncated for one in tallies) / max(len(lengths), 1),
        # Unknown samples, then unknown greedy answers.
        "unscored": int((k - known).sum()) + len(tallies) - len(best),
    }


def set_result(
    groups: Sequence[Group],
    tallies: Sequence[Tally],
    temperature: float,
    overlap: str,
    rewards: RewardConfig,
    seed: int,
) -> SetResult:
    """Returns the result of a set. `groups` end with the greedy answers and `tallies` belong to
    them; `overlap` is the label of a prompt that is also in the training data.
    """
    scores: list[Sequence[Score]] = [group.scores[:-1] for group in groups]
    k = len(scores[0])
    labels = [{one.prompt.label, *one.prompt.labels} for one in tallies]
    by = {}
    for label in labels_of([one.prompt for one in tallies]):
        of_label = [one for one, names in zip(tallies, labels, strict=True) if label in names]
        by[label] = Accuracy(**accuracy_of(of_label, k, seed))
    return SetResult(
        **accuracy_of(tallies, k, seed),
        temperature=temperature,
        extracted=extracted_frac([score for row in scores for score in row]),
        kinds=group_shares(scores, rewards),
        overlap=sum(overlap in names for names in labels),
        by=by,
        lost=dict(Counter(x.outcome for group in groups for x in group.scores if not x.known)),
    )


def labels_of(prompts: Sequence[Prompt]) -> list[str]:
    """Returns the labels of the sources in order, then those of the rows ("domain/algebra"). A kind
    of label with more than MAX_LABEL_VALUES values is left out, since the table would have hundreds
    of lines.
    """
    row_labels = sorted({label for p in prompts for label in p.labels})
    values = Counter(label.split("/", 1)[0] for label in row_labels)
    labels = [label for label in row_labels if values[label.split("/", 1)[0]] <= MAX_LABEL_VALUES]
    return list(dict.fromkeys([*(p.label for p in prompts), *labels]))


def mean(values: Sequence[float]) -> float:
    """Returns the mean; NaN for no values."""
    return float(np.mean(values)) if len(values) else math.nan
