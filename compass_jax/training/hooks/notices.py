"""Notices that a run prints once: settings without effect, and rewards that differ from their
declaration.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from compass_jax.base.records import Group, Rollout
from compass_jax.config import PolicyConfig, RLConfig, ScoredConfig
from compass_jax.experience.judged import (
    NO_GROUP_VARIES,
    NOTHING_EXTRACTED,
    counts_in_words,
    extracted_frac,
    group_shares,
    no_advantage,
    sample_of,
    silence,
    silence_warning,
    unknown_reasons,
    verdicts_in_words,
)
from compass_jax.rl.bucketing import best_buckets, padding_frac, plan
from compass_jax.rl.grouping import UNIFORM_WITHIN
from compass_jax.training.hooks.base import Hook, StepRecord
from compass_jax.training.idle_settings import idle_settings
from compass_jax.training.learner import Learner
from compass_jax.training.rate_notices import hardly_moves

# steps whose lengths are collected; share of tokens that other buckets must save for a notice
WATCHED_STEPS, MIN_SAVED_PADDING = 4, 0.05
MIN_FLOOR_SHARE = 0.5  # share of tokens on ESPO's floor for a notice


def gap_violation(rewards: Sequence[float], smallest_gap: float) -> tuple[float, float] | None:
    """Returns the first two neighbouring rewards that differ by less than `smallest_gap` without
    being equal (within 1e-6), or None.
    """
    ordered = np.sort(np.asarray(rewards, np.float64))
    gaps = np.diff(ordered)
    bad = np.flatnonzero((gaps > UNIFORM_WITHIN) & (gaps < smallest_gap - 1e-6))
    return (float(ordered[bad[0]]), float(ordered[bad[0] + 1])) if bad.size else None


def floor_share(metrics: Mapping[str, float]) -> float:
    """Returns the share of tokens whose clip range is ESPO's floor, from a step's metrics: each
    group's share of tokens times the share of responses in which the floor is its range.
    """
    total = 0.0
    for i in itertools.count():
        if f"espo/group_{i}/floor_frac" not in metrics:
            break
        share = metrics.get(f"espo/group_{i}/token_frac", 1.0)
        total += share * metrics[f"espo/group_{i}/floor_frac"]
    return total


class Notices(Hook):
    """Prints each notice once. `tell` prints a line above the progress; `printed` has the notices
    already printed in this run, and is extended; `done_steps` is the step at which the run resumes;
    `text_of` returns a response as text; `rows_multiple` is the number of devices that share the
    rows of a micro-batch.
    """

    name = "notices"

    def __init__(
        self,
        rl: RLConfig,
        policy: PolicyConfig,
        scored: ScoredConfig,
        tell: Callable[[str], None],
        printed: set[str] | None = None,
        done_steps: int = 0,
        text_of: Callable[[Rollout], str] = str,
        rows_multiple: int = 1,
    ):
        self._rl, self._policy, self._scored, self._tell = rl, policy, scored, tell
        self._text_of, self._rows_multiple = text_of, rows_multiple
        self._printed = set() if printed is None else printed
        self._lengths: list[np.ndarray] = []
        # whether a rollout's rewards were checked, and whether the run is new
        self._looked, self._begins = False, done_steps == 0
        # called by a warning about uninformative rewards if it must end the run
        self.end: Callable[[], None] | None = None

    def on_groups(self, step: StepRecord) -> None:
        """Prints notices on the rewards, and adds counts of the groups to the metrics."""
        self.of_rewards(step.groups, self._text_of)
        step.metrics |= self.of_groups(step.groups)

    def on_arrays(self, step: StepRecord) -> None:
        """Collects the lengths of the step's rows."""
        self.of_lengths(step.filled.lengths, self._rows_multiple)

    def on_metrics(self, step: StepRecord) -> None:
        """Prints a notice on the clip."""
        self.of_update(step.metrics)

    def warn(self, text: str) -> None:
        """Prints a warning about uninformative rewards once; it may end the run."""
        self.print_of_kind(text, text)
        if self.end is not None:
            self.end()

    def print_once(self, text: str) -> None:
        """Prints a line once."""
        self.print_of_kind(text, text)

    def at_start(self, prompts: int, labels: int) -> None:
        """Prints notices about settings that cannot act with this number of prompts and labels."""
        for text in idle_settings(self._rl, self._policy, self._scored, prompts, labels):
            self.print_once(text)

    def of_start(self, learner: Learner) -> None:
        """Prints a notice where the run's updates can hardly change the weights."""
        rl, state = self._rl, learner.state
        optim, lora = rl.optim, self._policy.lora
        text = hardly_moves(optim, rl.total_updates, state.params, lora, learner.frozen)
        if text:
            self.print_once(text)

    def of_groups(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns counts of a step's groups that differ from their declaration.

        reward/unverified_groups    groups without a known reward: advantage 0, weight 0, in no
                                    denominator
        reward/gap_violations       with shaping: pairs of rewards that differ by less than
                                    rewards.smallest_gap, or, without it, than the penalties' sum,
                                    so that a penalty may reverse them
        reward/extracted_frac       share of judged responses with an answer
        groups/<kind>_frac          share of groups of each kind (experience/judged.py); they sum
                                    to 1
        """
        known = [[s.reward for s in group.scores if s.known] for group in groups]
        scores = [group.scores for group in groups]
        shares = group_shares(scores, self._scored.rewards)
        out = {
            "reward/unverified_groups": float(sum(not rewards for rewards in known)),
            "reward/extracted_frac": extracted_frac([s for of in scores for s in of]),
            **{f"groups/{kind}_frac": share for kind, share in shares.items()},
        }
        if not any(known):
            outcomes = Counter(s.outcome for group in groups for s in group.scores)
            self.print_of_kind(
                "unverified",
                f"no verifier gave a reward in a whole step ({counts_in_words(outcomes)}): nothing"
                f" was trained on{unknown_reasons([s for group in groups for s in group.scores])}",
            )
        if self._rl.advantage.needs_rewards_from_zero:
            self._of_negative(groups, known)
        if not self._rl.shaping.total:
            return out
        total, gap = self._rl.shaping.total, self._scored.rewards.smallest_gap
        violations = [
            (group.prompt.question, pair)
            for group, rewards in zip(groups, known)
            if (pair := gap_violation(rewards, total if gap is None else gap))
        ]
        if violations:
            question, (low, high) = violations[0]
            relied_on, advice = f"the penalties of rl.shaping sum to {total:g}", "lower them"
            if gap is not None:
                relied_on = f"rewards.smallest_gap = {gap}"
                advice = "set it to the smallest difference that the verifier gives"
            self.print_of_kind(
                "gap",
                f"{relied_on}, but answers to one prompt got {low:g} and {high:g}"
                f" ({question!r:.60}): a penalty of rl.shaping may put the better below the other;"
                f" {advice} (counted in reward/gap_violations)",
            )
        return out | {"reward/gap_violations": float(len(violations))}

    def _of_negative(self, groups: Sequence[Group], known: Sequence[Sequence[float]]) -> None:
        """Prints a notice of rewards below 0, of which the advantage makes nothing."""
        lows = [min(rewards, default=0.0) for rewards in known]
        worst = int(np.argmin(lows)) if lows else 0
        if lows and lows[worst] < -UNIFORM_WITHIN:
            self.print_of_kind(
                "negative",
                f"rl.advantage.name = {self._rl.advantage.name!r} needs rewards of at least"
                f" 0, and an answer got {lows[worst]:g} ({groups[worst].prompt.question!r:.60}):"
                " groups with such a reward have no advantage; take another advantage, such as"
                " rloo, or return rewards of at least 0",
            )

    def of_rewards(self, groups: Sequence[Group], text_of: Callable[[Rollout], str]) -> None:
        """Prints the kinds of groups of a run's first rollout. Warns, with a sample, where no
        response has an answer, or where the first rollout since the start or resumption is all
        wrong, all right, or without a group whose rewards differ.
        """
        first, self._looked = not self._looked, True
        begins = first and self._begins
        rewards = self._scored.rewards
        by_group = [group.scores for group in groups]
        scores = [s for of_group in by_group for s in of_group]
        if begins:
            kinds = group_shares(by_group, rewards)
            parts = [f"{n * len(groups):.0f} {kind.replace('_', ' ')}" for kind, n in kinds.items()]
            self._tell(
                f"first rollout: {len(groups)} groups: {', '.join(parts)};"
                f" {verdicts_in_words(scores)}"
            )
        kind = silence(scores, rewards) or no_advantage(by_group, rewards)
        if not kind or kind in self._printed or (kind != NOTHING_EXTRACTED and not first):
            return
        self._printed.add(kind)
        of = "of the first rollout" if begins else "of a rollout"
        sample = sample_of(groups, text_of)
        text = silence_warning(kind, of, sample, scores, rewards, self._scored.data)
        # A small rollout may lack variance by chance, which must not end the run.
        (self.print_once if kind == NO_GROUP_VARIES else self.warn)(text)

    def of_lengths(self, lengths: np.ndarray, rows_multiple: int = 1) -> None:
        """Collects the lengths of a step's rows (0 without a row), whose updates have equal parts
        of them. After the first few steps prints the buckets that would have padded less, if they
        save enough.

        rows_multiple: the number of devices that share the rows of a micro-batch.
        """
        rl = self._rl
        if "buckets" in self._printed or rl.packed_row_tokens:
            return
        parts = np.array_split(lengths, rl.updates_per_rollout)
        self._lengths += [part[part > 0] for part in parts]
        if len(self._lengths) < WATCHED_STEPS * rl.updates_per_rollout:
            return
        better = best_buckets(np.concatenate(self._lengths), len(rl.buckets), rl.buckets[-1])
        now, then = (self._padding_frac(buckets, rows_multiple) for buckets in (rl.buckets, better))
        if now - then >= MIN_SAVED_PADDING:
            self._tell(
                f"{now:.0%} of the training tokens were padding in {WATCHED_STEPS} steps;"
                f" rl.buckets {better} would have made it {then:.0%}"
            )
        self._printed.add("buckets")
        self._lengths.clear()

    def _padding_frac(self, buckets: Sequence[int], rows_multiple: int) -> float:
        """Returns the share of padding in the updates' micro-batches."""
        tokens = self._rl.micro_batch_tokens
        plans = [plan(x, buckets, tokens, rows_multiple=rows_multiple) for x in self._lengths]
        micros = [micro for batches in plans for micro in batches]
        return padding_frac(micros, np.concatenate(self._lengths))

    def of_update(self, metrics: Mapping[str, float]) -> None:
        """Prints a notice where most tokens have ESPO's narrowest clip range, if the clip
        can act.
        """
        share, rl = floor_share(metrics), self._rl
        if share < MIN_FLOOR_SHARE or rl.updates_per_rollout == rl.epochs == 1:
            return
        floor = getattr(rl.objective, "floor", 0.0)
        self.print_of_kind(
            "floor",
            f"about {share:.0%} of the tokens have ESPO's narrowest clip range, rl.objective.floor"
            f" = {floor:g}: their entropy is low. The floor is this project's number, not the"
            " paper's; what other values do is measured by benchmarks/calibrate_alpha.py",
        )

    def print_of_kind(self, kind: str, text: str) -> None:
        """Prints the first line of a kind."""
        if kind not in self._printed:
            self._printed.add(kind)
            self._tell(text)
