"""What a checkpoint of an RL run has, beside the learner: the samples in flight, and the state of
each part of the run by its name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax

from compass_jax.base.aliases import Json, JsonObject
from compass_jax.config import RunConfig
from compass_jax.data.stream import PromptStream
from compass_jax.experience import saved_samples
from compass_jax.experience.buffer import ExperienceBuffer
from compass_jax.experience.collect import Collector
from compass_jax.model.params import in_layout, placed_structs, stack
from compass_jax.model.transformer import Transformer, init_params
from compass_jax.training import optim, trained
from compass_jax.training.hooks.base import Hooks
from compass_jax.training.learner import Learner
from compass_jax.weights import checkpoint, digests
from compass_jax.weights.adapters import adapter_meta, check_base
from compass_jax.weights.checkpoint import CheckpointMismatch, Checkpoints, ValidCheckpoint
from compass_jax.weights.manifest import META
from compass_jax.weights.recorded import check_recorded_routes
from compass_jax.weights.start import VOCAB_ROWS, first_parameters
from compass_jax.weights.state import joined, shapes, split

PENDING, IN_META = "pending", "in_meta"  # the samples in flight; the arrays that `meta` has
IN_FLIGHT = "in_flight"  # the folder with what came after the newest checkpoint
OF = "of"  # the digest of that checkpoint's meta.json


class Stateful(Protocol):
    """A part of a run whose state is JSON with arrays in it."""

    def state(self) -> JsonObject:
        """Returns the state for a checkpoint."""
        ...

    def restore(self, state: Json, /) -> None:
        """Returns to a state."""
        ...


@dataclass
class SavedRun:
    """Writes and reads the checkpoints of a run.

    parts: the parts whose state is JSON, by their names in a checkpoint. vocab_rows: the rows of
    the vocabulary that the exported model has.
    """

    config: RunConfig
    checkpoints: Checkpoints
    collect: Collector
    buffer: ExperienceBuffer
    stream: PromptStream
    parts: Mapping[str, Stateful]
    hooks: Hooks
    vocab_rows: int = 0
    # step and policy version of the newest checkpoint, and the digest of its meta.json
    _newest: tuple[int, int, str] = (-1, -1, "")

    def save(self, step: int, learner: Learner, *, wait: bool = True) -> None:
        """Writes checkpoint `step`, with the unfinished samples; in the background unless `wait`.
        Where the checkpoint of this step has the learner, writes what has come since alone: a
        preemption may leave too little time for the rest.
        """
        meta, in_meta = split(
            {
                "kind": "rl",
                VOCAB_ROWS: self.vocab_rows,
                **adapter_meta(self.config.lora, self.config.init_from, learner.frozen),
                PENDING: None if self.buffer.empty else saved_samples.state(self.buffer),
                "step_policy": self.buffer.policy_state,
                "hooks": self.hooks.state(),
                **{name: part.state() for name, part in self.parts.items()},
            }
        )
        if in_meta and self._newest[:2] == (step, learner.version):
            self.checkpoints.wait()
            with Checkpoints(self._in_flight, self.config.model, keep=1) as samples:
                samples.save(step, {IN_META: in_meta}, {**meta, OF: self._newest[2]}, wait=True)
            return
        arrays: JsonObject = {"state": stack(learner.state)}
        # The reference of adapters is their base, which init_from names.
        if learner.reference is not None and learner.frozen is None:
            arrays["reference"] = stack(learner.reference)
        if in_meta:
            arrays[IN_META] = in_meta
        self.checkpoints.save(step, arrays, meta, wait=wait)
        digest = digests.of_bytes(json.dumps(meta).encode()).value
        self._newest = step, learner.version, digest

    @property
    def _in_flight(self) -> str:
        return f"{self.config.directory}/{IN_FLIGHT}"

    def newest_samples(self, newest: ValidCheckpoint) -> ValidCheckpoint:
        """Returns the save of the samples that were in flight after a checkpoint, or the
        checkpoint.
        """
        step = newest.manifest.step
        if not Path(self._in_flight).is_dir() or checkpoint.latest(self._in_flight) != step:
            return newest
        samples = checkpoint.find(self._in_flight, step)
        return samples if samples.meta()[OF] == newest.manifest.files[META].value else newest

    def restore(
        self, newest: ValidCheckpoint, model: Transformer, tell: Callable[[str], None]
    ) -> Learner:
        """Returns to a checkpoint; returns its learner."""
        samples = self.newest_samples(newest)
        config, meta = self.config, samples.meta()
        if meta.get(PENDING) and "samples" not in meta[PENDING]:
            raise CheckpointMismatch(
                f"{newest.path} has unfinished samples in the form of an earlier version: continue"
                " with that version to the end of the step, or remove this checkpoint to repeat the"
                " steps after the one before it"
            )
        abstract, in_meta = self._abstract(model), shapes(meta)
        abstract_samples = {IN_META: self._with_places(in_meta)} if in_meta else {}
        # A checkpoint of adapters does not have their base.
        frozen = (
            first_parameters(config.init_from, config.seed, model) if config.lora.acts else None
        )
        if frozen is not None:
            check_base(newest.path, meta, frozen)
        if samples is newest:
            abstract |= abstract_samples
        arrays = checkpoint.restore(
            newest, abstract, model=config.model, subset=samples is not newest
        )[1]
        if samples is not newest:
            arrays |= checkpoint.restore(samples, abstract_samples, model=config.model)[1]
        state, reference = (
            in_layout(arrays.get(name), model.layout) for name in ("state", "reference")
        )
        meta = joined(meta, arrays.get(IN_META, {}))
        self.vocab_rows = meta.get(VOCAB_ROWS, config.model.vocab_size)
        for name, part in self.parts.items():
            if name in meta:
                part.restore(meta[name])
            else:
                tell(f"the checkpoint has no state of {name}, which begins anew")
        self.buffer.policy_state = meta.get("step_policy", {})
        # Checkpoints of older commits have the guard's state alone.
        states = meta.get("hooks", {"guard": meta.get("guard", {})})
        self.hooks.restore(states, newest.manifest.step, tell)
        if meta[PENDING]:
            self._restore_in_flight(meta[PENDING], str(samples.path))
        learner = Learner(config.learner, model, state, reference, frozen, config.directory)
        digest = newest.manifest.files[META].value
        self._newest = newest.manifest.step, learner.version, digest
        return learner

    def earlier(self, last: int, learner: Learner) -> tuple[int, Learner]:
        """Returns the newest checkpoint's step up to `last` with a learner in its state; step 0,
        with the first parameters, where there is none.
        """
        config, model = self.config, learner.model
        # A checkpoint may still be being written in the background.
        self.checkpoints.wait()
        step = checkpoint.latest(config.directory, last)
        if step is None:
            params = first_parameters(config.init_from, config.seed, model)
            return 0, Learner.start(config.learner, model, params, config.directory)
        # Only the state: the reference and the base of adapters are never updated.
        abstract = {"state": self._abstract(model)["state"]}
        path = checkpoint.find(config.directory, step)
        arrays = checkpoint.restore(path, abstract, model=config.model, subset=True)[1]
        state = in_layout(arrays["state"], model.layout)
        return step, Learner(
            config.learner,
            model,
            state,
            learner.reference,
            learner.frozen,
            config.directory,
        )

    def _abstract(self, model: Transformer) -> JsonObject:
        """Returns the shapes of a learner's arrays, with their places on the devices."""
        config = self.config

        def fresh() -> JsonObject:
            key = jax.random.key(0)
            params = init_params(config.model, config.compute, key)
            tree, frozen = trained.split(config.lora, Transformer(config.model), params, key)
            state = optim.init_state(tree, config.rl.optim, config.rl.total_updates)
            copies = config.rl.uses_reference and frozen is None
            return {"state": state, **({"reference": params} if copies else {})}

        return placed_structs(jax.eval_shape(fresh), config.model, model.placement)

    def _with_places(
        self, in_meta: dict[str, jax.ShapeDtypeStruct]
    ) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays in `meta`, with the routes where the engine has them:
        each process reads its rows.
        """
        placement, name = self.collect.engine.placement, f"{PENDING}.routes"
        if name in in_meta and placement is not None:
            routes = in_meta[name]
            sharding = placement.rows(len(routes))
            in_meta[name] = jax.ShapeDtypeStruct(routes.shape, routes.dtype, sharding=sharding)
        return in_meta

    def _restore_in_flight(self, state: JsonObject, path: str) -> None:
        routes = self.collect.engine.adopt(state["routes"])
        if routes is not None:
            if len(routes) != len(self.buffer.routes):
                raise CheckpointMismatch(
                    f"{path} has routes of unfinished or held samples in {len(routes)} rows, and"
                    f" this configuration has {len(self.buffer.routes)}: rl.hooks that hold routes"
                    " have changed; continue with the hooks of the run"
                )
            lengths = saved_samples.row_lengths(state, len(routes))
            check_recorded_routes(lengths, routes, self.config.model, path)
        saved_samples.restore(self.buffer, {**state, "routes": routes}, self.stream.find)
