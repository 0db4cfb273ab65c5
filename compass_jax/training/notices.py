"""Notices that a run prints once: settings without effect, and rewards that differ from their
declaration.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from compass_jax.config import (
    DataConfig,
    Objective,
    RewardConfig,
    RLConfig,
    RLRunConfig,
    RolloutConfig,
    ScalarJudgeConfig,
    ShapingConfig,
)
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
from compass_jax.experience.step_policies.screening import Screening
from compass_jax.model.quantize import kind_for
from compass_jax.records import Group, Rollout
from compass_jax.rewards.checks import gold_places, judged_sources
from compass_jax.rl.bucketing import best_buckets, padding_frac, plan
from compass_jax.rl.grouping import UNIFORM_WITHIN
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.training.learner import Learner
from compass_jax.training.rate_notices import hardly_moves

# steps whose lengths are collected; share of tokens that other buckets must save for a notice
WATCHED_STEPS, MIN_SAVED_PADDING = 4, 0.05
MIN_FLOOR_SHARE = 0.5  # share of tokens on ESPO's floor for a notice


def idle_settings(config: RLRunConfig, prompts: int, labels: int) -> list[str]:
    """Returns notices about valid settings that cannot act in this run, each with the reason and
    the remedy.

    Args:
        config: of the run, or of one of its stages.
        prompts: number of prompts in one pass over the data.
        labels: number of their different labels (data/difficulty.py).
    """
    rl, notices = config.rl, []
    if rl.replay != "off" and not config.model.moe_layers:
        notices.append(
            f"rl.replay = {rl.replay!r}: the model has no MoE layers, so there are no routes to"
            " replay; it runs as with 'off'"
        )
    if rl.updates_per_rollout == rl.epochs == 1 and _clip_matters(rl.objective):
        notices.append(
            f"rl.objective: the clip of {rl.objective.name} cannot act, because the only update of"
            " a rollout begins at the policy that it is compared with; raise rl.updates_per_rollout"
            " or rl.epochs"
        )
    if config.rollout.quantize == "auto" and _eight_bit(config.rollout) == "off":
        notices.append(
            "rollout.quantize = 'auto': no 8-bit type is known to be faster on this device; it runs"
            " as with 'off'"
        )
    mesh = config.rollout_mesh or config.mesh
    if config.rollout.slots % (shards := mesh.devices // mesh.tensor):
        notices.append(
            f"rollout.slots = {config.rollout.slots}: {shards} devices share the slots, and not"
            f" equally, so that several decode the same ones; make it a multiple of {shards}"
        )
    if gold_places(config.data) and rl.steps < rl.guard.window:
        notices.append(
            f"rl.guard.window = {rl.guard.window}: rl.steps = {rl.steps} never fill it, so that a"
            " reward that rises while the gold label falls is not seen; lower rl.guard.window"
        )
    rollouts = rl.steps * rl.prompts_per_round
    if rl.zero_variance.select and rollouts <= prompts:
        notices.append(
            f"rl.zero_variance.select: skips prompts by their earlier results, and {rollouts}"
            f" rollouts are not more than one pass over {prompts} prompts: it will skip none; raise"
            " rl.steps"
        )
    repeated = any(source.repeat > 1 for source in config.data.sources)
    if rl.drafts is not None and rollouts <= prompts and not repeated:
        notices.append(
            f"rl.drafts.name = {rl.drafts.name!r}: drafts are answers of a prompt's last visit, and"
            f" {rollouts} rollouts are not more than one pass over {prompts} prompts: no draft will"
            " be used; raise rl.steps"
        )
    if rl.zero_variance.curriculum and labels == 1:
        notices.append(
            "rl.zero_variance.curriculum: all prompts have the same label, so that only a prompt's"
            " own earlier result tells it from another; give data sources labels by task or"
            " difficulty"
        )
    return (
        notices
        + _idle_rewards(rl, config.rewards, config.data)
        + _idle_training(config)
        + idle_stages(rl)
    )


def _clip_matters(objective: Objective) -> bool:
    """Returns whether a clip without effect is likely to be a mistake. It is none for GRPO with the
    default clip, which is then the plain policy gradient.
    """
    usual = Grpo()
    clips = ("clip_low", "clip_high", "dual_clip")
    return not isinstance(objective, Grpo) or any(
        getattr(objective, name) != getattr(usual, name) for name in clips
    )


def _idle_rewards(rl: RLConfig, rewards: RewardConfig, data: DataConfig) -> list[str]:
    """Returns notices about growth, screening, replay of groups and shaping."""
    notices = []
    judged = judged_sources(data)
    if isinstance(rewards.judge, ScalarJudgeConfig) and len(judged) == len(data.sources):
        if rl.zero_variance.grow_to:
            notices.append(
                f"rl.zero_variance.grow_to = {rl.zero_variance.grow_to}: groups grow whose rewards"
                " are equal, and those of a scalar reward model never are; set it to 0"
            )
        if isinstance(rl.policy, Screening):
            notices.append(
                f"rl.step_policy.name = {rl.policy.name!r}: groups stop whose rewards are equal,"
                " and those of a scalar reward model never are; set it to none"
            )
        if rl.group_replay.acts:
            notices.append(
                f"rl.group_replay.groups = {rl.group_replay.groups}: groups are replaced whose"
                " rewards are equal, and those of a scalar reward model never are; set it to 0"
            )
    usual = ShapingConfig()
    for penalty, settings in _PENALTIES.items():
        changed = [name for name in settings if _of(rl.shaping, name) != _of(usual, name)]
        if changed and not _of(rl.shaping, penalty):
            notices.append(
                f"rl.shaping.{changed[0]} = {_of(rl.shaping, changed[0])}: rl.shaping.{penalty} is"
                " 0, so that nothing is taken off; raise it, or leave both out"
            )
    return notices


_PENALTIES = {
    "length_penalty": ("length_free_tokens",),
    "repetition_penalty": ("repetition_ngram",),
    "overlong_penalty": ("overlong_buffer_tokens",),
}


def _of(settings: ShapingConfig, name: str) -> float:
    return getattr(settings, name)


def _eight_bit(rollout: RolloutConfig) -> str:
    """Returns the 8-bit type of the rollout's weights on this device, or "off"."""
    kind = rollout.quantize
    return kind_for(jax.devices()[0].device_kind) if kind == "auto" else kind


