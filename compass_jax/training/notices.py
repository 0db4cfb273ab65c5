"""What a run says once to whoever watches: settings that do nothing here, and rewards that are not
as they were declared.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from compass_jax.config import RunConfig, ScalarJudgeConfig, ShapingConfig
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
    verdicts_in_words,
    why_lost,
)
from compass_jax.model.quantize import kind_for
from compass_jax.records import Group, Rollout
from compass_jax.rewards.checks import judged_sources
from compass_jax.rl.bucketing import best_buckets, padding_frac, plan
from compass_jax.rl.grouping import UNIFORM_WITHIN

# steps whose lengths are looked at; share of tokens that other buckets must save
WATCHED_STEPS, WORTH_SAYING = 4, 0.05
MOSTLY = 0.5  # share of tokens on ESPO's floor that is worth saying


def idle_settings(config: RunConfig, prompts: int, labels: int) -> list[str]:
    """Settings that are allowed and cannot act in this run, each with the reason and what to do.

    Args:
        config: of the run, or of one of its stages.
        prompts: how many one pass over the data gives.
        labels: different labels of theirs (data/difficulty.py).
    """
    rl, found = config.rl, []
    if rl.replay != "off" and not config.model.moe_layers:
        found.append(
            f"rl.replay = {rl.replay!r}: the model has no MoE layers, so there are no routes to"
            " replay; it runs as with 'off'"
        )
    if rl.updates_per_rollout == rl.epochs == 1:
        found.append(
            f"rl.objective: the clip of {rl.objective.name} cannot act, because the only update of"
            " a rollout begins at the policy that it is compared with; raise rl.updates_per_rollout"
            " or rl.epochs"
        )
    if config.rollout.quantize == "auto" and _eight_bit(config) == "off":
        found.append(
            "rollout.quantize = 'auto': no 8-bit type is known to be faster on this device; it runs"
            " as with 'off'"
        )
    rollouts = rl.steps * rl.prompts_per_round
    if rl.zero_variance.select and rollouts <= prompts:
        found.append(
            f"rl.zero_variance.select: skips prompts by their earlier results, and {rollouts}"
            f" rollouts are not more than one pass over {prompts} prompts: it will skip none; raise"
            " rl.steps"
        )
    if rl.zero_variance.curriculum and labels == 1:
        found.append(
            "rl.zero_variance.curriculum: all prompts have the same label, so that only a prompt's"
            " own earlier result tells it from another; give data sources labels by task or"
            " difficulty"
        )
    return found + _idle_rewards(config) + _idle_training(config) + idle_stages(config)


def _idle_rewards(config: RunConfig) -> list[str]:
    """Of growth and shaping."""
    rl, found = config.rl, []
    if rl.zero_variance.grow_to and isinstance(config.rewards.judge, ScalarJudgeConfig):
        judged = judged_sources(config.data)
        if all(i in judged for i in range(len(config.data.sources))):
            found.append(
                f"rl.zero_variance.grow_to = {rl.zero_variance.grow_to}: groups grow whose rewards"
                " are equal, and those of a scalar reward model never are; set it to 0"
            )
    usual = ShapingConfig()
    for penalty, settings in _PENALTIES.items():
        changed = [name for name in settings if _of(rl.shaping, name) != _of(usual, name)]
        if changed and not _of(rl.shaping, penalty):
            found.append(
                f"rl.shaping.{changed[0]} = {_of(rl.shaping, changed[0])}: rl.shaping.{penalty} is"
                " 0, so that nothing is taken off; raise it, or leave both out"
            )
    return found


_PENALTIES = {
    "length_penalty": ("length_free_tokens",),
    "repetition_penalty": ("repetition_ngram",),
    "overlong_penalty": ("overlong_buffer_tokens",),
}


def _of(settings: ShapingConfig, name: str) -> float:
    return getattr(settings, name)


def _eight_bit(config: RunConfig) -> str:
    """The 8-bit type of the rollout's weights on this device, or "off"."""
    kind = config.rollout.quantize
    return kind_for(jax.devices()[0].device_kind) if kind == "auto" else kind


