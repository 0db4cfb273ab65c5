"""Settings of RL, and of the optimiser of every stage."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from compass_jax.config import named
from compass_jax.config.advantage import Advantage, default_advantage
from compass_jax.config.correction import Correction, no_correction
from compass_jax.config.errors import check
from compass_jax.config.objective import Objective, default_objective
from compass_jax.config.ranges import (
    Coefficient,
    Count,
    CountOrOff,
    Fraction,
    LongBuckets,
    Name,
    Range,
    Repeat,
    Section,
    Tokens,
)
from compass_jax.config.rl_stage import RLStage, check_order
from compass_jax.config.verifiers import Options

Bound = Annotated[float, Range(0, 1e6)]  # bound of a ratio of probabilities
Decay = Annotated[float, Range(0, 0.9999999)]
Batch = Annotated[int, Range(1, 2**20)]
Samples = Annotated[int, Range(0, 65_536)]
Clip = Annotated[float, Range(0, 1e6)]
DualClip = Annotated[float, Range(1, 1e6, above=True, or_zero=True)]
FromZero = Annotated[float, Range(0, 1e6, above=True)]
Temper = Annotated[float, Range(0, 100, above=True, note="1: all samples alike")]
Strength = Annotated[float, Range(0, 1000, above=True, note="rl_zvp=False switches it off")]
BatchTokens = Annotated[int, Range(1, 2**31 - 1)]
MAX_SAMPLES = 2**24  # maximum samples of a round
SET_CORRECTION = "set rl.correction to 'tis', 'icepop' or 'sequence'"


@dataclass(frozen=True)
class OptimConfig(Section):
    """AdamW, or a transformation of optax or of the user, with linear warm-up and then a constant
    learning rate or cosine decay to zero.
    """

    CODE: ClassVar[tuple[str, ...]] = ("name",)

    name: Name = "adamw"
    """Optimiser: adamw, or the module:function or file.py:function of one that takes learning_rate
    and returns an optax.GradientTransformation, such as optax:lion.
    """
    options: Options = ()
    """Keyword arguments of that function, pairs of a name and a value."""
    learning_rate: Annotated[float, Range(0, 100)] = 1e-6
    """Learning rate after the warm-up (a factor)."""
    warmup_steps: CountOrOff = 0
    """Number of updates of the linear warm-up."""
    schedule: Literal["constant", "cosine"] = "constant"
    """Learning-rate schedule after the warm-up: constant, or cosine decay to zero."""
    b1: Decay = 0.9
    """AdamW's beta1 (decay rate of the first moment)."""
    b2: Decay = 0.95
    """AdamW's beta2 (decay rate of the second moment)."""
    eps: Annotated[float, Range(0, 1, above=True)] = 1e-8
    """AdamW's epsilon (a number added to the root of the second moment)."""
    weight_decay: Coefficient = 0.0
    """AdamW's decoupled weight decay (a factor of the learning rate), except for norms and biases.
    """
    clip_grad_norm: Annotated[float, Range(0, 1e12, above=True)] = 1.0
    """Gradient clipping: the largest global norm (a number)."""
    float32_master: bool = True
    """Keep moments, updates and summed gradients in float32 if parameters are in bfloat16."""
    max_bad_steps: Count = 3
    """Number of consecutive updates with a non-finite gradient after which the run stops."""

    def _check(self, key: str) -> None:
        if self.name == "adamw":
            check(not self.options, f"{key}.options: adamw takes none; set {key}.b1 and others")
            return
        named.check_name(self.name, f"{key}.name", "'optax:lion'")
        for one in dataclasses.fields(self):
            if one.name in ("b1", "b2", "eps", "weight_decay"):
                value = getattr(self, one.name)
                check(
                    value == one.default,
                    f"{key}.{one.name} = {value} is AdamW's; give {self.name} its own in"
                    f" {key}.options",
                )


def check_encloses_one(key: str, ratio_range: tuple[float, float]) -> None:
    """Raises ConfigError for a range of ratios that excludes 1 or is not positive."""
    low, high = ratio_range
    check(
        0 < low < 1 < high,
        f"{key}.ratio_range = {low, high}: must enclose 1, its lower end positive",
    )


