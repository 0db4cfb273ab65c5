"""A run in stages (a curriculum): from a step on some of the run's own settings are others.

`at_step` says what the settings are at a step. Everything else knows no stages: the end of one is
like the end of a run, and the next goes on from its checkpoint like a run that was made longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, NamedTuple

from compass_jax.config.errors import ConfigError, check
from compass_jax.config.objective import Objective
from compass_jax.config.ranges import (
    CountOrOff,
    Fraction,
    Range,
    Share,
    Tokens,
    check_fields,
    shown,
)

if TYPE_CHECKING:
    from compass_jax.config.run import RunConfig
    from compass_jax.config.training import RLConfig

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


class Stage(NamedTuple):
    """Where a run stands among its stages."""

    number: int = 0  # from 0, as rl.stages counts them
    end: int = 0  # steps of the run after which it ends
    mix: tuple[Band, ...] | None = None  # None: no stage of the run has one
    total: int = 0  # of all stages; 0: the run has none


WHOLE_RUN = Stage()  # where nobody counts its steps


def stage_at(rl: RLConfig, done_steps: int) -> Stage:
    """The stage of the step that comes after `done_steps` steps; after the run's last step, the
    stage of that one. A run without stages is one stage.
    """
    stages: Sequence[RLStage] = rl.stages
    if not stages:
        return Stage(end=rl.steps)
    begun = min(done_steps, rl.steps - 1)
    number = max(i for i, stage in enumerate(stages) if stage.after_steps <= begun)
    later = [stage.after_steps for stage in stages[number + 1 :]]
    mix = stages[number].mix if any(stage.mix for stage in stages) else None
    return Stage(number, min([*later, rl.steps]), mix, len(stages))


def at_step(config: RunConfig, done_steps: int) -> RunConfig:
    """The settings of the step that comes after `done_steps` steps, without stages: what the stage
    says is written where the run's own setting was.
    """
    if not config.rl.stages:
        return config
    return _of_stage(config, config.rl.stages[stage_at(config.rl, done_steps).number])


def largest_stage(config: RunConfig) -> RunConfig:
    """The settings of the stage whose rollouts may have the most tokens, without stages: what a
    device must have room for.
    """
    found = [_of_stage(config, stage) for stage in config.rl.stages] or [config]
    return max(found, key=lambda one: one.rollout.max_length * one.rl.capacity)


def _of_stage(config: RunConfig, stage: RLStage) -> RunConfig:
    rl, rollout = config.rl, config.rollout
    rate = rl.optim.learning_rate if stage.learning_rate is None else stage.learning_rate
    return replace(
        config,
        rollout=replace(rollout, max_new_tokens=stage.max_new_tokens or rollout.max_new_tokens),
        rl=replace(
            rl,
            stages=(),
            group_size=stage.group_size or rl.group_size,
            objective=stage.objective or rl.objective,
            optim=replace(rl.optim, learning_rate=rate),
        ),
    )


def check_stages(rl: RLConfig) -> None:
    """Raises ConfigError where the stages of a run do not follow each other, or cannot share what
    is kept from the first to the last.
    """
    stages: Sequence[RLStage] = rl.stages
    for i, stage in enumerate(stages):
        stage.validate(f"rl.stages[{i}]")
    begins = [stage.after_steps for stage in stages]
    check(
        not stages or (begins[0] == 0 and begins == sorted(set(begins))),
        f"rl.stages: they begin after {', '.join(map(str, begins))} steps (after_steps); the first"
        " must begin after 0, each other one later than the one before it",
    )
    zero = rl.zero_variance
    for name in ("select", "curriculum"):
        check(
            not getattr(zero, name) or not any(stage.mix for stage in stages),
            f"rl.zero_variance.{name} and the mix of a stage in rl.stages both decide which prompts"
            " are rolled out: leave one of them out",
        )
    kept = {(stage.objective or rl.objective).kl_coef > 0 for stage in stages}
    check(
        len(kept) < 2,
        "rl.stages: the objective of one stage has a kl_coef and that of another has none; the"
        " reference policy is kept from the run's beginning or not at all",
    )


def check_each_stage(config: RunConfig) -> RunConfig:
    """Returns `config`, or raises ConfigError, naming the stage, where the settings of one together
    could not be a run's.
    """
    for i, stage in enumerate(config.rl.stages):
        try:
            _of_stage(config, stage).validate_for_rl()
        except ConfigError as error:
            raise ConfigError(f"rl.stages[{i}] = {shown(stage)}: {error}") from error
    return config
