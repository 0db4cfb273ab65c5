"""Metrics of a step's groups: rewards and lengths, a few samples; and the control experiment that
shuffles rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from compass_jax.base.aliases import JsonObject
from compass_jax.base.records import GOLD, Group, Rollout, StepArrays
from compass_jax.config import SamplingConfig
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.episodes.record import response_row
from compass_jax.experience.growth import is_uniform, varies
from compass_jax.rewards.faults import summary
from compass_jax.rl.grouping import UNIFORM_WITHIN


def permute_rewards(arrays: StepArrays, seed: tuple[int, ...]) -> None:
    """Shuffles rewards within each group, as a control experiment."""
    rng = np.random.default_rng(seed)
    for g in range(arrays.group.max() + 1):
        rows = np.flatnonzero(arrays.group == g)
        order = rows[rng.permutation(len(rows))]
        arrays.reward[rows], arrays.known[rows] = arrays.reward[order], arrays.known[order]


def group_metrics(groups: list[Group]) -> dict[str, float]:
    """Returns rewards, the reward parts named by verifiers, and lengths of one step's samples."""
    scores = [s for g in groups for s in g.scores]
    rollouts = [r for g in groups for r in g.rollouts]
    known = [s.reward for s in scores if s.known]
    lengths = [r.response_length for r in rollouts]
    parts: dict[str, list[float]] = {}
    for name, part in (item for s in scores for item in s.components.items()):
        parts.setdefault(name, []).append(part)
    return {
        # NaN is null in the log; 0 would be a reward.
        "reward/mean": float(np.mean(known)) if known else float("nan"),
        "reward/timeout_frac": float(np.mean([s.outcome == "timeout" for s in scores])),
        "reward/unknown_frac": float(np.mean([not s.known for s in scores])),
        "response_length/mean": float(np.mean(lengths)),
        "response_length/max": float(np.max(lengths)),
        "truncated_frac": float(np.mean([r.truncated for r in rollouts])),
        # Means over the samples that have the part.
        **{f"reward/{name}/mean": float(np.mean(parts[name])) for name in sorted(parts)},
    }


def label_metrics(
    groups: Sequence[Group], labels: Sequence[str], right_at: float
) -> dict[str, float]:
    """Returns pass rate and mean length of each label's responses; a label without a known reward
    has no pass rate. `labels` are those of the groups.
    """
    by_label: dict[str, list[Group]] = {}
    for group, label in zip(groups, labels, strict=True):
        by_label.setdefault(label, []).append(group)
    metrics = {}
    for label, members in by_label.items():
        right = [s.reward >= right_at for g in members for s in g.scores if s.known]
        lengths = [r.response_length for g in members for r in g.rollouts]
        if right:
            metrics[f"label/{label}/pass_rate"] = float(np.mean(right))
        metrics[f"label/{label}/length_mean_tokens"] = float(np.mean(lengths))
    return metrics


Bins = list[tuple[float, float, int]]


def step_histograms(groups: Sequence[Group]) -> dict[str, Bins]:
    """Returns the distributions of a step's known rewards and of its responses' lengths, each as
    (low, high, count) of its bins that are not empty.
    """
    rewards = [s.reward for g in groups for s in g.scores if s.known]
    lengths = [r.response_length for g in groups for r in g.rollouts]
    return {"reward": histogram(rewards), "response_length": histogram(lengths)}


def histogram(values: Sequence[float], bins: int = 16) -> Bins:
    """Returns (low, high, count) of the bins that hold values: a bin for each value if there
    are at most `bins` different ones, else `bins` bins of equal width.
    """
    finite = np.asarray([v for v in values if np.isfinite(v)], np.float64)
    distinct, counts = np.unique(finite.round(9), return_counts=True)
    if len(distinct) <= bins:
        return [(float(v), float(v), int(n)) for v, n in zip(distinct, counts, strict=True)]
    counts, edges = np.histogram(finite, bins)
    rounded = [float(f"{edge:.6g}") for edge in edges]
    return [
        (low, high, int(n)) for low, high, n in zip(rounded, rounded[1:], counts, strict=False) if n
    ]


def label_inversion(
    groups: Sequence[Group], arrays: StepArrays, advantage: np.ndarray
) -> dict[str, float]:
    """Computes advantage/<label>/inversion_frac by gold labels, as rl/shaping.py:inversion does for
    all labels together; empty without gold labels, and without an entry for a label without pairs.

    Args:
        advantage: of each response `[b]`, NaN for one that was not trained on.
    """
    if GOLD not in arrays.columns:
        return {}
    all_gold, counts = arrays.columns[GOLD], dict[str, np.ndarray]()
    known = np.isfinite(all_gold) & np.isfinite(advantage)
    for g, group in enumerate(groups):
        rows = np.flatnonzero((arrays.group == g) & known)
        gold, advantages = all_gold[rows], advantage[rows]
        # [n, n]: row i is the better response and column j the worse one, so a pair counts once.
        better = gold[:, None] - gold[None, :] > UNIFORM_WITHIN
        wrong = better & (advantages[:, None] < advantages[None, :])
        counted = counts.setdefault(group.prompt.label, np.zeros(2, np.int64))
        counted += (int(wrong.sum()), int(better.sum()))
    return {
        f"advantage/{label}/inversion_frac": float(wrong / pairs)
        for label, (wrong, pairs) in counts.items()
        if pairs
    }


