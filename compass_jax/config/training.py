"""Settings of RL and of every stage's optimiser."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from compass_jax.config import named
from compass_jax.config.advantage import Advantage, default_advantage
from compass_jax.config.errors import check
from compass_jax.config.objective import Coefficient, Objective, default_objective
from compass_jax.config.ranges import (
    Count,
    CountOrOff,
    Fraction,
    Name,
    Range,
    Repeat,
    Tokens,
    check_fields,
)
from compass_jax.config.rl_stage import RLStage, check_order
from compass_jax.config.verifiers import Options

Bound = Annotated[float, Range(0, 1e6)]  # of a ratio of probabilities
Decay = Annotated[float, Range(0, 0.9999999)]
Batch = Annotated[int, Range(1, 2**20)]
Samples = Annotated[int, Range(0, 65_536)]
FromZero = Annotated[float, Range(0, 1e6, above=True)]
Clip = Annotated[float, Range(0, 1e6)]
Temper = Annotated[float, Range(0, 100, above=True, note="1: all samples alike")]
Strength = Annotated[float, Range(0, 1000, above=True, note="rl_zvp=False switches it off")]
Cap = Annotated[float, Range(1, 1e6, note="below, on-policy tokens are scaled down")]
BatchTokens = Annotated[int, Range(1, 2**31 - 1)]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW, or a transformation of optax or of your own, with linear warm-up, then a constant
    learning rate or cosine decay to zero.
    """

    name: Name = "adamw"
    """The optimiser: adamw, or the module:function or file.py:function of one that takes
    learning_rate and returns an optax.GradientTransformation, such as optax:lion.
    """
    options: Options = ()
    """Keyword arguments of that function, pairs of a name and a value."""
    learning_rate: Annotated[float, Range(0, 100)] = 1e-6
    """AdamW's step size after the warm-up is this factor."""
    warmup_steps: CountOrOff = 0
    """The learning rate rises over so many updates."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate stays constant after the warm-up, or falls to zero along a cosine."""
    b1: Decay = 0.9
    """AdamW's beta1 (decay rate of the first moment)."""
    b2: Decay = 0.95
    """AdamW's beta2 (decay rate of the second moment)."""
    eps: Annotated[float, Range(0, 1, above=True)] = 1e-8
    """AdamW's epsilon, a number added to the root of the second moment."""
    weight_decay: Coefficient = 0.0
    """AdamW's decoupled weight decay, a factor of the learning rate; norms and biases have none."""
    clip_grad_norm: Annotated[float, Range(0, 1e12, above=True)] = 1.0
    """A gradient of a larger norm than this number, without a unit, is scaled down to it."""
    float32_master: bool = True
    """Moments, updates and sums of gradients are in float32 where parameters are in bfloat16."""
    max_bad_steps: Count = 3
    """The run stops after so many updates in a row whose gradient is not finite."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", named.absolute(self.name))
        if isinstance(self.options, Mapping):
            object.__setattr__(self, "options", tuple(self.options.items()))

    def validate(self, key: str) -> None:
        check_fields(self, key)
        if self.name == "adamw":
            check(not self.options, f"{key}.options: adamw takes none; set {key}.b1 and others")
            return
        named.check_name(self.name, f"{key}.name", "'optax:lion'")
        for field_ in dataclasses.fields(self):
            if field_.name in ("b1", "b2", "eps", "weight_decay"):
                value = getattr(self, field_.name)
                check(
                    value == field_.default,
                    f"{key}.{field_.name} = {value} is AdamW's; give {self.name} its own in"
                    f" {key}.options",
                )


MOST_SAMPLES = 2**24  # of a round


def check_dual_clip(dual_clip: float) -> None:
    """Raises ConfigError for a bound that would cut what is not clipped."""
    check(
        dual_clip == 0 or dual_clip > 1,
        f"rl.objective.dual_clip = {dual_clip}: must be above 1 (0: off)",
    )


@dataclass(frozen=True)
class CorrectionConfig:
    """Correction of the mismatch between rollout and training probabilities (rl/correction.py): a
    weight outside the clip.
    """

    name: Literal["off", "tis", "icepop", "sequence"] = "off"
    """The weight that corrects the mismatch of rollout and training: by token (tis, icepop) or by
    response (sequence).
    """
    tis_cap: Cap = 2.0
    """With tis, the ratio of training to rollout probabilities is cut at this number (arXiv
    2512.01374 has 5).
    """
    icepop_range: tuple[Bound, Bound] = (0.5, 5.0)
    """With icepop, a token has no weight where its ratio leaves this range."""
    sequence_range: tuple[Bound, Bound] = (0.999, 1.002)
    """With sequence, a response has no weight where its mean ratio leaves this range."""

    def validate(self) -> None:
        check_fields(self, "rl.correction")
        for name in ("icepop_range", "sequence_range"):
            low, high = getattr(self, name)
            check(
                0 < low < 1 < high,
                f"rl.correction.{name} = {low, high}: must enclose 1, its lower end positive",
            )


@dataclass(frozen=True)
class ZeroVarianceConfig:
    """Stages of the zero-variance elimination (algorithms section 2)."""

    rl_zvp: bool = True
    """Groups whose rewards are all equal get an advantage from their entropies (stage 4, arXiv
    2509.21880).
    """
    rl_zvp_alpha: Strength = 0.1
    """The advantages of rl_zvp are entropies in nats, or differences of them, times this factor."""
    select: bool = False
    """Prompts whose recent groups were uniform are skipped with a growing probability (stage 1)."""
    select_targets: tuple[Fraction, Fraction] = (1 / 12, 1 / 6)
    """With select, the shares of all-right and of all-wrong groups approach these."""
    curriculum: bool = False
    """Prompts are drawn by the chance that their group varies, as their label's pass rate tells,
    instead of select.
    """
    grow_to: Samples = 0
    """A uniform group gets more samples, doubling, up to this count (stage 2); 0: none."""
    grow_temperature: Temper = 1.0
    """Each doubling multiplies the temperature by this factor; other than 1 it needs rl.correction.
    """
    dynamic_sampling: bool = False
    """Uniform groups are dropped and further prompts rolled out (DAPO's), instead of rl_zvp."""
    dynamic_batch: Repeat = 3
    """A round of dynamic sampling has so many times rl.prompts_per_step prompts."""
    dynamic_rounds: Count = 10
    """A step has at most so many rounds of dynamic sampling; uniform groups fill what is missing
    then.
    """

    def validate(self) -> None:
        check_fields(self, "rl.zero_variance")
        check(
            not (self.dynamic_sampling and self.rl_zvp),
            "rl.zero_variance.dynamic_sampling drops the uniform groups that rl_zvp learns from:"
            " switch one of them off",
        )
        check(
            not (self.select and self.curriculum),
            "rl.zero_variance.select and rl.zero_variance.curriculum both decide which prompts are"
            " rolled out: switch one of them off",
        )
        check(
            self.grow_temperature == 1 or self.grow_to > 0,
            f"rl.zero_variance.grow_temperature = {self.grow_temperature}: no group grows; set"
            " rl.zero_variance.grow_to, or 1",
        )
        bad = [x for x in self.select_targets if not 0 < x < 1]
        check(
            not bad, f"rl.zero_variance.select_targets = {self.select_targets}: must be in (0, 1)"
        )


@dataclass(frozen=True)
class ShapingConfig:
    """Stage 3: penalties (rl/shaping.py). Their sum must stay below the smallest difference between
    two rewards (rewards.smallest_gap); all 0: off.
    """

    length_penalty: Bound = 0.0
    """A right answer of max_new_tokens loses this number of its reward; a shorter one loses less.
    """
    length_free_tokens: CountOrOff = 0
    """A right answer of up to so many tokens loses nothing."""
    repetition_penalty: Bound = 0.0
    """A right answer that only repeats itself loses this number of its reward."""
    repetition_ngram: Tokens = 4
    """So many tokens in a row that came before count as a repetition."""
    overlong_penalty: Bound = 0.0
    """Any answer of max_new_tokens loses this number of its reward (DAPO has 0.5 for rewards 0 and
    1).
    """
    overlong_buffer_tokens: Tokens = 1
    """The overlong penalty grows over the last so many tokens."""

    @property
    def total(self) -> float:
        """The most that all penalties together take off."""
        return self.length_penalty + self.repetition_penalty + self.overlong_penalty

    def validate(self) -> None:
        check_fields(self, "rl.shaping")


@dataclass(frozen=True)
class RLConfig:
    """One RL step: `prompts_per_step` groups of `group_size` samples, `updates_per_rollout` x
    `epochs` updates.
    """

    steps: Count = 100
    """The run ends after so many steps, each a rollout and its updates."""
    prompts_per_step: Batch = 32
    """A step trains on the groups of so many prompts."""
    group_size: Annotated[int, Range(1, 65_536)] = 8
    """Each prompt gets so many samples, which are its group."""
    updates_per_rollout: Batch = 1
    """The groups of a rollout are split into so many updates."""
    epochs: Repeat = 1
    """A rollout is trained on so many times."""
    replay: Literal["off", "R2", "R3"] = "R3"
    """Training takes the routes of the rollout (R3) or of the old policy's pass (R2), or routes
    anew (off).
    """
    buckets: tuple[Tokens, ...] = (64, 128, 256)
    """A sequence is padded to the next of these lengths in tokens for training."""
    micro_batch_tokens: BatchTokens = 16_384
    """A micro-batch has at most so many tokens, padding included."""
    advantage: Advantage = field(default_factory=default_advantage)
    """The advantage of a response within its group, and its settings."""
    objective: Objective = field(default_factory=default_objective)
    """The policy objective and its settings."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    """Correction of the mismatch between rollout and training."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """Penalties on length and repetition (stage 3)."""
    zero_variance: ZeroVarianceConfig = field(default_factory=ZeroVarianceConfig)
    """What is done about groups whose rewards are all equal."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser of reinforcement learning."""
    save_every: CountOrOff = 50
    """A checkpoint is written every so many steps; 0: only at the end."""
    eval_every: CountOrOff = 0
    """Held-out prompts and evaluation sets are answered every so many steps, and at the end; 0:
    only at the end.
    """
    one_step_off: bool = False
    """The next rollout runs while this one is trained on, from the weights before; it needs
    rl.correction.
    """
    partial_prompts: CountOrOff = 0
    """So many more prompts are in flight; what is not done with a step goes on in the next; it
    needs rl.correction.
    """
    permute_rewards: bool = False
    """Rewards are shuffled within each group: a control experiment, which should learn nothing."""
    stages: tuple[RLStage, ...] = ()
    """From a step on settings are others (docs/concepts/curriculum.md), the objective too, which is
    written like rl.objective; none: they stay.
    """

    @property
    def capacity(self) -> int:
        """The most samples that a group may have."""
        return max(self.group_size, self.zero_variance.grow_to)

    @property
    def prompts_per_round(self) -> int:
        """Prompts that are rolled out together: a step's and those beyond it, or those of one round
        of dynamic sampling.
        """
        zero = self.zero_variance
        return (
            self.prompts_per_step * (zero.dynamic_batch if zero.dynamic_sampling else 1)
            + self.partial_prompts
        )

    @property
    def total_updates(self) -> int:
        """Optimiser steps of the whole run."""
        return self.steps * self.updates_per_rollout * self.epochs

    @property
    def uses_reference(self) -> bool:
        """Whether a reference policy is kept and scored."""
        return self.objective.kl_coef > 0

    def validate(self) -> None:
        check_fields(self, "rl")
        check(
            self.group_size >= 2,
            f"rl.group_size = {self.group_size}: a group-relative advantage needs at least 2"
            " samples",
        )
        grow_to = self.zero_variance.grow_to
        check(
            grow_to == 0 or grow_to > self.group_size,
            f"rl.zero_variance.grow_to = {grow_to} does not exceed rl.group_size ="
            f" {self.group_size}: no group could grow; raise it, or set 0",
        )
        check(
            self.prompts_per_step % self.updates_per_rollout == 0,
            f"rl.prompts_per_step = {self.prompts_per_step} is not a multiple of"
            f" rl.updates_per_rollout = {self.updates_per_rollout}",
        )
        b = self.buckets
        check(
            bool(b) and all(x > 1 for x in b) and list(b) == sorted(set(b)),
            f"rl.buckets = {b}: must increase and be above 1",
        )
        samples = self.prompts_per_round * self.capacity
        check(
            samples <= MOST_SAMPLES,
            f"rl: a round of {self.prompts_per_round} prompts with up to {self.capacity} samples"
            f" each has {samples} samples, at most {MOST_SAMPLES} are allowed",
        )
        check(
            self.zero_variance.grow_temperature == 1 or self.correction.name != "off",
            f"rl.zero_variance.grow_temperature = {self.zero_variance.grow_temperature} samples"
            " from another policy than the one that is trained: set rl.correction.name to 'tis',"
            " 'icepop' or 'sequence', or grow_temperature to 1",
        )
        check(
            not self.one_step_off or self.correction.name != "off",
            "rl.one_step_off samples from the weights before the last updates: set"
            " rl.correction.name to 'tis', 'icepop' or 'sequence'",
        )
        self._validate_partial()
        self.advantage.validate()
        self.objective.validate()
        self.correction.validate()
        self.shaping.validate()
        self.zero_variance.validate()
        self.optim.validate("rl.optim")
        self._validate_stages()

    def _validate_stages(self) -> None:
        """What the stages cannot share with the run, or with each other."""
        check_order(self.stages)
        for name in ("select", "curriculum"):
            check(
                not getattr(self.zero_variance, name) or not any(x.mix for x in self.stages),
                f"rl.zero_variance.{name} and the mix of a stage in rl.stages both decide which"
                " prompts are rolled out: leave one of them out",
            )
        kept = {(stage.objective or self.objective).kl_coef > 0 for stage in self.stages}
        check(
            len(kept) < 2,
            "rl.stages: the objective of one stage has a kl_coef and that of another has none; the"
            " reference policy is kept from the run's beginning or not at all",
        )

    def _validate_partial(self) -> None:
        key = f"rl.partial_prompts = {self.partial_prompts}"
        check(
            0 <= self.partial_prompts <= self.prompts_per_step,
            f"{key}: must be in 0..rl.prompts_per_step = {self.prompts_per_step}",
        )
        if self.partial_prompts:
            check(
                self.correction.name != "off",
                f"{key} trains on tokens that older weights sampled: set rl.correction.name to"
                " 'tis', 'icepop' or 'sequence'",
            )
            check(
                not self.zero_variance.dynamic_sampling,
                f"{key}: dynamic sampling has rounds of its own; use one of the two",
            )
            check(
                self.zero_variance.grow_temperature == 1,
                f"{key}: rl.zero_variance.grow_temperature = {self.zero_variance.grow_temperature}"
                " would heat what goes on, too; set it to 1",
            )