@dataclass(frozen=True)
class ZeroVarianceConfig(Section):
    """Stages of the zero-variance elimination (algorithms section 2)."""

    KEY: ClassVar[str] = "rl.zero_variance"

    rl_zvp: bool = True
    """RL-ZVP: advantages from entropies for groups with equal rewards (stage 4, arXiv 2509.21880).
    """
    rl_zvp_alpha: Strength = 0.1
    """Factor of RL-ZVP's advantages, which are entropies in nats or differences of them."""
    select: bool = False
    """Selection: skip prompts whose recent groups were uniform, with growing probability (stage 1).
    """
    select_targets: tuple[Fraction, Fraction] = (1 / 12, 1 / 6)
    """Target shares of all-right and of all-wrong groups under select."""
    curriculum: bool = False
    """Curriculum: draw prompts by the chance that their group varies, from their label's pass rate,
    instead of select.
    """
    grow_to: Samples = 0
    """Maximum number of samples of a uniform group, reached by doubling (stage 2); 0: no growth."""
    grow_temperature: Temper = 1.0
    """Factor of the temperature at each doubling; other than 1 it needs rl.correction."""
    dynamic_sampling: bool = False
    """Dynamic sampling (DAPO): replace uniform groups by further prompts, instead of rl_zvp."""
    dynamic_batch: Repeat = 3
    """Size of a round of dynamic sampling, in times rl.prompts_per_step."""
    dynamic_rounds: Count = 10
    """Maximum number of rounds of dynamic sampling in a step; uniform groups fill the rest."""

    def _check(self, key: str) -> None:
        check(
            not (self.dynamic_sampling and self.rl_zvp),
            f"{key}.dynamic_sampling drops the uniform groups that rl_zvp learns from: switch one"
            " of them off",
        )
        check(
            not (self.select and self.curriculum),
            f"{key}.select and {key}.curriculum both decide which prompts are rolled out: switch"
            " one of them off",
        )
        check(
            self.grow_temperature == 1 or self.grow_to > 0,
            f"{key}.grow_temperature = {self.grow_temperature}: no group grows; set {key}.grow_to,"
            " or 1",
        )
        check(
            all(0 < x < 1 for x in self.select_targets),
            f"{key}.select_targets = {self.select_targets}: must be in (0, 1)",
        )


@dataclass(frozen=True)
class ShapingConfig(Section):
    """Penalties of stage 3 (rl/shaping.py). All 0: off.

    Their sum must stay below the smallest difference between two rewards (rewards.smallest_gap).
    """

    KEY: ClassVar[str] = "rl.shaping"

    length_penalty: Bound = 0.0
    """Length penalty: the reward that a right answer of max_new_tokens loses; shorter ones less."""
    length_free_tokens: CountOrOff = 0
    """Number of tokens without length penalty."""
    repetition_penalty: Bound = 0.0
    """Repetition penalty: the reward that a right answer loses if it only repeats itself."""
    repetition_ngram: Tokens = 4
    """Number of consecutive tokens that count as a repetition if they came before."""
    overlong_penalty: Bound = 0.0
    """Overlong penalty: the reward that any answer of max_new_tokens loses (DAPO: 0.5 for rewards 0
    and 1).
    """
    overlong_buffer_tokens: Tokens = 1
    """Number of last tokens over which the overlong penalty grows."""

    @property
    def total(self) -> float:
        """The largest possible sum of the penalties."""
        return self.length_penalty + self.repetition_penalty + self.overlong_penalty