def entropy_metrics(
    arrays: StepArrays, entropy: np.ndarray, right_at: float, labels: Sequence[str]
) -> dict[str, float]:
    """Returns the mean entropy (nats) of right and of wrong responses, and of each label's, without
    an entry where no response was scored.

    Args:
        entropy: of each response `[b]`, NaN for one that was not scored.
        labels: those of the groups; empty: no entries by label.
    """
    right = arrays.reward >= right_at
    parts = {"entropy/right": arrays.known & right, "entropy/wrong": arrays.known & ~right}
    for label in dict.fromkeys(labels):
        places = [g for g, one in enumerate(labels) if one == label]
        parts[f"label/{label}/entropy_nats"] = np.isin(arrays.group, places)
    scored = {name: entropy[rows & np.isfinite(entropy)] for name, rows in parts.items()}
    return {name: float(values.mean()) for name, values in scored.items() if len(values)}


def staleness(groups: list[Group], step: int) -> dict[str, float]:
    """Returns the updates between the weights that sampled a token and those that train on it: the
    mean over generated tokens, and the maximum.
    """
    updates = np.concatenate(
        [step - r.versions[len(r.prompt.tokens) :][r.generated] for g in groups for r in g.rollouts]
    )
    return {"staleness": float(updates.mean()), "staleness_max": float(updates.max())}


def earlier_metrics(groups: Sequence[Group], places: Iterable[int]) -> dict[str, float]:
    """Returns the number of groups of earlier steps, which are at these places, and of their
    tokens.
    """
    earlier = [groups[place] for place in places]
    tokens = sum(int(x.generated.sum()) for group in earlier for x in group.rollouts)
    return {"earlier/groups": float(len(earlier)), "earlier/tokens": float(tokens)}


def sample_rows(groups: Sequence[Group], text_of: Callable[[Rollout], str]) -> list[JsonObject]:
    """Returns whole groups as rows of rollouts.jsonl."""
    return [
        {
            "prompt": group.prompt.question,
            "label": group.prompt.label,
            "answer": group.prompt.answer,
            "visit": group.prompt.visit,
            "samples": [
                {
                    **response_row(r, s, text_of),
                    "reward": s.reward,
                    "outcome": s.outcome,
                    "tokens": r.response_length,
                    "truncated": r.truncated,
                    **({"drafted": r.drafted} if r.drafted else {}),
                    **({"components": s.components} if s.components else {}),
                    **({} if s.known or not s.detail else {"error": summary(s.detail)}),
                }
                for r, s in zip(group.rollouts, group.scores, strict=True)
            ],
        }
        for group in groups
    ]


def growth_metrics(groups: Sequence[Group], config: SamplingConfig) -> dict[str, float]:
    """Returns the groups that grew, those that growth made vary, and the tokens that it
    generated.
    """
    if not config.zero_variance.grow_to:
        return {}
    first = config.group_size
    grown = [group for group in groups if len(group.rollouts) > first]
    return {
        "zero_variance/grown_groups": float(len(grown)),
        "zero_variance/grow_rescued_groups": float(
            sum(not is_uniform(group.scores) for group in grown)
        ),
        "zero_variance/grow_tokens": float(
            sum(r.sampled_length for group in grown for r in group.rollouts[first:])
        ),
    }


def round_metrics(
    chosen: Sequence[Group], dropped: Sequence[Group], last: bool, config: SamplingConfig
) -> dict[str, float]:
    """Returns the metrics of a round of dynamic sampling, or of another policy of several rounds.
    Otherwise: the groups that a policy of rl.step_policy dropped; empty without one.
    """
    tokens = sum(r.sampled_length for group in dropped for r in group.rollouts)
    if not config.zero_variance.dynamic_sampling and config.policy.most_rounds(config) == 1:
        if config.step_policy is None:
            return {}
        return {
            "rollout/dropped_groups": float(len(dropped)),
            "rollout/dropped_tokens": float(tokens),
        }
    filled = sum(not varies(group) for group in chosen)
    counts = {"filled_groups": filled} if last or filled else {}
    counts |= {
        "rounds": 1,
        "surplus_groups": sum(map(varies, dropped)),
        "dropped_groups": len(dropped),
        "dropped_tokens": tokens,
    }
    return {f"zero_variance/dynamic_{name}": float(value) for name, value in counts.items()}


def carried_metrics(buffer: ExperienceBuffer) -> dict[str, float]:
    """Returns the groups carried into the next step, and the tokens that their samples have
    so far.
    """
    waiting = [x.rollout for group in buffer.open for x in buffer.samples_of(group)]
    return {
        "rollout/carried_groups": float(len(buffer.open)),
        "rollout/carried_tokens": float(sum(r.response_length for r in waiting)),
    }
