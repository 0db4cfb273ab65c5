"""A run in stages (a curriculum): from a step on some of the run's own settings are others.

`at_step` says what the settings are at a step. Everything else knows no stages: the end of one is
like the end of a run, and the next goes on from its checkpoint like a run that was made longer.
"""

from __future__ import annotations

from typing import NamedTuple

from compass_jax.config.rl_stage import Band
from compass_jax.config.run import RunConfig, of_stage
from compass_jax.config.training import RLConfig


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
    stages = rl.stages
    if not stages:
        return Stage(end=rl.steps)
    begun = min(done_steps, rl.steps - 1)
    number = max(i for i, stage in enumerate(stages) if stage.after_steps <= begun)
    later = [stage.after_steps for stage in stages[number + 1 :]]
    mix = stages[number].mix if any(stage.mix for stage in stages) else None
    return Stage(number, min([*later, rl.steps]), mix, len(stages))


def at_step(config: RunConfig, done_steps: int) -> RunConfig:
    """Returns the settings of the step after `done_steps` steps, without stages: the stage's
    settings replace the run's.
    """
    if not config.rl.stages:
        return config
    return of_stage(config, config.rl.stages[stage_at(config.rl, done_steps).number])


def largest_stage(config: RunConfig) -> RunConfig:
    """Returns the settings of the stage whose rollouts have the most tokens, without stages, for
    estimates of memory.
    """
    found = [of_stage(config, stage) for stage in config.rl.stages] or [config]
    return max(found, key=lambda one: one.rollout.max_length * one.rl.capacity)
