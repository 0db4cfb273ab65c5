"""The settings of one stage of RL; config/curriculum.py says what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

from compass_jax.config.errors import check
from compass_jax.config.objective import Objective
from compass_jax.config.ranges import CountOrOff, Fraction, Range, Share, Tokens, check_fields

Band = tuple[Fraction, Fraction, Share]  # lowest and highest pass rate, share of the prompts
GroupSize = Annotated[int, Range(2, 65_536)]
LearningRate = Annotated[float, Range(0, 100, above=True)]
WITHIN = 1e-6  # of 1, which the shares of a mix sum to


@dataclass(frozen=True)
class RLStage:
    """One stage of RL: what it says instead of the run's own settings, where it is not none, until
    the next stage begins or the run ends.
    """

    after_steps: CountOrOff = 0
    """The stage begins after so many steps of the run; the first one after 0."""
    mix: tuple[Band, ...] = ()
    """Prompts are drawn by difficulty: the lowest and the highest pass rate of each band, and its
    share of the prompts; none: they come as they are.
    """
    max_new_tokens: Tokens | None = None
    """An answer ends after this many tokens at the latest; none: as rollout.max_new_tokens says."""
    group_size: GroupSize | None = None
    """Each prompt gets so many samples; none: as rl.group_size says."""
    learning_rate: LearningRate | None = None
    """This factor takes the place of rl.optim.learning_rate, whose warm-up and schedule go on."""
    objective: Objective | None = None
    """The policy objective of the stage; none: the run's."""

    def validate(self, key: str) -> None:
        check_fields(self, key)
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
            not self.mix or abs(total - 1) < WITHIN,
            f"{key}.mix: its shares sum to {total:g}; they must sum to 1",
        )


def check_order(stages: Sequence[RLStage]) -> None:
    """Raises ConfigError where a stage cannot be meant, or stages do not follow each other."""
    for i, stage in enumerate(stages):
        stage.validate(f"rl.stages[{i}]")
    begins = [stage.after_steps for stage in stages]
    check(
        not stages or (begins[0] == 0 and begins == sorted(set(begins))),
        f"rl.stages: they begin after {', '.join(map(str, begins))} steps (after_steps); the first"
        " must begin after 0, each other one later than the one before it",
    )
