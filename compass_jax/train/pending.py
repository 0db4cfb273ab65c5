"""An interrupted step in a checkpoint: its finished samples and their routes as arrays of fixed shapes, its progress as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compass_jax.config import RLConfig
from compass_jax.records import Prompt
from compass_jax.rollout.engine import Engine
from compass_jax.train.batch import from_arrays, to_arrays
from compass_jax.train.gather import Samples
from compass_jax.train.refill import Progress, Unfinished


class Pending(NamedTuple):
    """An `Unfinished` without its prompts, as a checkpoint has it."""

    progress: Progress
    arrays: dict[str, Any]  # "current" and, with dynamic sampling, "front"

    def unfinished(self, kept: Sequence[Prompt], prompts: Sequence[Prompt], config: RLConfig, policy_version: int, eos_id: int) -> Unfinished:
        """With the prompts of the kept groups and those of the interrupted round, in order."""

        def samples(name: str, prompts: Sequence[Prompt]) -> Samples:
            if name not in self.arrays:
                return Samples({})
            arrays = dict(self.arrays[name])
            store = arrays.pop("routing", None)
            return Samples(from_arrays(prompts, jax.device_get(arrays), config.capacity, policy_version, eos_id), store)

        return Unfinished(self.progress, samples("front", kept), samples("current", prompts))


def pack(left: Unfinished, engine: Engine, config: RLConfig) -> dict[str, Any]:
    """The arrays of `left`; their shapes depend on the configuration alone, so that `empty` describes them."""
    parts = {"current": (left.current, config.prompts_per_round)}
    if config.zero_variance.dynamic_sampling:
        parts["front"] = left.front, config.prompts_per_step
    out = {}
    for name, (samples, groups) in parts.items():
        rows = groups * config.capacity
        arrays: dict[str, Any] = {key: jnp.asarray(x) for key, x in to_arrays(samples.rollouts, rows, engine.config.max_length).items()}
        store = (engine.new_store(rows) if samples.store is None else samples.store) if config.replay == "R3" else None
        out[name] = arrays if store is None else {**arrays, "routing": store}
    return out


def empty(engine: Engine, config: RLConfig) -> dict[str, Any]:
    """What `pack` gives of nothing."""
    return pack(Unfinished(Progress(), Samples({}), Samples({})), engine, config)
