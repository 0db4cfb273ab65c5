"""An engine whose samples come from a pool of samplers. It has the interface of the local one, so
that rollout, evaluation and step policies do not differ.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, UInt

from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config import ComputeConfig, MeshConfig, ModelConfig, RolloutConfig
from compass_jax.config.io import to_plain
from compass_jax.devices.sharding import Placement, fetch
from compass_jax.model.moe import empty_routes, unset_id
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.remote.frames import Message
from compass_jax.rollout.remote.pool import Pool
from compass_jax.rollout.remote.requests import most_samples, update
from compass_jax.rollout.remote.settings import EngineSettings
from compass_jax.rollout.remote.weights import owners_of
from compass_jax.rollout.request import Request
from compass_jax.rollout.routes import RouteBuffer
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rollout.stats import RolloutStats
from compass_jax.weights.sync import resolve, sync_to_samplers


class RemoteEngine(Engine):
    """The training's view of its samplers, each with an engine of these settings on `mesh`.

    `placement` is that of the training's devices, on which routes are placed for the update.
    """

    def __init__(
        self,
        pool: Pool,
        model: ModelConfig,
        compute: ComputeConfig,
        rollout: RolloutConfig,
        mesh: MeshConfig,
        end_ids: Sequence[int],
        placement: Placement | None,
        known: int,
    ):
        super().__init__(model, compute, rollout, end_ids, placement, known)
        self.pool, self.mesh_config = pool, mesh
        self.stored = jax.default_backend() != "cpu"
        settings = EngineSettings(
            model,
            compute,
            rollout,
            mesh,
            self.end_ids,
            known,
            resolve(rollout.quantize),
            self.stored,
        )
        pool.use(to_plain(settings))

    @property
    def slot_groups(self) -> int:
        """1: the samplers check that their slots and pages can be split over their devices."""
        return 1

    def receive(self, params: Tree, version: int) -> tuple[int, dict[str, float]]:
        """Gives training parameters to the samplers. Returns their version, which stands for the
        weights, and the metrics of `weights.sync.sync_weights`.
        """
        self.pool.forget_weights()
        tree, metrics = sync_to_samplers(
            params,
            self.model_config,
            self.compute.dtype,
            self.config.quantize,
            self.stored,
            mesh=self.mesh_config,
            layout=self.layout,
        )
        started = time.perf_counter()
        self.pool.publish(version, tree)
        metrics["time/handover_s"] += time.perf_counter() - started
        return version, metrics

    def batcher(  # type: ignore[override]
        self, params: Tree, purpose: Purpose, seed: int, **options: Tree
    ) -> RemoteBatcher:
        """Returns a batcher over the samplers; `params` is what `receive` returned."""
        return RemoteBatcher(self, purpose, seed, **options)

    def route_buffer(self, groups: int, size: int, keep: bool) -> RouteBuffer:
        """Returns a buffer in the host's memory, which a thread may fill during the training."""
        return HostRoutes(self, groups, size, keep)

    def unset_routes(self, rows: int) -> Tree:
        """Returns unset routes `[rows t l k]` in the host's memory; None for a dense model."""
        length = self.config.max_length
        x: Tree = jax.eval_shape(lambda: empty_routes(self.model_config, rows, length))
        return None if x is None else np.full(x.shape, unset_id(x.dtype), x.dtype)

    def holders(self, rows: int) -> Bool[np.ndarray, "processes rows"]:
        """Returns whether a process holds each of `rows` rows of routes: those of its devices, and
        process 0 all, from which unfinished samples continue.
        """
        holders = np.zeros((self.pool.processes, rows), bool)
        holders[0] = True
        if self.placement is not None:
            pieces = owners_of(self.placement.rows(rows), (rows,))
            for ((start, stop),), processes in pieces.items():
                holders[processes, start:stop] = True
        return holders

    def placed(self, routes: Tree, rows: Tree) -> UInt[Array, "n t l k"]:
        """Copies rows to the training's devices; each process those of its devices."""

        def part(index: Tree) -> np.ndarray:
            # A row number past the end stands for unset routes, as in RouteBuffer.read.
            some = np.asarray(rows)[index[0]]
            inside = some < len(routes)
            copied = routes[np.where(inside, some, 0)][(slice(None), *index[1:])]
            copied[~inside] = unset_id(routes.dtype)
            return copied

        shape = (len(rows), *routes.shape[1:])
        if self.placement is None:
            return jnp.asarray(part((slice(None),) * len(shape)))
        return jax.make_array_from_callback(shape, self.placement.rows(len(rows)), part)