@dataclass(frozen=True)
class RLConfig(Section):
    """One RL step: `prompts_per_step` groups of `group_size` samples, then `updates_per_rollout` x
    `epochs` updates.
    """

    KEY: ClassVar[str] = "rl"

    steps: Count = 100
    """Number of steps of the run, each a rollout and its updates."""
    prompts_per_step: Batch = 32
    """Number of prompts (groups) of a step."""
    group_size: Annotated[int, Range(1, 65_536)] = 8
    """Number of samples per prompt, which form its group."""
    updates_per_rollout: Batch = 1
    """Number of updates into which the groups of a rollout are split."""
    epochs: Repeat = 1
    """Number of times (epochs) that a rollout is trained on."""
    replay: Literal["off", "R2", "R3"] = "R3"
    """Router replay: reuse the routes of the rollout (R3) or of the old policy's pass (R2)."""
    buckets: LongBuckets = (64, 128, 256)
    """Padded lengths of a training sequence in tokens."""
    micro_batch_tokens: BatchTokens = 16_384
    """Maximum number of tokens of a micro-batch, padding included."""
    advantage: Advantage = field(default_factory=default_advantage)
    """The advantage of a response within its group, and its settings."""
    objective: Objective = field(default_factory=default_objective)
    """The policy objective and its settings."""
    correction: Correction = field(default_factory=no_correction)
    """Correction of the mismatch between rollout and training."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """Penalties on length and repetition (stage 3)."""
    zero_variance: ZeroVarianceConfig = field(default_factory=ZeroVarianceConfig)
    """Treatment of groups whose rewards are all equal."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser of reinforcement learning."""
    save_every: CountOrOff = 50
    """Checkpoint interval in steps; 0: only at the end."""
    eval_every: CountOrOff = 0
    """Evaluation interval in steps, with another evaluation at the end; 0: only at the end."""
    one_step_off: bool = False
    """One-step-off training: roll out with the weights before this update, at the same time; needs
    rl.correction.
    """
    partial_prompts: CountOrOff = 0
    """Number of further prompts in flight, whose unfinished samples continue in the next step;
    needs rl.correction.
    """
    permute_rewards: bool = False
    """Control experiment: shuffle the rewards within each group, which should teach nothing."""
    stages: tuple[RLStage, ...] = ()
    """Stages that change settings from a step on (docs/concepts/curriculum.md); a stage's objective
    is written like rl.objective.
    """

    @property
    def capacity(self) -> int:
        """The maximum number of samples of a group."""
        return max(self.group_size, self.zero_variance.grow_to)

    @property
    def prompts_per_round(self) -> int:
        """The number of prompts that are rolled out together: those of a step and the further ones
        in flight, or those of a round of dynamic sampling.
        """
        zero = self.zero_variance
        return (
            self.prompts_per_step * (zero.dynamic_batch if zero.dynamic_sampling else 1)
            + self.partial_prompts
        )

    @property
    def total_updates(self) -> int:
        """The number of optimiser updates of the whole run."""
        return self.steps * self.updates_per_rollout * self.epochs

    @property
    def uses_reference(self) -> bool:
        """Whether the run keeps a reference policy and scores with it."""
        return self.objective.kl_coef > 0

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
        check(
            self.prompts_per_step % self.updates_per_rollout == 0,
            f"rl.prompts_per_step = {self.prompts_per_step} is not a multiple of"
            f" rl.updates_per_rollout = {self.updates_per_rollout}",
        )
        samples = self.prompts_per_round * self.capacity
        check(
            samples <= MAX_SAMPLES,
            f"rl: a round of {self.prompts_per_round} prompts with up to {self.capacity} samples"
            f" each has {samples} samples, at most {MAX_SAMPLES} are allowed",
        )
        self._check_correction()
        self.advantage.validate()
        self.objective.validate()
        self._check_stages()

    def _check_correction(self) -> None:
        """Raises ConfigError for training on samples of another policy without a correction."""
        corrected, zero = self.correction.acts, self.zero_variance
        heated = f"rl.zero_variance.grow_temperature = {zero.grow_temperature}"
        check(
            zero.grow_temperature == 1 or corrected,
            f"{heated} samples from another policy than the one that is trained: {SET_CORRECTION},"
            " or grow_temperature to 1",
        )
        check(
            not self.one_step_off or corrected,
            f"rl.one_step_off samples from the weights before the last updates: {SET_CORRECTION}",
        )
        key = f"rl.partial_prompts = {self.partial_prompts}"
        check(
            self.partial_prompts <= self.prompts_per_step,
            f"{key}: must be in 0..rl.prompts_per_step = {self.prompts_per_step}",
        )
        check(
            not self.partial_prompts or corrected,
            f"{key} trains on tokens that older weights sampled: {SET_CORRECTION}",
        )
        check(
            not (self.partial_prompts and zero.dynamic_sampling),
            f"{key}: dynamic sampling has rounds of its own; use one of the two",
        )
        check(
            not self.partial_prompts or zero.grow_temperature == 1,
            f"{key}: {heated} would heat continued samples, too; set it to 1",
        )

    def _check_stages(self) -> None:
        """Raises ConfigError for stages that contradict the run or each other."""
        check_order(self.stages)
        for name in ("select", "curriculum"):
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
