"""The parts of a server, put together."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from compass_jax.apps.tinker.api import make_app
from compass_jax.apps.tinker.devices import DeviceThread
from compass_jax.apps.tinker.models import Models
from compass_jax.apps.tinker.sample_routes import SampleRoutes
from compass_jax.apps.tinker.sampling import SampleQueue, WeightCopies
from compass_jax.apps.tinker.service import Service
from compass_jax.apps.tinker.settings import Base
from compass_jax.apps.tinker.states import States
from compass_jax.apps.tinker.training_jobs import TrainingJobs
from compass_jax.rollout.serving.guard import Guard
from compass_jax.rollout.serving.limits import Limits


class TinkerServer:
    """A base model, and once it is `open` the models that clients train."""

    def __init__(self, base: Base):
        self.base = base

    def open(
        self,
        *,
        states: str | Path,
        routes_gib: float = 0.25,
        max_models: int = 4,
        max_sessions: int = 64,
        weight_copies: int = 2,
        max_waiting: int = 64,
    ) -> None:
        """Restores the models of the folder `states`, and starts the thread of the devices."""
        self.states = States(states, self.base.model.config)
        self.routes = SampleRoutes(self.base.engine, routes_gib)
        self.models = Models(self.base, self.states, self.routes, max_models)
        copies = WeightCopies(self.models.decoding, weight_copies)
        samples = SampleQueue(self.base.engine, self.routes, copies, self.base.tokenizer)
        self.devices = DeviceThread(samples, max_waiting)
        jobs = TrainingJobs(self.models, copies)
        self.service = Service(self.models, self.devices, jobs, max_sessions)
        self.devices.start()

    def app(self, limits: Limits, hosts: Sequence[str] = (), key: str | None = None) -> Guard:
        """Returns the application for HTTP."""
        return make_app(self.service, limits, hosts, key)

    def close(self, timeout_s: float | None = None) -> None:
        """Ends the thread of the devices."""
        self.devices.stop(timeout_s)
        self.states.close()
