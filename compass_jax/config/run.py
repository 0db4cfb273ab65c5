"""A whole run: the settings of every component, and the checks between components."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Self

from compass_jax.config.curriculum import of_stage
from compass_jax.config.data import DataConfig, EvalConfig, RolloutConfig
from compass_jax.config.errors import ConfigError, check
from compass_jax.config.judge import EngineJudgeConfig, ScalarJudgeConfig
from compass_jax.config.learner import LearnerConfig
from compass_jax.config.log import LogConfig
from compass_jax.config.lora import LoRAConfig
from compass_jax.config.mesh import MeshConfig
from compass_jax.config.model import ComputeConfig, ModelConfig
from compass_jax.config.named import check_name, is_name
from compass_jax.config.policy import PolicyConfig
from compass_jax.config.ranges import Count, CountOrOff, Name, Range, Section, describe_value
from compass_jax.config.rewards import RewardConfig
from compass_jax.config.samplers import SamplersConfig
from compass_jax.config.scored import ScoredConfig
from compass_jax.config.sft import SFTConfig
from compass_jax.config.training import RLConfig
from compass_jax.config.verifiers import below_zero, check_rewards, smallest_gap

TRACKERS = ("tensorboard", "wandb", "trackio")  # of this package


@dataclass(frozen=True)
class RunConfig(Section):
    """A whole run: the settings of all its components.

    `policy`, `scored` and `learner` are the settings that one consumer reads, so that a function
    can take no more than it needs.
    """

    CODE: ClassVar[tuple[str, ...]] = ("callbacks", "trackers")

    name: str
    """Name of the run and of its folder under runs/."""
    model: ModelConfig
    """The sizes of the model that is trained, in the terms of its Hugging Face config."""
    run_dir: str = ""
    """Run directory; empty: runs/NAME (`sft` and `train`: runs/NAME/sft and runs/NAME/rl)."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Seed of every random draw of the run (a number)."""
    init_from: str = ""
    """Initial weights: a Hugging Face folder or checkpoint; empty: random weights."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Low-rank adapters, which are trained instead of the model's weights."""
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    """Computation of the model: types, rematerialisation, kernels."""
    mesh: MeshConfig = field(default_factory=MeshConfig)
    """Mesh of the training: devices along each axis."""
    rollout_mesh: MeshConfig | None = None
    """Mesh of the rollout: devices along each axis; None: the training's mesh."""
    rollout_apart: bool = False
    """Disaggregated rollout on separate devices, numbered after the training's; with
    rl.one_step_off both run at once.
    """
    samplers: SamplersConfig = field(default_factory=SamplersConfig)
    """Disaggregated rollout of RL over hosts: samplers in other processes, each with the devices of
    rollout_mesh.
    """
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Sampling of answers."""
    data: DataConfig = field(default_factory=DataConfig)
    """Prompts of training and evaluation."""
    rewards: RewardConfig = field(default_factory=RewardConfig)
    """Verifiers of answers."""
    sft: SFTConfig = field(default_factory=SFTConfig)
    """Supervised fine-tuning on conversations."""
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    """Evaluation on held-out prompts."""
    rl: RLConfig = field(default_factory=RLConfig)
    """Reinforcement learning."""
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

    @property
    def directory(self) -> str:
        """The run directory."""
        return self.run_dir or f"runs/{self.name}"

    @property
    def policy(self) -> PolicyConfig:
        """The model, its devices and its sampler."""
        return self.part(PolicyConfig)

    @property
    def scored(self) -> ScoredConfig:
        """Prompts, sampling and verdicts."""
        return self.part(ScoredConfig)

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
        check(bool(self.name), "name is empty: give the run a name")
        check(
            "://" not in self.run_dir,
            f"run_dir = {self.run_dir!r}: must be a path; mount the bucket (gcsfuse; launch/ does"
            " it with --bucket) and name the mount's folder",
        )
        _check_code(self.callbacks, self.trackers)
        super()._check(key)
        check(
            not self.lora.acts or bool(self.init_from),
            f"lora.rank = {self.lora.rank}: adapters need a base, and init_from is empty: name the"
            " model whose weights stay",
        )
        policy = self.policy
        policy.check_agreement()
        _check_judge(self.rewards, policy)
        for name, packs in (
            ("sft.packing", self.sft.packing),
            ("rl.packed_row_tokens", self.rl.packed_row_tokens > 0),
        ):
            check(
                not packs or self.mesh.context == 1,
                f"{name} with mesh.context = {self.mesh.context}: sequences that share a row are"
                " not told apart where its tokens are split over devices; set mesh.context to 1"
                f" and give its devices to mesh.fsdp, or switch {name} off",
            )
        _check_places(self.rl, policy, self.rewards)

    def validate_for_rl(self) -> Self:
        """Validates the run and the requirements of RL: an untruncated sampler (algorithms section
        0) and buckets that fit every rollout.
        """
        self.validate()
        _check_sampler(self.rollout, self.rl)
        _check_shaping(self.rl, self.scored)
        check(bool(self.data.sources), "data.sources is empty: RL needs prompts")
        for i, stage in enumerate(self.rl.stages):
            rl, rollout = of_stage(self.rl, self.rollout, stage)
            try:
                replace(self, rl=rl, rollout=rollout).validate_for_rl()
            except ConfigError as error:
                raise ConfigError(f"rl.stages[{i}] = {describe_value(stage)}: {error}") from error
        return self


def _check_code(callbacks: tuple[str, ...], trackers: tuple[str, ...]) -> None:
    for callback in callbacks:
        check_name(callback, "callbacks", "'my_code.py:after_step'")
    for i, tracker in enumerate(trackers):
        check(
            tracker in TRACKERS or is_name(tracker),
            f"trackers[{i}] = {tracker!r:.200}: must be one of {', '.join(TRACKERS)}, or a"
            " function of yours as module:function or file.py:function",
        )


def _check_judge(rewards: RewardConfig, policy: PolicyConfig) -> None:
    judge, positions = rewards.judge, policy.model.max_positions
    if isinstance(judge, ScalarJudgeConfig):
        check(
            judge.buckets[-1] <= positions,
            f"rewards.judge.buckets end at {judge.buckets[-1]} tokens and exceed"
            f" model.max_positions = {positions}",
        )
    if not isinstance(judge, EngineJudgeConfig):
        return
    bucket = policy.rollout.cache_bucket
    longest = -(-(judge.prompt_buckets[-1] + judge.max_tokens) // bucket) * bucket
    check(
        longest <= positions,
        f"rewards.judge.prompt_buckets + max_tokens = {longest} tokens exceed"
        f" model.max_positions = {positions}",
    )
    check(
        not (judge.weights and policy.rollout_apart),
        f"rewards.judge.weights = {judge.weights!r:.200} with rollout_apart: the judge would"
        " have the training's devices; serve it and name its endpoint",
    )


def _check_places(rl: RLConfig, policy: PolicyConfig, rewards: RewardConfig) -> None:
    """Raises ConfigError for programs of RL that would meet on the same devices."""
    samplers, devices = policy.samplers, policy.mesh.devices
    if isinstance(rewards.judge, ScalarJudgeConfig):
        _check_scalar_judge(rl, devices, rewards)
    check(
        not rl.one_step_off or policy.rollout_apart or samplers.acts or devices == 1,
        f"rl.one_step_off on one mesh of {devices} devices: rollout and training"
        " would start programs from two threads, which can hang in their collectives; set"
        " rollout_apart, or samplers",
    )
    check(
        not samplers.acts or rl.drafts is None,
        "rl.drafts with samplers: drafts are scored by the run's own engine; leave out one of"
        " the two",
    )
    check(
        not (samplers.acts and rl.entropy.keep),
        f"rl.entropy.keep = {rl.entropy.keep:g} with samplers: they sample at"
        " rollout.temperature alone; leave out one of the two",
    )
    check(
        samplers.lockstep or rl.one_step_off,
        "samplers.lockstep = False without rl.one_step_off: no rollout would run while the"
        " weights change; set rl.one_step_off, or leave lockstep on",
    )
    check(
        not samplers.acts or not isinstance(rewards.judge, EngineJudgeConfig),
        "samplers with a judge on the rollout's engine: the training has no engine; serve the"
        " judge and name its endpoint (JudgeConfig)",
    )


def _check_scalar_judge(rl: RLConfig, devices: int, rewards: RewardConfig) -> None:
    check(
        not rl.one_step_off or devices == 1,
        f"rl.one_step_off with a scalar reward model on a mesh of {devices} devices:"
        " rewards and training would start programs from two threads, which can hang in their"
        " collectives; use one device for the training, or leave one of the two out",
    )
    check(
        not rl.shaping.total or rewards.smallest_gap is not None,
        "rl.shaping with a scalar reward model: two of its rewards can be as close as they"
        " like, and a penalty could put the better answer below the other; set rl.shaping's"
        " penalties to 0, or say in rewards.smallest_gap from which difference on they differ",
    )


def _check_sampler(r: RolloutConfig, rl: RLConfig) -> None:
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
            kind == "off" or rl.correction.acts,
            f"rollout.{name} = {kind!r} samples from {what}: set rl.correction to 'tis',"
            f" 'icepop' or 'sequence', or rollout.{name} to 'off'",
        )
    longest = r.prompt_buckets[-1] + r.max_new_tokens
    check(
        rl.buckets[-1] >= longest,
        f"rl.buckets end at {rl.buckets[-1]} tokens, a rollout may have {longest}"
        " (rollout.prompt_buckets[-1] + max_new_tokens)",
    )


def _check_shaping(rl: RLConfig, scored: ScoredConfig) -> None:
    """Raises ConfigError for rewards and penalties that the advantage cannot use."""
    shaping, rewards, longest = rl.shaping, scored.rewards, scored.rollout.max_new_tokens
    sources = scored.data.keyed_sources()
    training = sources[: len(scored.data.sources)]
    if rl.advantage.needs_rewards_from_zero:
        where = below_zero(training, rewards, shaping.overlong_penalty)
        check(
            not where,
            f"rl.advantage.name = {rl.advantage.name!r} needs rewards of at least 0, and"
            f" {where}: take another advantage, such as rloo, or change that",
        )
    if shaping.total:
        gap, where = smallest_gap(training, rewards)
        check(
            shaping.total < gap,
            f"rl.shaping: the penalties sum to {shaping.total}, which is not below {gap:g}, the"
            f" smallest difference between two rewards ({where}): a right answer could end"
            " below a wrong one; lower the penalties",
        )
    check_rewards(sources, rewards, shaping.total)
    for name in ("length_free_tokens", "overlong_buffer_tokens"):
        tokens = getattr(shaping, name)
        check(
            tokens <= longest,
            f"rl.shaping.{name} = {tokens} exceeds rollout.max_new_tokens = {longest}",
        )
    for penalty, setting in (
        ("length_penalty", "length_free_tokens"),
        ("repetition_penalty", "repetition_ngram"),
    ):
        tokens = getattr(shaping, setting)
        check(
            not getattr(shaping, penalty) or tokens < longest,
            f"rl.shaping.{setting} = {tokens} is not below rollout.max_new_tokens ="
            f" {longest}: rl.shaping.{penalty} could never act",
        )
