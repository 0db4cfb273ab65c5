"""A whole run: the settings of every component, and the checks between components.

`RunConfig` inherits the settings of each kind of run (a policy, its scored answers, SFT,
evaluation, RL), so that a function can declare which of them it reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

from compass_jax.config import named
from compass_jax.config.data import EvalConfig
from compass_jax.config.errors import ConfigError, check
from compass_jax.config.judge import EngineJudgeConfig, ScalarJudgeConfig
from compass_jax.config.learner import LearnerConfig
from compass_jax.config.log import LogConfig
from compass_jax.config.policy import PolicyConfig
from compass_jax.config.ranges import Count, CountOrOff, Name, describe_value
from compass_jax.config.rewards import RewardConfig
from compass_jax.config.rl_stage import RLStage
from compass_jax.config.sft import SFTConfig
from compass_jax.config.training import RLConfig
from compass_jax.config.verifiers import below_zero, check_rewards, smallest_gap

TRACKERS = ("tensorboard", "wandb", "trackio")  # of this package


@dataclass(frozen=True)
class ScoredConfig(PolicyConfig):
    """A policy whose answers are scored."""

    rewards: RewardConfig = field(default_factory=RewardConfig)
    """Verifiers of answers."""

    def _check(self, key: str) -> None:
        super()._check(key)
        judge = self.rewards.judge
        if isinstance(judge, ScalarJudgeConfig):
            check(
                judge.buckets[-1] <= self.model.max_positions,
                f"rewards.judge.buckets end at {judge.buckets[-1]} tokens and exceed"
                f" model.max_positions = {self.model.max_positions}",
            )
        if not isinstance(judge, EngineJudgeConfig):
            return
        bucket = self.rollout.cache_bucket
        longest = -(-(judge.prompt_buckets[-1] + judge.max_tokens) // bucket) * bucket
        check(
            longest <= self.model.max_positions,
            f"rewards.judge.prompt_buckets + max_tokens = {longest} tokens exceed"
            f" model.max_positions = {self.model.max_positions}",
        )
        check(
            not (judge.weights and self.rollout_apart),
            f"rewards.judge.weights = {judge.weights!r:.200} with rollout_apart: the judge would"
            " have the training's devices; serve it and name its endpoint",
        )


@dataclass(frozen=True)
class SFTRunConfig(ScoredConfig):
    """The settings that SFT reads."""

    sft: SFTConfig = field(default_factory=SFTConfig)
    """Supervised fine-tuning on conversations."""

    def _check(self, key: str) -> None:
        super()._check(key)
        check(
            not self.sft.packing or self.mesh.context == 1,
            f"sft.packing with mesh.context = {self.mesh.context}: conversations that share a row"
            " are not told apart where its tokens are split over devices; set mesh.context to 1"
            " and give its devices to mesh.fsdp, or set sft.packing to False",
        )


@dataclass(frozen=True)
class EvalRunConfig(ScoredConfig):
    """The settings that an evaluation reads."""

    evaluation: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on held-out prompts."""