def _idle_training(config: RLRunConfig) -> list[str]:
    """Returns notices about the correction, the warm-up and the evaluation."""
    rl, notices = config.rl, []
    exact = config.compute.dtype == config.rollout_compute.dtype == "float32"
    rounded = _eight_bit(config.rollout) != "off" or config.rollout.kv_quantize != "off"
    # Samples come from an older policy or from another temperature.
    off_policy = rl.one_step_off or rl.policy.carries or rl.zero_variance.grow_temperature != 1
    off_policy = off_policy or rl.group_replay.acts
    if rl.correction.acts and exact and not rounded and not off_policy:
        notices.append(
            f"rl.correction.name = {rl.correction.name!r}: rollout and training compute the same"
            " policy in float32, so that every weight is 1 but for rounding; it is for 8-bit or"
            " bfloat16 rollouts, rl.one_step_off, rl.partial_prompts, rl.group_replay and"
            " grow_temperature"
        )
    if rl.optim.warmup_steps >= rl.total_updates:
        notices.append(
            f"rl.optim.warmup_steps = {rl.optim.warmup_steps}: the run has {rl.total_updates}"
            " updates, so that the learning rate is never reached; lower it"
        )
    if not config.data.evaluated:
        settings = {"rl.eval_every": rl.eval_every, "evaluation.at": config.evaluation.at}
        notices += [
            f"{name} = {value}: data.eval_prompts is 0 and data.eval_sets is empty, so that there"
            " is nothing to evaluate on; raise the one or name a set"
            for name, value in settings.items()
            if value
        ]
    elif unreached := [step for step in config.evaluation.at if step > rl.steps]:
        notices.append(
            f"evaluation.at = {config.evaluation.at}: the run ends after {rl.steps} steps"
            f" (rl.steps) and never comes to {', '.join(map(str, unreached))}; leave out what lies"
            " beyond, or raise rl.steps"
        )
    return notices


