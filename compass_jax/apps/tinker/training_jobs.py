"""The jobs of a model's requests: what runs on the thread of the devices, and what the journal says
about it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from tinker import types

from compass_jax.apps.tinker.answers import Answer, Steps
from compass_jax.apps.tinker.errors import RequestError, refuse
from compass_jax.apps.tinker.losses import loss_named
from compass_jax.apps.tinker.model import Adam
from compass_jax.apps.tinker.models import Model, Models
from compass_jax.apps.tinker.rows import rows_of
from compass_jax.apps.tinker.sampling import WeightCopies
from compass_jax.apps.tinker.states import SavedState
from compass_jax.apps.tinker.wire import TrainingRequest, training_result
from compass_jax.base.aliases import JsonObject


class Attempt(NamedTuple):
    """A request of a model.

    run: the job. repeat: the answer after a restart to a request that was applied before it.
    """

    run: Callable[[Model, int], Steps]
    repeat: Callable[[Model, int], Answer]


def _lost_answer(model: Model, number: int) -> RequestError:
    text = model.lost or f"request {number} was applied, and its answer is no longer kept"
    return RequestError(text)


class TrainingJobs:
    """Makes the jobs of models.

    Args:
        models: the models.
        copies: weights for sampling.
    """

    def __init__(self, models: Models, copies: WeightCopies):
        self._models, self._copies = models, copies
        self._states = models.states

    def _noted(self, model: Model, number: int, work: Steps, changes: bool = True) -> Steps:
        """Runs a job's steps, and writes to the journal how they ended."""
        event = "passed"
        try:
            result = yield from work
            event = "applied" if changes else event
            return result
        finally:
            if model.id in self._models:
                self._states.note(event=event, model=model.id, number=number)

    def passes(self, request: TrainingRequest) -> Attempt:
        """Returns the job of forward_backward, or of forward."""

        def steps(model: Model) -> Steps:
            trained, base = model.ready(), self._models.base
            loss = loss_named(request.loss, request.config)
            longest = trained.learner.update_settings.buckets[-1]
            rows = rows_of(request.data, loss, longest, base.tokenizer.vocab_size)
            passed = yield from trained.passes(rows, loss, request.forward_only)
            return training_result(passed.logp, passed.metrics)

        def run(model: Model, number: int) -> Steps:
            return self._noted(model, number, steps(model), not request.forward_only)

        return Attempt(run, _lost_answer)

    def update(self, body: types.OptimStepRequest) -> Attempt:
        """Returns the job of optim_step."""

        def steps(model: Model) -> Steps:
            yield from ()
            params = body.optim_params
            if not isinstance(params, types.AdamParams):
                raise refuse("optim_params of another optimizer", "send AdamParams")
            return {"metrics": model.ready().update(Adam(**params.model_dump()))}

        def run(model: Model, number: int) -> Steps:
            return self._noted(model, number, steps(model))

        def repeat(model: Model, number: int) -> Answer:
            return _lost_answer(model, number) if model.lost else {"metrics": {}}

        return Attempt(run, repeat)

    def save(self, body: types.SaveWeightsRequest) -> Attempt:
        """Returns the job of save_state."""
        name = body.path or "state"
        path = self._states.path(body.model_id, "weights", name)

        def run(model: Model, number: int) -> Steps:
            yield from ()
            try:
                trained = model.ready()
                if self._states.exists(path) and not body.overwrite:
                    raise RequestError(f"{path} exists: set overwrite, or take another name")
            except RequestError:
                self._states.note(event="passed", model=model.id, number=number)
                raise
            arrays, meta = trained.saved()
            meta |= {"number": number, "options": model.options, "user": body.user_metadata}
            self._states.save(path, trained.learner.version, arrays, meta)
            self._note_state(model, path, number, loaded=False, optimizer=True)
            return {"path": path, "type": "save_weights"}

        def repeat(model: Model, number: int) -> Answer:
            return {"path": path, "type": "save_weights"}

        return Attempt(run, repeat)

    def _note_state(
        self, model: Model, path: str, number: int, *, loaded: bool, optimizer: bool
    ) -> None:
        saved = SavedState(path, number, loaded, optimizer)
        self._states.note(event="saved", model=model.id, **saved._asdict())
        self._states.sync()

    def loading(self, body: types.LoadWeightsRequest) -> Attempt:
        """Returns the job of load_state."""

        def run(model: Model, number: int) -> Steps:
            yield from ()
            try:
                self.load(model, number, body.path, body.optimizer)
            except RequestError:
                self._states.note(event="passed", model=model.id, number=number)
                raise
            return {"path": body.path, "model_id": model.id, "type": "load_weights"}

        return Attempt(run, _lost_answer)

    def load(self, model: Model, number: int, path: str, optimizer: bool) -> None:
        """Brings a model to a saved state, which ends what a restart has lost."""
        self._models.load(model, path, optimizer)
        model.lost = ""
        self._note_state(model, path, number, loaded=True, optimizer=optimizer)

    def save_for_sampler(self, body: types.SaveWeightsForSamplerRequest, sampler: str) -> Attempt:
        """Returns the job of save_weights_for_sampler."""
        path = None
        if body.path is not None:
            path = self._states.path(body.model_id, "sampler_weights", body.path)
        answer: JsonObject = {"path": path, "sampling_session_id": None if path else sampler}

        def steps(model: Model, number: int) -> Steps:
            yield from ()
            trained, name = model.ready(), path
            if path is None:
                name = f"{model.id}@{number}"
            else:
                arrays, meta = trained.saved()
                meta |= {"number": number, "options": model.options, "user": body.user_metadata}
                arrays = {"params": arrays["params"]}
                self._states.save(path, trained.learner.version, arrays, meta)
            self._copies.put(str(name), self._models.base.decoding(trained.learner.params))
            return {**answer, "type": "save_weights_for_sampler"}

        def run(model: Model, number: int) -> Steps:
            return self._noted(model, number, steps(model, number), changes=False)

        return Attempt(run, _lost_answer)


def token_array(prompt: types.ModelInput) -> np.ndarray:
    """Returns a prompt's tokens. Raises RequestError for other parts of a prompt."""
    try:
        return np.asarray(prompt.to_ints(), np.int32)
    except (ValueError, OverflowError) as error:
        raise refuse("a prompt with parts that are no tokens", "send tokens alone") from error
