"""An interrupted step, or what partial rollouts carry, in a checkpoint: samples and routes as
arrays of fixed shapes, the rest as JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
    prompts: list[list[int]] | None = None  # [id, visit] of those that are carried

    def unfinished(
        self, kept: Sequence[Prompt], prompts: Sequence[Prompt], config: RLConfig, engine: Engine
    ) -> Unfinished:
        """With the prompts of the kept groups and those of the interrupted round, in order."""

        def samples(name: str, prompts: Sequence[Prompt]) -> Samples:
            if name not in self.arrays:
                return Samples({})
            arrays = dict(self.arrays[name])
            store = engine.adopt(arrays.pop("routing", None))
            scores = {row: Score(*score) for row, *score in self.scores.get(name, ())}
            finished, begun = from_arrays(
                prompts, jax.device_get(arrays), config.capacity, engine.eos_id
            )
            return Samples(finished, store, scores, begun)

        return Unfinished(self.progress, samples("front", kept), samples("current", prompts))

    def carried(
        self, find: Callable[[int, int], Prompt], config: RLConfig, engine: Engine
    ) -> Unfinished:
        """With the prompts that `find(id, visit)` gives."""
        prompts = [find(*key) for key in self.prompts or ()]
        return self.unfinished((), prompts, config, engine)._replace(prompts=prompts)


def to_json(left: Unfinished) -> dict[str, Any]:
    """Progress and scores, as `from_json` reads them. JSON keeps rewards exactly."""
    parts = {"front": left.front, "current": left.current}
    scores = {
        name: [[row, *dataclasses.astuple(score)] for row, score in samples.scores.items()]
        for name, samples in parts.items()
    }
    prompts = (
        None if left.prompts is None else [[prompt.id, prompt.visit] for prompt in left.prompts]
    )
    return {"progress": dataclasses.asdict(left.progress), "scores": scores, "prompts": prompts}


def from_json(saved: dict[str, Any], arrays: dict[str, Any]) -> Pending:
    """`to_json`'s inverse, with the arrays."""
    return Pending(Progress(**saved["progress"]), arrays, saved["scores"], saved["prompts"])


def pack(left: Unfinished, engine: Engine, config: RLConfig) -> dict[str, Any]:
    """The arrays of `left`; their shapes depend on the configuration alone, so that `empty`
    describes them.
    """
    parts = {"current": (left.current, config.prompts_per_round)}
    if config.zero_variance.dynamic_sampling:
        parts["front"] = left.front, config.prompts_per_step
    out = {}
    for name, (samples, groups) in parts.items():
        rows = groups * config.capacity
        saved = to_arrays(samples.rollouts, samples.begun, rows, engine.config.max_length)
        arrays: dict[str, Any] = {key: jnp.asarray(x) for key, x in saved.items()}
        store = (
            (engine.new_store(rows) if samples.store is None else samples.store)
            if config.replay == "R3"
            else None
        )
        out[name] = arrays if store is None else {**arrays, "routing": store}
    return out


def empty(engine: Engine, config: RLConfig) -> dict[str, Any]:
    """What `pack` gives of nothing."""
    return pack(Unfinished(Progress(), Samples({}), Samples({})), engine, config)
