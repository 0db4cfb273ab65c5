"""The rollout's weights, and their hand-over after each step's updates."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from compass_jax.base.aliases import Tree
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.engine_api import RolloutEngine
from compass_jax.rollout.plain_engine import PlainEngine
from compass_jax.rollout.remote.remote import RemoteEngine
from compass_jax.training import trained
from compass_jax.training.learner import Learner
from compass_jax.training.own_engine import ByLoading
from compass_jax.training.own_judge import PolicyJudge
from compass_jax.weights.sync import sync_weights


class WeightTransport(Protocol):
    """Brings the learner's parameters to the engine that samples with them."""

    is_local: bool  # whether the weights are this process's, so that a judge can use them

    def send(self, params: Tree, version: int, /) -> tuple[Tree, dict[str, float]]:
        """Takes training parameters over. Returns what the engine takes as its weights, and metrics
        (time/handover_s).
        """
        ...


class WithinProcess:
    """Converts parameters for the engine on this process's devices, over a mesh from device to
    device.
    """

    is_local = True

    def __init__(self, engine: Engine):
        self._engine = engine

    def send(self, params: Tree, version: int):
        """Returns the parameters in the engine's layout and precision, and the bytes and seconds
        that it took.
        """
        engine = self._engine
        return sync_weights(
            params,
            engine.model_config,
            engine.compute.dtype,
            engine.config.quantize,
            placement=engine.placement,
            layout=engine.layout,
        )


class ToSamplers:
    """Publishes parameters to the samplers of a pool."""

    is_local = False

    def __init__(self, engine: RemoteEngine):
        self.send = engine.receive


def transport_of(engine: RolloutEngine) -> WeightTransport:
    """Returns the transport to an engine: this package's, or one from outside."""
    if isinstance(engine, PlainEngine):
        return ByLoading(engine)
    if isinstance(engine, RemoteEngine):
        return ToSamplers(engine)
    assert isinstance(engine, Engine)
    return WithinProcess(engine)


class RolloutWeights:
    """The weights of the rollout, which `transport` brings there. A judge that is the policy uses
    them too.
    """

    def __init__(self, transport: WeightTransport, judge: PolicyJudge):
        self._transport, self._judge = transport, judge
        self.params: Tree = None

    def sync(self, learner: Learner) -> dict[str, float]:
        """Takes the learner's parameters over; returns the transport's metrics."""
        return self._take(learner.params, learner.version, learner.version)

    @contextlib.contextmanager
    def averaged(self, learner: Learner) -> Iterator[dict[str, float]]:
        """Gives the rollout the average of the weights (rl.optim.average) instead of the policy,
        for an evaluation. Yields the metrics of both syncs, which are complete afterwards; no-op
        without metrics for a run that keeps no average.
        """
        metrics: dict[str, float] = {}
        if learner.state.average is None:
            yield metrics
            return
        started = time.perf_counter()
        average = trained.full_average(learner.config.lora, learner.state, learner.frozen)
        # A judge stores its verdicts by version: the average must have none of the policy's.
        self._take(average, learner.version, -1 - learner.version)
        del average
        before_s = time.perf_counter() - started
        yield metrics
        started = time.perf_counter()
        self.sync(learner)
        metrics["time/average_s"] = before_s + time.perf_counter() - started

    def _take(self, params: Tree, version: int, judge_version: int) -> dict[str, float]:
        # The old weights are no longer needed: their memory is free for the new ones.
        self.params = None
        self._judge.use(None, judge_version)
        self.params, metrics = self._transport.send(params, version)
        if self._transport.is_local:
            self._judge.use(self.params, judge_version)
        return metrics