class HostRoutes(RouteBuffer):
    """A RouteBuffer in the host's memory; reads copy to the devices. A process gets the routes of
    the rows that its devices hold of an array of all rows, and process 0 all (`holders`).
    """

    def __init__(self, engine: RemoteEngine, groups: int, size: int, keep: bool):
        new = engine.unset_routes if keep else lambda rows: None
        super().__init__(new, engine.taken_routes, groups, size)
        self._engine = engine
        self.holders = engine.holders(len(self))

    def read(self, rows: Tree, copies: bool = False) -> UInt[Array, "n t l k"] | None:
        """Returns the routes of these rows on the training's devices."""
        if self.rows is None:
            return None
        inside = rows < len(self)
        places = self._engine.holders(len(rows))[:, inside]
        if np.all(self.holders[:, rows[inside]] >= places):
            return self._engine.placed(self.rows, rows)
        # Groups were dropped or carried, so that rows are at places of processes that do not hold
        # them. The devices exchange them, as those of a local rollout do.
        every = self._engine.placed(self.rows, np.arange(len(self)))
        return self._take(every, jnp.asarray(rows, jnp.int32))

    def saved(self) -> UInt[Array, "rows t l k"] | None:
        """Returns all rows for a checkpoint."""
        routes: Tree = self._new(len(self)) if self.rows is None else self.rows
        rows: Tree = np.arange(len(self))
        return None if routes is None else self._engine.placed(routes, rows)

    def adopt(self, firsts: Sequence[int], rows: Array | None) -> None:
        """Restores the rows of a checkpoint."""
        super().adopt(firsts, None)
        routes: Tree = None if rows is None or not firsts else np.array(fetch(rows))
        self.rows = routes


class RemoteBatcher:
    """A batcher whose requests run in the samplers; the interface is that of `Batcher`, as far as a
    `Collection` needs it.
    """

    def __init__(
        self,
        engine: RemoteEngine,
        purpose: Purpose,
        seed: int,
        *,
        sampler: Sampler | None = None,
        version: int = 0,
        routes: HostRoutes | None = None,
        stats: RolloutStats | None = None,
    ):
        self.pool = engine.pool
        self.routes = routes
        self.stats = RolloutStats() if stats is None else stats
        self._requests: dict[int, Request] = {}  # unfinished, by number
        self._aborted: list[Request] = []
        fields: JsonObject = {
            "purpose": int(purpose),
            "seed": seed,
            "sampler": asdict(sampler or engine.default_sampler()),
            "routes": routes is not None and routes.rows is not None,
        }
        most = most_samples(engine.config.slots, 1 if routes is None else routes.size)
        holders = np.zeros((0, 0), bool) if routes is None else routes.holders
        self.job = self.pool.open(fields, most, holders)

    def add(self, requests: Sequence[Request], columns: range | None = None) -> None:
        """Queues samples of one prompt, like `Batcher.add`."""
        # New samples share one prefill of the prompt. A sample with tokens has its own.
        single = [x for x in requests if columns is None or x.has_tokens]
        for request in single:
            self._submit([request], range(request.column, request.column + 1))
        if columns is not None and (new := [x for x in requests if x not in single]):
            self._submit(new, columns)

    def _submit(self, requests: Sequence[Request], columns: range) -> None:
        rows: Tree = None if self.routes is None else self.routes.rows
        routes = [
            rows[x.row, : len(x.tokens)] if rows is not None and x.has_tokens else None
            for x in requests
        ]
        numbers = self.pool.submit(self.job, requests, routes, columns)
        self._requests |= zip(numbers, requests, strict=True)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._requests)

    def step(self) -> list[Request]:
        """Waits for the next event and returns the samples that it finishes; none where nothing
        happened for a while.
        """
        event = self.pool.next_event()
        if event.kind != "done" or event.fields["job"] != self.job:
            return []
        finished = self._update(event)
        for request in finished:
            request.is_finished = True
        return finished

    def abort(self) -> list[Request]:
        """Returns the unfinished requests that have tokens. A sample that finishes meanwhile lacks
        its last token, which the next collection draws.
        """
        self.pool.abort(self.job)
        while (event := self.pool.next_event()).kind != "aborted":
            if event.kind in ("done", "cut") and event.fields["job"] == self.job:
                requests = self._update(event)
                for request in requests if event.kind == "done" else ():
                    request.drop_last_token()
                self._aborted += requests
        return [x for x in (*self._requests.values(), *self._aborted) if x.has_tokens]

    def _update(self, event: Message) -> list[Request]:
        updated = []
        for n in event.fields["samples"]:
            request = self._requests.pop(n, None)
            if request is None:
                continue
            update(request, n, event)
            buffer, row = self.routes, request.row
            rows: Tree = None if buffer is None else buffer.rows
            if buffer is not None and rows is not None and buffer.holders[self.pool.process, row]:
                routes = self.pool.routes(n)
                rows[row, : len(routes)] = routes
                rows[row, len(routes) :] = unset_id(rows.dtype)
            updated.append(request)
        for name, value in event.fields.get("stats", {}).items():
            setattr(self.stats, name, getattr(self.stats, name) + value)
        return updated