def idle_stages(rl: RLConfig) -> list[str]:
    """Returns notices about stages that never begin or that change nothing."""
    notices = []
    for i, stage in enumerate(rl.stages):
        if stage.after_steps >= rl.steps:
            notices.append(
                f"rl.stages[{i}]: it begins after {stage.after_steps} steps, and the run ends after"
                f" {rl.steps} (rl.steps): it has 0 steps; raise rl.steps"
            )
        elif i and replace(rl.stages[i - 1], after_steps=stage.after_steps) == stage:
            notices.append(
                f"rl.stages[{i}]: it has the settings of the stage before it, so that nothing"
                " changes where it begins; leave it out"
            )
    return notices


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


class Notices:
    """Prints each notice once. `tell` prints a line above the progress; `printed` has the notices
    already printed in this run, and is extended; `done_steps` is the step at which the run resumes.
    """

    def __init__(
        self,
        config: RLRunConfig,
        tell: Callable[[str], None],
        printed: set[str] | None = None,
        done_steps: int = 0,
    ):
        self._config, self._tell = config, tell
        self._printed = set() if printed is None else printed
        self._lengths: list[np.ndarray] = []
        # whether a rollout's rewards were checked, and whether the run is new
        self._looked, self._begins = False, done_steps == 0
        # called by a warning about uninformative rewards if it must end the run
        self.end: Callable[[], None] | None = None
        self.ended = False

    def warn(self, text: str) -> None:
        """Prints a warning about uninformative rewards once; it may end the run."""
        self.print_of_kind(text, text)
        if self.end is not None:
            self.ended = True
            self.end()

    def print_once(self, text: str) -> None:
        """Prints a line once."""
        self.print_of_kind(text, text)

    def at_start(self, prompts: int, labels: int) -> None:
        """Prints notices about settings that cannot act with this number of prompts and labels."""
        for text in idle_settings(self._config, prompts, labels):
            self.print_once(text)

    def of_start(self, learner: Learner) -> None:
        """Prints a notice where the run's updates can hardly change the weights."""
        rl, state = self._config.rl, learner.state
        optim, lora = rl.optim, self._config.lora
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
        shares = group_shares(scores, self._config.rewards)
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
        if self._config.rl.advantage.needs_rewards_from_zero:
            self._of_negative(groups, known)
        if not self._config.rl.shaping.total:
            return out
        total, gap = self._config.rl.shaping.total, self._config.rewards.smallest_gap
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
                f"rl.advantage.name = {self._config.rl.advantage.name!r} needs rewards of at least"
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
        if not kind or kind in self._printed or (kind != NOTHING_EXTRACTED and not first):
            return
        self._printed.add(kind)
        of = "of the first rollout" if begins else "of a rollout"
        sample = sample_of(groups, text_of)
        text = silence_warning(
            kind, of, sample, len(scores), self._config.rewards, self._config.data
        )
        # A small rollout may lack variance by chance, which must not end the run.
        (self.print_once if kind == NO_GROUP_VARIES else self.warn)(text)

    def of_lengths(self, lengths: np.ndarray, rows_multiple: int = 1) -> None:
        """Collects the lengths of a step's rows (0 without a row), whose updates have equal parts
        of them. After the first few steps prints the buckets that would have padded less, if they
        save enough.

        rows_multiple: the number of devices that share the rows of a micro-batch.
        """
        rl = self._config.rl
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
        tokens = self._config.rl.micro_batch_tokens
        plans = [plan(x, buckets, tokens, rows_multiple=rows_multiple) for x in self._lengths]
        micros = [micro for batches in plans for micro in batches]
        return padding_frac(micros, np.concatenate(self._lengths))

    def of_update(self, metrics: Mapping[str, float]) -> None:
        """Prints a notice where most tokens have ESPO's narrowest clip range, if the clip
        can act.
        """
        share, rl = floor_share(metrics), self._config.rl
        if share < MIN_FLOOR_SHARE or rl.updates_per_rollout == rl.epochs == 1:
            return
        floor = getattr(rl.objective, "floor", 0.0)
        self.print_of_kind(
            "floor",
            f"about {share:.0%} of the tokens have ESPO's narrowest clip range, rl.objective.floor"
            f" = {floor:g}: their entropy is low. The floor is this project's number, not the"
            " paper's; what other values do is measured by compass calibrate-alpha",
        )

    def print_of_kind(self, kind: str, text: str) -> None:
        """Prints the first line of a kind."""
        if kind not in self._printed:
            self._printed.add(kind)
            self._tell(text)
