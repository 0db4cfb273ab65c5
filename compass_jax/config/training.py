"""Settings of RL: sampling, the computation of an update, and the number of updates.

`RLConfig` inherits the settings of its three consumers. `rl.sampling`, `rl.algorithm` and
`rl.updates` return each consumer's settings alone: a jitted function that takes one of them as a
static argument does not compile again where a setting of another changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from compass_jax.config.algorithm import AlgorithmConfig, RLZVPConfig
from compass_jax.config.entropy import EntropyConfig
from compass_jax.config.errors import check
from compass_jax.config.guard import GuardConfig
from compass_jax.config.predictor import Predictor, default_predictor
from compass_jax.config.ranges import CountOrOff, Fraction, Range, Repeat, Section
from compass_jax.config.rl_stage import RLStage, check_order
from compass_jax.config.sampling import ResamplingConfig, SamplingConfig
from compass_jax.config.step_policy import StepPolicy, default_policy
from compass_jax.config.updates import UpdatesConfig

SET_CORRECTION = "set rl.correction to 'tis', 'icepop' or 'sequence'"


SELECTIONS = ("curriculum", "posterior")  # of which a run has at most one


@dataclass(frozen=True)
class SelectionConfig(Section):
    """Which prompts are rolled out (algorithms section 2, stage 1)."""

    KEY: ClassVar[str] = "rl.zero_variance"

    curriculum: bool = False
    """Curriculum: draw prompts by the chance that their group varies, from their label's pass rate.
    """
    posterior: bool = False
    """Posterior selection: take the prompts whose predicted pass rate is nearest to a target, by a
    Beta posterior for each (arXiv 2507.04632).
    """
    posterior_target: Fraction = 0.5
    """Pass rate that posterior selection aims at."""
    posterior_candidates: Repeat = 4
    """Number of candidates of posterior selection, in times the prompts that are taken."""
    posterior_discount: Annotated[float, Range(0, 1, above=True)] = 0.9
    """Weight of a prompt's earlier counts at each new group, since the policy moves; 1: all count
    alike.
    """

    def _check(self, key: str) -> None:
        super()._check(key)
        active = [name for name in SELECTIONS if getattr(self, name)]
        check(
            len(active) < 2,
            f"{' and '.join(f'{key}.{name}' for name in active)} both decide which prompts are"
            " rolled out: switch all but one off",
        )


@dataclass(frozen=True)
class ZeroVarianceConfig(ResamplingConfig, SelectionConfig, RLZVPConfig):
    """Stages of the zero-variance elimination (algorithms section 2)."""

    def _check(self, key: str) -> None:
        check(
            not (self.dynamic_sampling and self.rl_zvp),
            f"{key}.dynamic_sampling drops the uniform groups that rl_zvp learns from: switch one"
            " of them off",
        )
        super()._check(key)


@dataclass(frozen=True)
class RLConfig(AlgorithmConfig, SamplingConfig, UpdatesConfig):
    """One RL step: `prompts_per_step` groups of `group_size` samples, then `updates_per_rollout` x
    `epochs` updates.

    The defaults are the preset `screened`, GRPO with posterior selection and screening, with fewer
    prompts a step.
    """

    zero_variance: ZeroVarianceConfig = field(
        default_factory=lambda: ZeroVarianceConfig(posterior=True)
    )
    """Treatment of groups whose rewards are all equal."""
    predictor: Predictor = field(default_factory=default_predictor)
    """Predictor of the pass rate of prompts, by which zero_variance.posterior selects
    (docs/howto/predictor.md).
    """
    step_policy: StepPolicy | None = field(default_factory=default_policy)
    """Step policy, such as screening or your own, which decides which prompts are rolled out next
    and which groups a step trains on (docs/howto/step_policy.md); none: by the other settings.
    """
    save_every: CountOrOff = 50
    """Checkpoint interval in steps; 0: only at the end."""
    eval_every: CountOrOff = 0
    """Evaluation interval in steps, with another evaluation at the end; 0: only at the end."""
    entropy: EntropyConfig = field(default_factory=EntropyConfig)
    """Control of the rollout's temperature by the policy's entropy."""
    guard: GuardConfig = field(default_factory=GuardConfig)
    """Watch for failure signatures."""
    stages: tuple[RLStage, ...] = ()
    """Stages that change settings from a step on (docs/concepts/curriculum.md); a stage's objective
    is written like rl.objective.
    """

    @property
    def algorithm(self) -> AlgorithmConfig:
        """The settings of what an update computes."""
        return self.part(AlgorithmConfig)

    @property
    def sampling(self) -> SamplingConfig:
        """The settings of sampling."""
        return self.part(SamplingConfig)

    @property
    def updates(self) -> UpdatesConfig:
        """The settings of the updates."""
        return self.part(UpdatesConfig)

    def _check(self, key: str) -> None:
        super()._check(key)
        for hook in self.hooks:
            hook.check(self)
        self.check_whole_groups(self.prompts_per_step)
        check(
            not (self.optim.rate_by_groups and self.zero_variance.rl_zvp),
            "rl.optim.rate_by_groups counts groups whose rewards vary, and rl.zero_variance.rl_zvp"
            " gives the others an advantage too: switch one of them off",
        )
        for name in ("partial_prompts", "drafts"):
            check(
                not (self.entropy.keep and getattr(self, name)),
                f"rl.entropy.keep = {self.entropy.keep:g}: the temperature changes between steps,"
                f" and rl.{name} takes tokens of earlier ones; leave one of them out",
            )
        self._check_correction()
        self._check_advantage()
        check(
            not (self.zero_variance.rl_zvp and self.policy.most_rounds(self) > 1),
            f"rl.step_policy.name = {self.policy.name!r}: further rounds of prompts drop the"
            " uniform groups that rl.zero_variance.rl_zvp learns from: switch one of them off",
        )
        check(
            self.guard.action != "restore" or bool(self.save_every),
            "rl.guard.action = 'restore' with rl.save_every = 0: there would be no checkpoint to"
            " go back to; set rl.save_every",
        )
        self._check_stages()
        self._check_predictor()

    def _check_predictor(self) -> None:
        """Raises ConfigError for a predictor that nothing reads, or that has no policy to read."""
        predictor = self.predictor
        check(
            self.zero_variance.posterior or predictor == default_predictor(),
            f"rl.predictor.name = {predictor.name!r} without rl.zero_variance.posterior: nothing"
            " reads its predictions; set rl.zero_variance.posterior, which"
            " ZeroVarianceConfig(posterior=True) has, or set rl.predictor to its default, 'text'",
        )
        check(
            not (predictor.reads_policy and self.one_step_off),
            f"rl.predictor.name = {predictor.name!r} with rl.one_step_off: it would read the"
            " policy's parameters while an update replaces them; set rl.predictor to 'text'",
        )

    def _check_correction(self) -> None:
        """Raises ConfigError for training on samples of another policy without a correction."""
        corrected = self.correction.acts
        check(
            not self.one_step_off or corrected,
            f"rl.one_step_off samples from the weights before the last updates: {SET_CORRECTION}",
        )
        check(
            not self.partial_prompts or corrected,
            f"rl.partial_prompts = {self.partial_prompts} trains on tokens that older weights"
            f" sampled: {SET_CORRECTION}",
        )
        check(
            not self.policy.carries or corrected,
            f"rl.step_policy.name = {self.policy.name!r} continues samples in later steps, and so"
            f" trains on tokens that older weights sampled: {SET_CORRECTION}",
        )

    def _check_advantage(self) -> None:
        """Raises ConfigError for an advantage whose predictions no setting makes, or for settings
        that drop or leave out the uniform groups that it learns from.
        """
        advantage, zero = self.advantage, self.zero_variance
        name = f"rl.advantage.name = {advantage.name!r}"
        other = "take another advantage, such as rloo"
        check(
            not advantage.reads_prediction or zero.posterior,
            f"{name} compares rewards with predicted pass rates, and nothing predicts any: each"
            f" would be 0.5; switch rl.zero_variance.posterior on, or {other}",
        )
        if not advantage.uniform_teaches:
            return
        check(
            not zero.dynamic_sampling,
            f"rl.zero_variance.dynamic_sampling drops the uniform groups that {name} learns from:"
            f" switch dynamic_sampling off, or {other}",
        )
        check(
            self.policy.most_rounds(self) == 1,
            f"rl.step_policy.name = {self.policy.name!r}: further rounds of prompts drop the"
            f" uniform groups that {name} learns from: set its rounds to 1, or {other}",
        )
        check(
            not self.optim.rate_by_groups,
            f"rl.optim.rate_by_groups counts groups whose rewards vary, and {name} learns from the"
            f" others, too: switch it off, or {other}",
        )

    def _check_stages(self) -> None:
        """Raises ConfigError for stages that contradict the run or each other."""
        check_order(self.stages)
        for name in SELECTIONS:
            check(
                not getattr(self.zero_variance, name) or not any(x.mix for x in self.stages),
                f"rl.zero_variance.{name} and the mix of a stage in rl.stages both decide which"
                " prompts are rolled out: leave one of them out",
            )
        references = {(stage.objective or self.objective).kl_coef > 0 for stage in self.stages}
        check(
            len(references) < 2,
            "rl.stages: the objective of one stage has a kl_coef and that of another has none; the"
            " reference policy is kept from the run's beginning or not at all",
        )
