"""Settings of SFT, RL and the optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from compass_jax.config.errors import check
from compass_jax.config.objective import Coefficient, Objective, default_objective
from compass_jax.config.ranges import (
    AUTO,
    Count,
    CountOrOff,
    Fraction,
    Name,
    Range,
    Repeat,
    Tokens,
    check_fields,
)

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
# (label of a data source, training questions, times that each comes in one pass)
Taken = tuple[Name, Annotated[int, Range(0, 10**7)], Annotated[int, Range(0, 1000)]]


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up, then constant or cosine decay to zero."""

    learning_rate: Annotated[float, Range(0, 100)] = 1e-6
    warmup_steps: CountOrOff = 0
    schedule: Literal["constant", "cosine"] = "constant"
    b1: Decay = 0.9
    b2: Decay = 0.95
    eps: Annotated[float, Range(0, 1, above=True)] = 1e-8
    weight_decay: Coefficient = 0.0
    clip_grad_norm: Annotated[float, Range(0, 1e12, above=True)] = 1.0
    # of parameters in bfloat16 (compute.param_dtype): moments, updates and gradient sums are in
    # float32
    float32_master: bool = True
    max_bad_steps: Count = 3  # consecutive updates with a non-finite gradient before the run stops

    def validate(self, key: str) -> None:
        check_fields(self, key)


@dataclass(frozen=True)
class SFTConfig:
    """Supervised fine-tuning on chat-format worked solutions; loss on the assistant's
    tokens only.
    """

    # JSONL or Parquet files, or patterns of several ("train-*.parquet"), of conversations or of
    # prompts with what is to be answered; their kinds are known by their columns (docs/data.md)
    files: tuple[Name, ...] = ()
    prompt_field: Name = AUTO  # the column of what is asked, or of whole conversations
    # the column of what is learnt; empty: the assistant's turns of prompt_field
    response_field: str = AUTO
    # (label of a data source, worked training questions, times that each comes in one pass)
    procedural: tuple[Taken, ...] = ()
    # the same with the bare answer, no steps: a cold start has few worked solutions
    answers: tuple[Taken, ...] = ()
    steps: Count = 100
    batch: Batch = 64
    buckets: tuple[Tokens, ...] = (64, 128, 256)
    micro_batch_tokens: BatchTokens = 16_384
    router_aux_coef: Coefficient = 0.01
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(learning_rate=1e-3))
    save_every: CountOrOff = 0  # 0: only at the end

    def validate(self) -> None:
        check_fields(self, "sft")
        b = self.buckets
        check(
            bool(b) and all(x > 1 for x in b) and list(b) == sorted(set(b)),
            f"sft.buckets = {b}: must increase and be above 1",
        )
        for key, rows in (("procedural", self.procedural), ("answers", self.answers)):
            for i, row in enumerate(rows):
                check(min(row[1:]) >= 1, f"sft.{key}[{i}] = {row}: its numbers must be at least 1")
        self.optim.validate("sft.optim")


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
    tis_cap: Cap = 2.0  # C of min(rho, C); 5 in arXiv 2512.01374
    icepop_range: tuple[Bound, Bound] = (0.5, 5.0)  # of a token's rho
    sequence_range: tuple[Bound, Bound] = (0.999, 1.002)  # of a response's geometric mean of rho

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

    rl_zvp: bool = True  # stage 4: entropy-guided advantage for uniform groups
    rl_zvp_alpha: Strength = 0.1
    # stage 1: skip prompts whose recent groups were uniform (data/selection.py)
    select: bool = False
    # shares of all-right and all-wrong groups that it aims at
    select_targets: tuple[Fraction, Fraction] = (1 / 12, 1 / 6)
    # instead of stage 1: prompts by the chance that their group varies, as their label's pass rate
    # tells
    curriculum: bool = False
    # stage 2: a uniform group gets more samples, doubling up to so many; 0: off
    grow_to: Samples = 0
    # each doubling samples at so many times the temperature before; needs rl.correction
    grow_temperature: Temper = 1.0
    # DAPO's instead of stage 4: uniform groups are dropped, further prompts rolled out
    # (experience/policies.py)
    dynamic_sampling: bool = False
    dynamic_batch: Repeat = 3  # prompts of one of its rounds, in times of prompts_per_step
    dynamic_rounds: Count = 10  # at most; what is still missing then is filled with uniform groups

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
    """Stage 3: penalties (rl/shaping.py). Their sum must stay below rewards.smallest_gap; all 0:
    off.
    """

    length_penalty: Bound = 0.0  # of a right answer of max_new_tokens
    length_free_tokens: CountOrOff = 0  # up to here a right answer costs nothing
    # of a right answer that says nothing but what it has said before
    repetition_penalty: Bound = 0.0
    repetition_ngram: Tokens = 4
    # DAPO's, of any answer of max_new_tokens; 0.5 where rewards are 0 and 1
    overlong_penalty: Bound = 0.0
    overlong_buffer_tokens: Tokens = 1  # the penalty grows over the last so many tokens

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
    prompts_per_step: Batch = 32
    group_size: Annotated[int, Range(1, 65_536)] = 8
    updates_per_rollout: Batch = 1  # the rollout's groups are split into this many updates
    epochs: Repeat = 1
    replay: Literal["off", "R2", "R3"] = "R3"
    buckets: tuple[Tokens, ...] = (64, 128, 256)  # sequence lengths of training batches
    micro_batch_tokens: BatchTokens = 16_384
    # divide advantages by the group's standard deviation; dr_grpo never does
    normalize_std: bool = True
    objective: Objective = field(default_factory=default_objective)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    zero_variance: ZeroVarianceConfig = field(default_factory=ZeroVarianceConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    save_every: CountOrOff = 50
    eval_every: CountOrOff = 0
    # the next rollout runs while this one is trained on, from the weights before; needs
    # rl.correction
    one_step_off: bool = False
    # more in flight; what is not whole with the last group of a step goes on in the next; needs
    # rl.correction
    partial_prompts: CountOrOff = 0
    permute_rewards: bool = False  # control experiment: rewards shuffled within each group

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
        self.objective.validate()
        self.correction.validate()
        self.shaping.validate()
        self.zero_variance.validate()
        self.optim.validate("rl.optim")

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