@dataclass(frozen=True)
class RLRunConfig(EvalRunConfig):
    """The settings that RL reads."""

    rl: RLConfig = field(default_factory=RLConfig)
    """Reinforcement learning."""

    @property
    def learner(self) -> LearnerConfig:
        """The settings of the learner."""
        return LearnerConfig(
            self.rl.algorithm,
            self.rl.updates,
            self.rl.sampling,
            self.rollout,
            self.rewards,
            self.lora,
            self.seed,
            self.data.labelled,
        )

    def _check(self, key: str) -> None:
        super()._check(key)
        if isinstance(self.rewards.judge, ScalarJudgeConfig):
            self._check_scalar_judge()
        check(
            not self.rl.one_step_off
            or self.rollout_apart
            or self.samplers.acts
            or self.mesh.devices == 1,
            f"rl.one_step_off on one mesh of {self.mesh.devices} devices: rollout and training"
            " would start programs from two threads, which can hang in their collectives; set"
            " rollout_apart, or samplers",
        )
        check(
            not self.samplers.acts or self.rl.drafts is None,
            "rl.drafts with samplers: drafts are scored by the run's own engine; leave out one of"
            " the two",
        )
        check(
            self.samplers.lockstep or self.rl.one_step_off,
            "samplers.lockstep = False without rl.one_step_off: no rollout would run while the"
            " weights change; set rl.one_step_off, or leave lockstep on",
        )
        check(
            not self.samplers.acts or not isinstance(self.rewards.judge, EngineJudgeConfig),
            "samplers with a judge on the rollout's engine: the training has no engine; serve the"
            " judge and name its endpoint (JudgeConfig)",
        )
        check(
            not self.rl.packed_row_tokens or self.mesh.context == 1,
            f"rl.packed_row_tokens with mesh.context = {self.mesh.context}: sequences that share a"
            " row are not told apart where its tokens are split over devices; set mesh.context to 1"
            " and give its devices to mesh.fsdp, or set rl.packed_row_tokens to 0",
        )

    def _check_scalar_judge(self) -> None:
        check(
            not self.rl.one_step_off or self.mesh.devices == 1,
            f"rl.one_step_off with a scalar reward model on a mesh of {self.mesh.devices} devices:"
            " rewards and training would start programs from two threads, which can hang in their"
            " collectives; use one device for the training, or leave one of the two out",
        )
        check(
            not self.rl.shaping.total or self.rewards.smallest_gap is not None,
            "rl.shaping with a scalar reward model: two of its rewards can be as close as they"
            " like, and a penalty could put the better answer below the other; set rl.shaping's"
            " penalties to 0, or say in rewards.smallest_gap from which difference on they differ",
        )

    def validate_for_rl(self) -> Self:
        """Validates the run and the requirements of RL: an untruncated sampler (algorithms section
        0) and buckets that fit every rollout.
        """
        self.validate()
        r = self.rollout
        check(
            r.top_k == 0 and r.top_p == 1.0,
            f"rollout.top_k = {r.top_k}, top_p = {r.top_p}: RL trains the untruncated distribution;"
            " set 0 and 1",
        )
        check(
            r.temperature > 0,
            f"rollout.temperature = {r.temperature}: RL samples; it must be positive",
        )
        for name, what in (
            ("quantize", "other weights than those that are trained"),
            ("kv_quantize", "rounded keys and values"),
        ):
            kind = getattr(r, name)
            check(
                kind == "off" or self.rl.correction.acts,
                f"rollout.{name} = {kind!r} samples from {what}: set rl.correction to 'tis',"
                f" 'icepop' or 'sequence', or rollout.{name} to 'off'",
            )
        longest = r.prompt_buckets[-1] + r.max_new_tokens
        check(
            self.rl.buckets[-1] >= longest,
            f"rl.buckets end at {self.rl.buckets[-1]} tokens, a rollout may have {longest}"
            " (rollout.prompt_buckets[-1] + max_new_tokens)",
        )
        shaping = self.rl.shaping
        sources = self.data.keyed_sources()
        training = sources[: len(self.data.sources)]
        if self.rl.advantage.needs_rewards_from_zero:
            where = below_zero(training, self.rewards, shaping.overlong_penalty)
            check(
                not where,
                f"rl.advantage.name = {self.rl.advantage.name!r} needs rewards of at least 0, and"
                f" {where}: take another advantage, such as rloo, or change that",
            )
        if shaping.total:
            gap, where = smallest_gap(training, self.rewards)
            check(
                shaping.total < gap,
                f"rl.shaping: the penalties sum to {shaping.total}, which is not below {gap:g}, the"
                f" smallest difference between two rewards ({where}): a right answer could end"
                " below a wrong one; lower the penalties",
            )
        check_rewards(sources, self.rewards, shaping.total)
        for name in ("length_free_tokens", "overlong_buffer_tokens"):
            tokens = getattr(shaping, name)
            check(
                tokens <= r.max_new_tokens,
                f"rl.shaping.{name} = {tokens} exceeds rollout.max_new_tokens = {r.max_new_tokens}",
            )
        for penalty, setting in (
            ("length_penalty", "length_free_tokens"),
            ("repetition_penalty", "repetition_ngram"),
        ):
            tokens = getattr(shaping, setting)
            check(
                not getattr(shaping, penalty) or tokens < r.max_new_tokens,
                f"rl.shaping.{setting} = {tokens} is not below rollout.max_new_tokens ="
                f" {r.max_new_tokens}: rl.shaping.{penalty} could never act",
            )
        check(bool(self.data.sources), "data.sources is empty: RL needs prompts")
        self._check_stages_alone()
        return self

    def of_stage(self, stage: RLStage) -> Self:
        """Returns the run's settings with those of one stage applied, without stages."""
        rl, rollout = self.rl, self.rollout
        rate = rl.optim.learning_rate if stage.learning_rate is None else stage.learning_rate
        return replace(
            self,
            rollout=replace(rollout, max_new_tokens=stage.max_new_tokens or rollout.max_new_tokens),
            rl=replace(
                rl,
                stages=(),
                group_size=stage.group_size or rl.group_size,
                objective=stage.objective or rl.objective,
                optim=replace(rl.optim, learning_rate=rate),
            ),
        )

    def _check_stages_alone(self) -> None:
        """Raises ConfigError, naming the stage, if a stage's settings make an invalid run."""
        for i, stage in enumerate(self.rl.stages):
            try:
                self.of_stage(stage).validate_for_rl()
            except ConfigError as error:
                raise ConfigError(f"rl.stages[{i}] = {describe_value(stage)}: {error}") from error


@dataclass(frozen=True)
class RunConfig(RLRunConfig, SFTRunConfig):
    """A whole run: the settings of all its components."""

    log: LogConfig = field(default_factory=LogConfig)
    """Logged samples."""
    keep_checkpoints: Count = 2
    """Number of checkpoints that are kept, the newest ones."""
    show_samples_every: CountOrOff = 10
    """Interval in steps of the table of samples on the screen; 0: never."""
    callbacks: tuple[Name, ...] = ()
    """Functions, as module:function or file.py:function, that are called after each RL step with
    (step, groups, metrics).
    """
    trackers: tuple[Name, ...] = ("tensorboard",)
    """Trackers that receive the metrics besides metrics.jsonl: tensorboard, wandb, trackio, or a
    function of yours as module:function or file.py:function (docs/trackers.md); none: metrics.jsonl
    alone.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("callbacks", "trackers"):
            names = getattr(self, name)
            if isinstance(names, list | tuple):  # `validate` refuses another type
                object.__setattr__(self, name, tuple(map(named.absolute, names)))

    def _check(self, key: str) -> None:
        for callback in self.callbacks:
            named.check_name(callback, "callbacks", "'my_code.py:after_step'")
        for i, tracker in enumerate(self.trackers):
            check(
                tracker in TRACKERS or named.is_name(tracker),
                f"trackers[{i}] = {tracker!r:.200}: must be one of {', '.join(TRACKERS)}, or a"
                " function of yours as module:function or file.py:function",
            )
        super()._check(key)
