"""What an RL update computes: advantage, objective, correction, penalties, router replay."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from compass_jax.config.advantage import Advantage
from compass_jax.config.correction import Correction
from compass_jax.config.errors import check
from compass_jax.config.objective import Objective
from compass_jax.config.ranges import Bound, Coefficient, CountOrOff, Range, Section, Tokens
from compass_jax.config.sampling import ReplayConfig
from compass_jax.config.seam import seam_class

Strength = Annotated[float, Range(0, 1000, above=True, note="rl_zvp=False switches it off")]


@dataclass(frozen=True)
class RLZVPConfig(Section):
    """Advantages for groups with equal rewards (algorithms section 2, stage 4)."""

    KEY: ClassVar[str] = "rl.zero_variance"

    rl_zvp: bool = False
    """RL-ZVP: advantages from entropies for groups with equal rewards (stage 4, arXiv 2509.21880).
    """
    rl_zvp_alpha: Strength = 0.1
    """Factor of RL-ZVP's advantages, which are entropies in nats or differences of them."""


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
class AlgorithmConfig(ReplayConfig):
    """What an update computes. `prepare` takes it as a static argument, so a setting here
    recompiles it.
    """

    KEY: ClassVar[str] = "rl"

    advantage: Advantage = field(default_factory=lambda: seam_class(Advantage, "grpo")())
    """The advantage of a response within its group, and its settings."""
    objective: Objective = field(default_factory=lambda: seam_class(Objective, "grpo")())
    """The policy objective and its settings."""
    correction: Correction = field(default_factory=lambda: seam_class(Correction, "off")())
    """Correction of the mismatch between rollout and training."""
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    """Penalties on length and repetition (stage 3)."""
    zero_variance: RLZVPConfig = field(default_factory=RLZVPConfig)
    """Advantages for groups whose rewards are all equal."""
    entropy_bonus: Coefficient = 0.0
    """Bonus on the policy's entropy (a factor, the advantage of a nat; docs/howto/failures.md); 0:
    none.
    """
    mask_truncated: bool = False
    """Overlong filtering: train on no answer that max_new_tokens cuts off; its reward still counts
    in its group (DAPO, arXiv 2503.14476, section 3.4).
    """
    permute_rewards: bool = False
    """Control experiment: shuffle the rewards within each group, which should teach nothing."""

    @property
    def uses_reference(self) -> bool:
        """Whether the run keeps a reference policy and scores with it."""
        return self.objective.kl_coef > 0

    @property
    def zero_advantage_is_idle(self) -> bool:
        """Whether rows without any advantage have no gradient, as far as rewards alone tell."""
        terms = self.objective.kl_coef or self.objective.router_aux_coef
        every_token = self.zero_variance.rl_zvp or self.entropy_bonus
        return self.objective.needs_advantage and not terms and not every_token

    def _check(self, key: str) -> None:
        super()._check(key)
        self.advantage.validate()
        self.objective.validate()
        if not self.advantage.uniform_teaches:
            return
        name = f"rl.advantage.name = {self.advantage.name!r}"
        check(
            not self.zero_variance.rl_zvp,
            f"rl.zero_variance.rl_zvp with {name}: both give groups of equal rewards an advantage;"
            " switch rl_zvp off, or take another advantage, such as rloo",
        )
        check(
            not self.permute_rewards,
            f"rl.permute_rewards with {name}: rewards that are shuffled within a group still differ"
            " from its prediction, so that they teach; take another advantage, such as rloo",
        )