def _idle_training(config: RunConfig) -> list[str]:
    """Of the correction, the warm-up and the evaluation."""
    rl, found = config.rl, []
    exact = config.compute.dtype == config.rollout_compute.dtype == "float32"
    rounded = _eight_bit(config) != "off" or config.rollout.kv_quantize != "off"
    # weights of an earlier policy, or a hotter one
    other = rl.one_step_off or rl.partial_prompts or rl.zero_variance.grow_temperature != 1
    if rl.correction.name != "off" and exact and not rounded and not other:
        found.append(
            f"rl.correction.name = {rl.correction.name!r}: rollout and training compute the same"
            " policy in float32, so that every weight is 1 but for rounding; it is for 8-bit or"
            " bfloat16 rollouts, rl.one_step_off, rl.partial_prompts and grow_temperature"
        )
    if rl.optim.warmup_steps >= rl.total_updates:
        found.append(
            f"rl.optim.warmup_steps = {rl.optim.warmup_steps}: the run has {rl.total_updates}"
            " updates, so that the learning rate is never reached; lower it"
        )
    if not config.data.evaluated:
        asked = {"rl.eval_every": rl.eval_every, "evaluation.at": config.evaluation.at}
        found += [
            f"{name} = {value}: data.eval_prompts is 0 and data.eval_sets is empty, so that there"
            " is nothing to evaluate on; raise the one or name a set"
            for name, value in asked.items()
            if value
        ]
    elif late := [step for step in config.evaluation.at if step > rl.steps]:
        found.append(
            f"evaluation.at = {config.evaluation.at}: the run ends after {rl.steps} steps"
            f" (rl.steps) and never comes to {', '.join(map(str, late))}; leave out what lies"
            " beyond, or raise rl.steps"
        )
    return found


def idle_stages(config: RunConfig) -> list[str]:
    """Of the stages of a run: those that never begin, or that change nothing."""
    rl, found = config.rl, []
    for i, stage in enumerate(rl.stages):
        if stage.after_steps >= rl.steps:
            found.append(
                f"rl.stages[{i}]: it begins after {stage.after_steps} steps, and the run ends after"
                f" {rl.steps} (rl.steps): it has 0 steps; raise rl.steps"
            )
        elif i and replace(rl.stages[i - 1], after_steps=stage.after_steps) == stage:
            found.append(
                f"rl.stages[{i}]: it has the settings of the stage before it, so that nothing"
                " changes where it begins; leave it out"
            )
    return found


def gap_violation(rewards: Sequence[float], smallest_gap: float) -> tuple[float, float] | None:
    """The first two neighbouring rewards that differ by less than `smallest_gap`, unless they count
    as equal (1e-6).
    """
    ordered = np.sort(np.asarray(rewards, np.float64))
    gaps = np.diff(ordered)
    bad = np.flatnonzero((gaps > UNIFORM_WITHIN) & (gaps < smallest_gap - 1e-6))
    return (float(ordered[bad[0]]), float(ordered[bad[0] + 1])) if bad.size else None


def floor_share(metrics: Mapping[str, float]) -> float:
    """The share of the tokens whose clip range is ESPO's floor, as a step's metrics say it: each
    group's share of the tokens, times the responses in which the floor is its range.
    """
    found = 0.0
    for i in itertools.count():
        if f"espo/group_{i}/floor_frac" not in metrics:
            break
        share = metrics.get(f"espo/group_{i}/token_frac", 1.0)
        found += share * metrics[f"espo/group_{i}/floor_frac"]
    return found


