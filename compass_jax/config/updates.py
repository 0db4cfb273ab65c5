"""How a rollout is turned into updates: their number, micro-batches, and the optimiser of every
stage.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Literal

from compass_jax.config import named
from compass_jax.config.errors import check
from compass_jax.config.ranges import (
    Coefficient,
    Count,
    CountOrOff,
    LongBuckets,
    Name,
    Range,
    Repeat,
    Section,
)
from compass_jax.config.verifiers import Options

Batch = Annotated[int, Range(1, 2**20)]
BatchTokens = Annotated[int, Range(1, 2**31 - 1)]
Decay = Annotated[float, Range(0, 0.9999999)]


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
    It does not act in an update whose gradient is 0.
    """
    clip_grad_norm: Annotated[float, Range(0, 1e12, above=True)] = 1.0
    """Gradient clipping: the largest global norm (a number)."""
    float32_master: bool = True
    """Keep moments, updates and summed gradients in float32 if parameters are in bfloat16."""
    average: Decay = 0.0
    """Average of the weights: the decay (a factor) of an exponential moving average, which
    evaluations, exports and later runs take (docs/howto/optimizer.md); 0: none.
    """
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


@dataclass(frozen=True)
class UpdatesConfig(Section):
    """The updates of an RL run: `updates_per_rollout` x `epochs` on each of `steps` rollouts."""

    KEY: ClassVar[str] = "rl"

    steps: Count = 100
    """Number of steps of the run, each a rollout and its updates."""
    updates_per_rollout: Batch = 1
    """Number of updates into which the groups of a rollout are split."""
    epochs: Repeat = 1
    """Number of times (epochs) that a rollout is trained on."""
    buckets: LongBuckets = (64, 128, 256)
    """Padded lengths of a training sequence in tokens."""
    packed_row_tokens: CountOrOff = 0
    """Length in tokens of rows that several sequences share; attention stays within each sequence.
    A row has space for packed_row_tokens / buckets[0] sequences, and for each the objective
    computes buckets[-1] tokens, so a short first bucket takes memory. 0: one sequence a row.
    """
    micro_batch_tokens: BatchTokens = 16_384
    """Maximum number of tokens of a micro-batch, padding included."""
    optim: OptimConfig = field(default_factory=OptimConfig)
    """The optimiser of reinforcement learning."""

    def _check(self, key: str) -> None:
        super()._check(key)
        check(
            not self.packed_row_tokens or self.packed_row_tokens >= self.buckets[-1],
            f"rl.packed_row_tokens = {self.packed_row_tokens} is less than the longest sequence"
            f" (rl.buckets end at {self.buckets[-1]}); set a multiple of it, or 0",
        )

    @property
    def longest_row(self) -> int:
        """Tokens of the longest training row."""
        return self.packed_row_tokens or self.buckets[-1]

    @property
    def total_updates(self) -> int:
        """The number of optimiser updates of the whole run."""
        return self.steps * self.updates_per_rollout * self.epochs

    def check_whole_groups(self, prompts_per_step: int) -> None:
        """Raises ConfigError unless each update of a rollout has as many groups as the others."""
        check(
            prompts_per_step % self.updates_per_rollout == 0,
            f"rl.prompts_per_step = {prompts_per_step} is not a multiple of"
            f" rl.updates_per_rollout = {self.updates_per_rollout}",
        )
