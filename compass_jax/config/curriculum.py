"""A run in stages (a curriculum): from given steps on, some settings change.

`at_step` returns the settings of a step. No other code knows of stages: the end of a stage is like
the end of a run, and the next stage resumes from its checkpoint like an extended run.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from compass_jax.config.data import RolloutConfig
from compass_jax.config.rl_stage import Band, RLStage
from compass_jax.config.training import RLConfig


class Stage(NamedTuple):
    """The position of a run among its stages."""

    number: int = 0  # index in rl.stages, from 0
    end: int = 0  # number of steps after which the stage ends
    mix: tuple[Band, ...] | None = None  # mix of difficulties; None: the run has no mix
    total: int = 0  # number of stages; 0: a run without stages


WHOLE_RUN = Stage()  # for callers without a step count


def stage_at(rl: RLConfig, done_steps: int) -> Stage:
    """Returns the stage of the step that follows `done_steps` steps; after the last step, the last
    stage.

    A run without stages has a single stage.
    """
    stages = rl.stages
    if not stages:
        return Stage(end=rl.steps)
    last_started = min(done_steps, rl.steps - 1)
    number = max(i for i, stage in enumerate(stages) if stage.after_steps <= last_started)
    later = [stage.after_steps for stage in stages[number + 1 :]]
    mix = stages[number].mix if any(stage.mix for stage in stages) else None
    return Stage(number, min([*later, rl.steps]), mix, len(stages))


def of_stage(
    rl: RLConfig, rollout: RolloutConfig, stage: RLStage
) -> tuple[RLConfig, RolloutConfig]:
    """Returns a run's settings with those of one stage applied, without stages."""
    rate = rl.optim.learning_rate if stage.learning_rate is None else stage.learning_rate
    return replace(
        rl,
        stages=(),
        group_size=stage.group_size or rl.group_size,
        objective=stage.objective or rl.objective,
        optim=replace(rl.optim, learning_rate=rate),
    ), replace(rollout, max_new_tokens=stage.max_new_tokens or rollout.max_new_tokens)


def at_step(
    rl: RLConfig, rollout: RolloutConfig, done_steps: int
) -> tuple[RLConfig, RolloutConfig]:
    """Returns the settings of the step that follows `done_steps` steps, with the stage's settings
    applied and no stages.
    """
    if not rl.stages:
        return rl, rollout
    return of_stage(rl, rollout, rl.stages[stage_at(rl, done_steps).number])


def largest_stage(rl: RLConfig, rollout: RolloutConfig) -> tuple[RLConfig, RolloutConfig]:
    """Returns the settings of the stage whose rollouts have the most tokens, without stages, for
    memory estimates.
    """
    stages = [of_stage(rl, rollout, stage) for stage in rl.stages] or [(rl, rollout)]
    return max(stages, key=lambda one: one[1].max_length * one[0].capacity)
