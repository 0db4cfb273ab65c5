"""The models of a server: their creation, the order of their requests, and their return after a
restart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container
from dataclasses import dataclass

import jax

from compass_jax.apps.tinker.answers import Answer, Steps
from compass_jax.apps.tinker.errors import RequestError, RestoredError
from compass_jax.apps.tinker.model import TrainedModel
from compass_jax.apps.tinker.sample_routes import SampleRoutes
from compass_jax.apps.tinker.settings import Base, lora_of
from compass_jax.apps.tinker.states import ModelRecord, States, abstract_of
from compass_jax.base.aliases import JsonObject, Tree
from compass_jax.config.lora import LoRAConfig
from compass_jax.training import trained
from compass_jax.training.learner import Learner

BASE = "base"  # name of the base model's weights for sampling


@dataclass
class Model:
    """A model, and the number of its client's next request."""

    id: str
    options: JsonObject
    trained: TrainedModel | None = None  # by the thread of the devices
    next: int = 1
    lost: str = ""  # what a restart has lost, until the client loads a state

    @property
    def is_full(self) -> bool:
        """Whether all weights are trained."""
        return self.options["rank"] == 0

    def ready(self) -> TrainedModel:
        """Returns the model. Raises RequestError before it is made, and after a restart that has
        lost updates.
        """
        if self.lost:
            raise RestoredError(self.lost)
        if self.trained is None:
            raise RequestError(f"the model {self.id} was not made: see the answer to create_model")
        return self.trained


class Models:
    """The models by their ids.

    Args:
        base: the base of all of them.
        states: where they are saved.
        routes: the routes of samples.
        most: maximum number of models.
    """

    def __init__(self, base: Base, states: States, routes: SampleRoutes, most: int):
        self.base, self.states, self.most = base, states, most
        self._routes = routes
        self._models: dict[str, Model] = {}
        for record in list(states.record.models.values()):
            self._models[record.model] = self._returned(record)

    def __contains__(self, model: str) -> bool:
        return model in self._models

    def get(self, model: str) -> Model:
        """Returns a model. Raises RequestError for an id that is not known."""
        if model not in self._models:
            raise RequestError(f"there is no model {model[:100]!r}; create it first", status=404)
        return self._models[model]

    def remove(self, model: str) -> None:
        """Removes a model, and frees its memory."""
        del self._models[model]
        self.states.note(event="model_end", model=model)

    def add(self, model: str, options: JsonObject, replaced: Container[str] = ()) -> Model:
        """Registers a model. Raises RequestError if there are too many.

        replaced: models that give up their place to one with full parameters.
        """
        lora_of(options, self.base.model.config)
        for other in [x for x in self._models.values() if x.is_full and not options["rank"]]:
            if other.id not in replaced:
                text = "a model with full parameters is open, and there may be one at a time"
                raise RequestError(f"{text}; end its session, or set a rank")
            self.remove(other.id)
        if len(self._models) >= self.most:
            raise RequestError(f"{self.most} models are open, the most that may be; unload one")
        self._models[model] = Model(model, options)
        self.states.note(event="model", model=model, options=options)
        return self._models[model]

    def make(self, model: Model) -> None:
        """Creates a model's parameters."""
        lora = lora_of(model.options, self.base.model.config)
        config = dataclasses.replace(self.base.learner, lora=lora, seed=model.options["seed"])
        learner = Learner.start(config, self.base.model, self.base.params)
        model.trained = TrainedModel(learner, self._routes)

    def load(self, model: Model, path: str, optimizer: bool) -> None:
        """Brings a model to a saved state. Raises RequestError for one of another model."""
        meta = self.states.meta(path)
        if meta["rank"] != model.options["rank"]:
            text = f"rank {meta['rank']}, the model has {model.options['rank']}"
            raise RequestError(f"{path}: its state has {text}")
        assert model.trained is not None
        shapes = model.trained.shapes(meta, optimizer)
        model.trained.restore(self.states.load(path, shapes))

    def decoding(self, weights: str) -> Tree:
        """Returns weights for sampling by name: the base's, or those of a saved state. Raises
        RequestError for others, which were dropped.
        """
        if weights == BASE:
            return self.base.decoding(self.base.params)
        if not weights.startswith("tinker://"):
            text = "the weights of this sampling client are gone: the server keeps the newest ones"
            raise RequestError(f"{text} (--weight-copies); make a new client, or save them by name")
        meta, base, lora = self.states.meta(weights), self.base, LoRAConfig()
        tree = base.params
        if meta["rank"]:
            lora = LoRAConfig(rank=meta["rank"], targets=tuple(meta["targets"]))
            tree = jax.eval_shape(
                lambda: trained.split(lora, base.model, base.params, jax.random.key(0))[0]
            )
        shapes = abstract_of(tree, base.model.placement is not None)
        params = self.states.load(weights, {"params": shapes})["params"]
        frozen = base.params if meta["rank"] else None
        return base.decoding(trained.full(lora, params, frozen))

    def _returned(self, record: ModelRecord) -> Model:
        """Returns a model after a restart, at its last saved state."""
        model, saved = Model(record.model, record.options), record.saved
        self.make(model)
        number = saved.number
        if saved.path:
            self.load(model, saved.path, saved.optimizer)
            if not saved.loaded:
                # A save that a kill cut off may have replaced the state of the same name.
                number = max(number, self.states.meta(saved.path)["number"])
        model.next = max(record.applied, number) + 1
        if record.applied > number:
            state = saved.path or "its first state"
            model.lost = (
                f"the server was started again, and this model is at {state}, after request"
                f" {number}: requests {number + 1} to {record.applied} are lost; load a state"
                " to continue"
            )
        return model


def single_step(function: Callable[[], Answer]) -> Callable[[], Steps]:
    """Returns the work of a job without micro-batches."""

    def work() -> Steps:
        yield from ()
        return function()

    return work
