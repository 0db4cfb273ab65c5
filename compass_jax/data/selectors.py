"""The prompt selector that the settings ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from compass_jax.base.records import Prompt
from compass_jax.config import RewardConfig, SelectionConfig
from compass_jax.config.curriculum import WHOLE_RUN, Stage
from compass_jax.data.difficulty import Measured, PassRates
from compass_jax.data.predictors.inputs import Prediction
from compass_jax.data.selection import (
    EARLIER,
    BandSelector,
    CurriculumSelector,
    PromptSelector,
)


def prompt_selector(
    config: SelectionConfig,
    group_size: int,
    rewards: RewardConfig,
    seed: int,
    stage: Stage = WHOLE_RUN,
    measured: Iterable[Measured] = (),
    prompts: Iterable[Prompt] = (),
    start: Callable[[], Prediction | None] = lambda: None,
) -> PromptSelector:
    """Returns the configured selector. `measured` are pass rates from before the run. Posterior
    selection reads `prompts`, and `start` starts its predictions.
    """
    if stage.mix is not None:
        return BandSelector(stage, PassRates(rewards, EARLIER, measured), seed)
    if config.posterior:
        from compass_jax.data.posterior import PosteriorSelector

        return PosteriorSelector(config, rewards, seed, measured, prompts, start())
    if config.curriculum:
        return CurriculumSelector(group_size, PassRates(rewards, 0.0, measured), seed)
    return PromptSelector(seed)
