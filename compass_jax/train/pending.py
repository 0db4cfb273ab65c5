"""An interrupted step in a checkpoint: its finished samples and their routes as arrays of fixed shapes, progress and scores as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compass_jax.config import RLConfig
from compass_jax.records import Prompt, Score
from compass_jax.rollout.engine import Engine
from compass_jax.train.batch import from_arrays, to_arrays
from compass_jax.train.gather import Samples
from compass_jax.train.refill import Progress, Unfinished


class Pending(NamedTuple):
    """An `Unfinished` without its prompts, as a checkpoint has it."""

    progress: Progress
    arrays: dict[str, Any]  # "current" and, with dynamic sampling, "front"
    scores: dict[str, list[list]]  # the same names: [row, *Score] of each sample with a verdict

    def unfinished(self, kept: Sequence[Prompt], prompts: Sequence[Prompt], config: RLConfig, policy_version: int, eos_id: int) -> Unfinished:
        """With the prompts of the kept groups and those of the interrupted round, in order."""

        def samples(name: str, prompts: Sequence[Prompt]) -> Samples:
            if name not in self.arrays:
                return Samples({})
            arrays = dict(self.arrays[name])
            store = arrays.pop("routing", None)
            scores = {row: Score(*score) for row, *score in self.scores.get(name, ())}
            return Samples(from_arrays(prompts, jax.device_get(arrays), config.capacity, policy_version, eos_id), store, scores)

        return Unfinished(self.progress, samples("front", kept), samples("current", prompts))


def to_json(left: Unfinished) -> dict[str, Any]:
    """Progress and scores, as `from_json` reads them. JSON keeps rewards exactly."""
    parts = {"front": left.front, "current": left.current}
    scores = {name: [[row, *dataclasses.astuple(score)] for row, score in samples.scores.items()] for name, samples in parts.items()}
    return {**dataclasses.asdict(left.progress), "scores": scores}


def from_json(saved: dict[str, Any], arrays: dict[str, Any]) -> Pending:
    """`to_json`'s inverse, with the arrays."""
    progress = {name: value for name, value in saved.items() if name != "scores"}
    return Pending(Progress(**progress), arrays, saved.get("scores", {}))


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
