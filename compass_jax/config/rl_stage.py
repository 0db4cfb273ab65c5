"""The settings of a stage of RL; config/curriculum.py applies them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from compass_jax.config.errors import check
from compass_jax.config.objective import Objective
from compass_jax.config.ranges import CountOrOff, Fraction, Range, Section, Share, Tokens

Band = tuple[Fraction, Fraction, Share]  # lowest and highest pass rate, share of the prompts
GroupSize = Annotated[int, Range(2, 65_536)]
LearningRate = Annotated[float, Range(0, 100, above=True)]
TOLERANCE = 1e-6  # of the sum of a mix's shares, which is 1


@dataclass(frozen=True)
class RLStage(Section):
    """A stage of RL: settings other than None replace the run's until the next stage begins or the
    run ends.
    """

    after_steps: CountOrOff = 0
    """Number of steps of the run after which the stage begins; the first one after 0."""
    mix: tuple[Band, ...] = ()
    """Mix of difficulties: bands of (lowest pass rate, highest pass rate, share of the prompts);
    none: prompts come in their order.
    """
    max_new_tokens: Tokens | None = None
    """Maximum number of new tokens of an answer; none: rollout.max_new_tokens."""
    group_size: GroupSize | None = None
    """Number of samples per prompt; none: rl.group_size."""
    learning_rate: LearningRate | None = None
    """Learning rate (a factor) instead of rl.optim.learning_rate; warm-up and schedule continue."""
    objective: Objective | None = None
    """The policy objective of the stage; none: the run's."""

    def _check(self, key: str) -> None:
        for low, high, _ in self.mix:
            check(low < high, f"{key}.mix: a band from {low:g} to {high:g} holds no pass rate")
        for (_, end, _), (begin, _, _) in pairwise(self.mix):
            check(
                end <= begin,
                f"{key}.mix: a band begins at {begin:g} before the one ahead of it ends, at"
                f" {end:g}; bands must rise and not overlap",
            )
        total = sum(share for *_, share in self.mix)
        check(
            not self.mix or abs(total - 1) < TOLERANCE,
            f"{key}.mix: its shares sum to {total:g}; they must sum to 1",
        )


def check_order(stages: Sequence[RLStage]) -> None:
    """Raises ConfigError unless the stages are in increasing order of their first steps."""
    begins = [stage.after_steps for stage in stages]
    check(
        not stages or (begins[0] == 0 and begins == sorted(set(begins))),
        f"rl.stages: they begin after {', '.join(map(str, begins))} steps (after_steps); the first"
        " must begin after 0, each other one later than the one before it",
    )
