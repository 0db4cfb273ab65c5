"""A run in stages (a curriculum): from given steps on, some settings change.

`at_step` returns the settings of a step. No other code knows of stages: the end of a stage is like
the end of a run, and the next stage resumes from its checkpoint like an extended run.
"""

from __future__ import annotations

from typing import NamedTuple, TypeVar

from compass_jax.config.rl_stage import Band
from compass_jax.config.run import RLRunConfig
from compass_jax.config.training import RLConfig

R = TypeVar("R", bound=RLRunConfig)


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


def at_step(config: R, done_steps: int) -> R:
    """Returns the settings of the step that follows `done_steps` steps, with the stage's settings
    applied and no stages.
    """
    if not config.rl.stages:
        return config
    return config.of_stage(config.rl.stages[stage_at(config.rl, done_steps).number])


def largest_stage(config: R) -> R:
    """Returns the settings of the stage whose rollouts have the most tokens, without stages, for
    memory estimates.
    """
    stages = [config.of_stage(stage) for stage in config.rl.stages] or [config]
    return max(stages, key=lambda one: one.rollout.max_length * one.rl.capacity)
