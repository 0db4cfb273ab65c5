"""The collector's workload on the engine, for the list of compiled programs."""

from __future__ import annotations

from compass_jax.config import SamplingConfig
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.programs import EngineWorkload


def training_use(engine: Engine, config: SamplingConfig, talks: bool) -> EngineWorkload:
    """Returns the collector's workload on the engine; `talks` is whether environments answer some
    samples.
    """
    return EngineWorkload(
        "",
        config.capacity,
        (engine.default_sampler(),),
        rows=config.routed_groups * config.capacity if config.replay == "R3" else 0,
        rows_together=config.prompts_per_step * config.capacity,
        goes_on=bool(talks or config.policy.carries or engine.config.cache_pages),
    )