class Notices:
    """Says each thing once. `tell` prints a line above the progress; `said` is what was told before
    in this run, and grows; `done_steps` is where the run goes on.
    """

    def __init__(
        self,
        config: RunConfig,
        tell: Callable[[str], None],
        said: set[str] | None = None,
        done_steps: int = 0,
    ):
        self._config, self._tell = config, tell
        self._said = set() if said is None else said
        self._lengths: list[np.ndarray] = []
        self._looked, self._begins = False, done_steps == 0  # looked at a rollout's rewards
        # what a warning of silent rewards calls, where the run is to end over it
        self.end: Callable[[], None] | None = None
        self.ended = False

    def warn(self, text: str) -> None:
        """Says a warning of silent rewards, unless it was said before; the run may end over it."""
        self._once(text, text)
        if self.end is not None:
            self.ended = True
            self.end()

    def once(self, text: str) -> None:
        """Says a line, unless it was said before."""
        self._once(text, text)

    def at_start(self, prompts: int, labels: int) -> None:
        """Settings that cannot act over a pass of so many prompts with so many different labels."""
        for text in idle_settings(self._config, prompts, labels):
            self.once(text)

    def of_groups(self, groups: Sequence[Group]) -> dict[str, float]:
        """Counts of one step's groups that are not as declared.

        reward/unverified_groups    no verifier gave an answer: advantage 0, weight 0, in no
                                    denominator
        reward/gap_violations       with shaping: two rewards differ by less than
                                    rewards.smallest_gap, or, where that is not set, than the
                                    penalties' sum, so that a penalty may turn them around
        reward/extracted_frac       responses in which an answer was found, of those judged
        groups/<kind>_frac          groups of each kind (experience/judged.py); they sum to 1
        """
        known = [[s.reward for s in group.scores if s.known] for group in groups]
        scores = [group.scores for group in groups]
        shares = group_shares(scores, self._config.rewards)
        out = {
            "reward/unverified_groups": float(sum(not rewards for rewards in known)),
            "reward/extracted_frac": extracted_frac([s for of in scores for s in of]),
            **{f"groups/{kind}_frac": share for kind, share in shares.items()},
        }
        if not any(known):
            outcomes = Counter(s.outcome for group in groups for s in group.scores)
            self._once(
                "unverified",
                f"no verifier gave a reward in a whole step ({counts_in_words(outcomes)}): nothing"
                f" was trained on{why_lost([s for group in groups for s in group.scores])}",
            )
        if not self._config.rl.shaping.total:
            return out
        total, gap = self._config.rl.shaping.total, self._config.rewards.smallest_gap
        found = [
            (group.prompt.question, pair)
            for group, rewards in zip(groups, known)
            if (pair := gap_violation(rewards, total if gap is None else gap))
        ]
        if found:
            question, (low, high) = found[0]
            relied_on, advice = f"the penalties of rl.shaping sum to {total:g}", "lower them"
            if gap is not None:
                relied_on = f"rewards.smallest_gap = {gap}"
                advice = "set it to the smallest difference that the verifier gives"
            self._once(
                "gap",
                f"{relied_on}, but answers to one prompt got {low:g} and {high:g}"
                f" ({question!r:.60}): a penalty of rl.shaping may put the better below the other;"
                f" {advice} (counted in reward/gap_violations)",
            )
        return out | {"reward/gap_violations": float(len(found))}

    def of_rewards(self, groups: Sequence[Group], text_of: Callable[[Rollout], str]) -> None:
        """Says what kinds of groups a run's first rollout gave, and warns, with a sample, where no
        answer was found in any response, or where the first rollout since the start or resumption
        is all wrong, all right, or without a group whose rewards differ.
        """
        first, self._looked = not self._looked, True
        begins = first and self._begins
        rewards = self._config.rewards
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
        if not kind or kind in self._said or (kind != NOTHING_EXTRACTED and not first):
            return
        self._said.add(kind)
        of = "of the first rollout" if begins else "of a rollout"
        sample = sample_of(groups, text_of)
        text = silence_warning(kind, of, sample, len(scores), self._config)
        # a small rollout may be without variance by chance, which is no reason to end a run
        (self.once if kind == NO_GROUP_VARIES else self.warn)(text)

    def of_lengths(self, lengths: np.ndarray) -> None:
        """Lengths of one step's rows, 0 for none. After the first few steps: which buckets would
        have padded less, where it is worth it.
        """
        if "buckets" in self._said:
            return
        self._lengths.append(lengths[lengths > 0])
        if len(self._lengths) < WATCHED_STEPS:
            return
        rl = self._config.rl
        better = best_buckets(np.concatenate(self._lengths), len(rl.buckets), rl.buckets[-1])
        now, then = (
            np.mean([padding_frac(plan(x, b, rl.micro_batch_tokens), x) for x in self._lengths])
            for b in (rl.buckets, better)
        )
        if now - then >= WORTH_SAYING:
            self._tell(
                f"{now:.0%} of the training tokens were padding in {WATCHED_STEPS} steps;"
                f" rl.buckets {better} would have made it {then:.0%}"
            )
        self._said.add("buckets")
        self._lengths.clear()

    def of_update(self, metrics: Mapping[str, float]) -> None:
        """Says where most of the tokens have ESPO's narrowest clip range, if the clip can act."""
        share, rl = floor_share(metrics), self._config.rl
        if share < MOSTLY or rl.updates_per_rollout == rl.epochs == 1:
            return
        floor = getattr(rl.objective, "floor", 0.0)
        self._once(
            "floor",
            f"about {share:.0%} of the tokens have ESPO's narrowest clip range, rl.objective.floor"
            f" = {floor:g}: their entropy is low. The floor is this project's number, not the"
            " paper's; what other values do is measured by compass calibrate-alpha",
        )

    def _once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._tell(text)
