"""What an RL step samples: its prompts, the size of their groups, and which groups it keeps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from compass_jax.config.drafts import Drafts
from compass_jax.config.errors import check
from compass_jax.config.ranges import Count, CountOrOff, Range, Repeat, Section
from compass_jax.config.step_hook import StepHook
from compass_jax.config.step_policy import StepPolicy, built_in_policy
from compass_jax.config.updates import Batch

Samples = Annotated[int, Range(0, 65_536)]
VerdictTicks = Annotated[int, Range(0, 64)]
MAX_SAMPLES = 2**24  # maximum samples of a round


@dataclass(frozen=True)
class ResamplingConfig(Section):
    """Further samples for groups with equal rewards: growth, and dynamic sampling (algorithms
    section 2).
    """

    KEY: ClassVar[str] = "rl.zero_variance"

    grow_to: Samples = 0
    """Maximum number of samples of a uniform group, reached by doubling (stage 2); 0: no growth."""
    dynamic_sampling: bool = False
    """Dynamic sampling (DAPO): replace uniform groups by further prompts, instead of rl_zvp."""
    dynamic_batch: Repeat = 3
    """Size of a round of dynamic sampling, in times rl.prompts_per_step."""
    dynamic_rounds: Count = 10
    """Maximum number of rounds of dynamic sampling in a step; uniform groups fill the rest."""


@dataclass(frozen=True)
class ReplayConfig(Section):
    """Router replay, which both the rollout, which records routes, and the updates need."""

    KEY: ClassVar[str] = "rl"

    replay: Literal["off", "R2", "R3"] = "R3"
    """Router replay: reuse the routes of the rollout (R3) or of the old policy's pass (R2)."""


@dataclass(frozen=True)
class SamplingConfig(ReplayConfig):
    """The rollout of an RL step: `prompts_per_step` groups of `group_size` samples."""

    KEY: ClassVar[str] = "rl"

    prompts_per_step: Batch = 16
    """Number of prompts (groups) of a step."""
    group_size: Annotated[int, Range(1, 65_536)] = 4
    """Number of samples per prompt, which form its group."""
    zero_variance: ResamplingConfig = field(default_factory=ResamplingConfig)
    """Further samples for groups whose rewards are all equal."""
    one_step_off: bool = False
    """One-step-off training: roll out with the weights before this update, at the same time; needs
    rl.correction.
    """
    partial_prompts: CountOrOff = 0
    """Number of further prompts in flight, whose unfinished samples continue in the next step;
    needs rl.correction.
    """
    verdict_ticks: VerdictTicks | None = 0
    """Number of further decode calls after which the verdict on a finished sample can start further
    samples of its group (growth, screening) in the same rollout; 0: the next call waits for it.
    none: they start when the rollout has ended, as they do where a judge gives verdicts.
    """
    hooks: tuple[StepHook, ...] = ()
    """Your own hooks, which are called in each step (docs/howto/hook.md)."""
    step_policy: StepPolicy | None = None
    """Step policy, such as screening or your own, which decides which prompts are rolled out next
    and which groups a step trains on (docs/howto/step_policy.md); none: by the other settings.
    """
    drafts: Drafts | None = None
    """Drafts: accept the first tokens of a prompt's last answers at its next visit, and sample only
    the rest (docs/concepts/drafts.md); none: sample every token.
    """

    @property
    def policy(self) -> StepPolicy:
        """The step policy: the user's own, or this package's for the other settings."""
        return built_in_policy(self) if self.step_policy is None else self.step_policy

    @property
    def capacity(self) -> int:
        """The maximum number of samples of a group."""
        return max(self.group_size, self.zero_variance.grow_to)

    def doublings(self, index: int) -> int:
        """Returns how often a group has been doubled when it has sample `index`."""
        size, count = self.group_size, 0
        while index >= size:
            size, count = 2 * size, count + 1
        return count

    @property
    def prompts_per_round(self) -> int:
        """The number of prompts that are rolled out together: those of a step and the further ones
        in flight, or those of a round.
        """
        return self.policy.prompts_per_round(self)

    @property
    def groups_in_flight(self) -> int:
        """The largest number of groups in flight, for whose routes the engine has memory."""
        return self.policy.groups_in_flight(self)

    @property
    def held_groups(self) -> int:
        """The largest number of groups that hooks hold past their steps."""
        return sum(hook.held_groups for hook in self.hooks)

    @property
    def holds_routes(self) -> bool:
        """Whether held groups keep their routes."""
        return any(hook.holds_routes for hook in self.hooks)

    @property
    def routed_groups(self) -> int:
        """The number of groups for whose routes the engine has memory: those in flight, and those
        that are held with their routes.
        """
        return self.groups_in_flight + (self.held_groups if self.holds_routes else 0)

    def _check(self, key: str) -> None:
        super()._check(key)
        check(
            self.group_size >= 2,
            f"rl.group_size = {self.group_size}: a group-relative advantage needs at least 2"
            " samples",
        )
        zero = self.zero_variance
        check(
            zero.grow_to == 0 or zero.grow_to > self.group_size,
            f"rl.zero_variance.grow_to = {zero.grow_to} does not exceed rl.group_size ="
            f" {self.group_size}: no group could grow; raise it, or set 0",
        )
        self._check_policy()
        for hook in self.hooks:
            hook.validate()
            groups = hook.held_groups
            check(
                isinstance(groups, int) and groups >= 0,
                f"rl.hooks: held_groups of {hook.name!r} is {groups!r:.80}; it must be a number of"
                " groups",
            )
        if self.drafts is not None:
            self.drafts.validate()
        samples = self.prompts_per_round * self.capacity
        check(
            samples <= MAX_SAMPLES,
            f"rl: a round of {self.prompts_per_round} prompts with up to {self.capacity} samples"
            f" each has {samples} samples, at most {MAX_SAMPLES} are allowed",
        )
        partial = f"rl.partial_prompts = {self.partial_prompts}"
        check(
            self.partial_prompts <= self.prompts_per_step,
            f"{partial}: must be in 0..rl.prompts_per_step = {self.prompts_per_step}",
        )
        check(
            not (self.partial_prompts and zero.dynamic_sampling),
            f"{partial}: dynamic sampling has rounds of its own; use one of the two",
        )

    def _check_policy(self) -> None:
        """Raises ConfigError for a policy of the user's that is not usable with these settings."""
        if self.step_policy is None:
            return
        self.step_policy.validate()
        self.step_policy.check(self)
        groups = self.groups_in_flight
        check(
            isinstance(groups, int) and groups >= self.prompts_per_step,
            f"rl.step_policy.name = {self.policy.name!r}: groups_in_flight(sampling) returned"
            f" {groups!r:.200}; it must be at least rl.prompts_per_step = {self.prompts_per_step}",
        )
