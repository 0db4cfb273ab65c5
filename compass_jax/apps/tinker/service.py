"""What the server does at each request, apart from HTTP. All methods belong to the event loop; what
needs the devices becomes a job of their thread.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tinker import types

from compass_jax.apps.tinker import training_jobs
from compass_jax.apps.tinker.answers import Answer, Answers, Steps
from compass_jax.apps.tinker.devices import DeviceThread, Job, Work
from compass_jax.apps.tinker.errors import RequestError, refuse
from compass_jax.apps.tinker.models import BASE, Models, single_step
from compass_jax.apps.tinker.sampling import SampleJob, check_fits
from compass_jax.apps.tinker.training_jobs import Attempt
from compass_jax.apps.tinker.wire import TrainingRequest
from compass_jax.base.aliases import JsonObject
from compass_jax.base.errors import CompassError

SESSION_S = 60.0  # after this time without a heartbeat a session may be ended for another
SEEDS = 2**31
SAMPLERS = 4096  # sampling sessions


@dataclass
class Session:
    """A client's session."""

    id: str
    seen: float = field(default_factory=time.monotonic)  # time of its last heartbeat
    models: set[str] = field(default_factory=set)


class Service:
    """The sessions, models and sampling sessions of a server.

    Args:
        models: the models.
        devices: the thread of the devices.
        jobs: makes the jobs of the models' requests.
        most: maximum number of sessions.
    """

    def __init__(
        self, models: Models, devices: DeviceThread, jobs: training_jobs.TrainingJobs, most: int
    ):
        self.models, self.devices, self._jobs = models, devices, jobs
        self.answers, self._most = Answers(4096), most
        self._samplers: dict[str, str] = {}  # id of a sampling session -> name of its weights
        self._sessions = {x: Session(x) for x in models.states.record.sessions}
        for model in models.states.record.models:
            session = model.rpartition(":train:")[0]
            if session in self._sessions:
                self._sessions[session].models.add(model)

    # ---- sessions --------------------------------------------------------------------------------

    def create_session(self) -> str:
        """Returns the id of a new session. Raises RequestError if there are too many."""
        if len(self._sessions) >= self._most:
            self._end_silent()
        if len(self._sessions) >= self._most:
            text = f"{self._most} sessions are open, the most that may be"
            raise RequestError(f"{text}: try again later", status=429)
        session = f"s-{secrets.token_hex(8)}"
        self._sessions[session] = Session(session)
        self.models.states.note(event="session", session=session)
        return session

    def heartbeat(self, session: str) -> None:
        """Records that a session's client lives. Raises RequestError for an unknown session."""
        self._session(session).seen = time.monotonic()

    def end_session(self, session: str) -> None:
        """Ends a session with its models; their saved states stay."""
        closed = self._sessions.pop(session, None)
        for model in closed.models if closed else ():
            if model in self.models:
                self.models.remove(model)
        if closed:
            self.models.states.note(event="session_end", session=session)

    def _session(self, session: str) -> Session:
        if session not in self._sessions:
            raise RequestError(f"there is no session {session[:100]!r}", status=410)
        return self._sessions[session]

    def _end_silent(self) -> None:
        """Ends the sessions whose clients have sent no heartbeat for SESSION_S."""
        now = time.monotonic()
        for session in list(self._sessions.values()):
            if now - session.seen > SESSION_S:
                self.end_session(session.id)

    # ---- models ----------------------------------------------------------------------------------

    def create_model(self, body: types.CreateModelRequest) -> str:
        """Returns the id of the request that makes a model: all its weights are trained without a
        lora_config, and with rank 0.
        """
        self._check_base(body.base_model)
        if body.optimizer_config.type != "adamw":
            raise refuse(f"optimizer {body.optimizer_config.type!r}", "take adamw")
        lora = body.lora_config or types.LoraConfig(rank=0)
        options = lora.model_dump()
        options["seed"] = secrets.randbelow(SEEDS) if lora.seed is None else lora.seed % SEEDS
        model, exists = self._new_model(body.session_id, body.model_seq_id, options)
        if exists:
            return f"{model}:0"

        def make() -> JsonObject:
            self.models.make(self.models.get(model))
            return {"model_id": model, "type": "create_model"}

        return self._submit(f"{model}:0", single_step(make))

    def _new_model(
        self, session: str, number: int, options: JsonObject, *, resumes: bool = False
    ) -> tuple[str, bool]:
        """Registers a model; returns its id, and whether it was there before. One that `resumes`
        from a state takes the place of its session's model with full parameters.
        """
        owner, model = self._session(session), f"{session}:train:{number}"
        if model in self.models:
            if f"{model}:0" not in self.answers:
                self.answers.open(f"{model}:0")({"model_id": model, "type": "create_model"})
            return model, True
        self._end_silent()
        self.models.add(model, options, owner.models if resumes else ())
        owner.models.add(model)
        return model, False

    def model_from_state(self, body: types.LoadWeightsRequest) -> str:
        """Returns the id of the request that makes a model from a saved state."""
        if body.base_model is not None:
            self._check_base(body.base_model)
        meta = self.models.states.meta(body.path)
        options = {**meta["options"], "rank": meta["rank"]}
        session, number = str(body.session_id), int(body.model_seq_id or 0)
        model, exists = self._new_model(session, number, options, resumes=True)
        if exists:
            return f"{model}:0"

        def make() -> JsonObject:
            entry = self.models.get(model)
            self.models.make(entry)
            self._jobs.load(entry, 0, body.path, body.optimizer)
            return {"path": body.path, "model_id": model, "type": "load_weights"}

        return self._submit(f"{model}:0", single_step(make))

    def info(self, model: str) -> JsonObject:
        """Returns what the client knows about a model."""
        entry, name = self.models.get(model), self.models.base.name
        family = self.models.base.model.config.family
        data = {"arch": family, "model_name": name}
        answer = {"type": "get_info", "model_data": data, "model_id": model, "model_name": name}
        return {**answer, "is_lora": not entry.is_full, "lora_rank": entry.options["rank"]}

    def unload(self, model: str) -> str:
        """Returns the id of the request that unloads a model, after its earlier requests."""
        self.models.get(model)

        def remove() -> JsonObject:
            self.models.remove(model)
            return {"model_id": model, "type": "unload_model"}

        return self._submit(f"{model}:unload", single_step(remove))

    def _check_base(self, name: str) -> None:
        if name != self.models.base.name:
            text = f"base_model = {name[:100]!r}"
            raise RequestError(f"{text}: this server has {self.models.base.name!r} alone")

    # ---- requests of a model, in the client's order ----------------------------------------------

    def train(self, request: TrainingRequest) -> str:
        """Returns the id of a request for a forward pass, or a gradient."""
        return self._in_order(request.model, request.number, self._jobs.passes(request))

    def update(self, body: types.OptimStepRequest) -> str:
        """Returns the id of a request for an update of the parameters."""
        return self._in_order(body.model_id, body.seq_id, self._jobs.update(body))

    def save(self, body: types.SaveWeightsRequest) -> str:
        """Returns the id of a request that saves a state."""
        return self._in_order(body.model_id, body.seq_id, self._jobs.save(body))

    def load(self, body: types.LoadWeightsRequest) -> str:
        """Returns the id of a request that loads a state, which may follow a gap in the numbers."""
        model = str(body.model_id)
        return self._in_order(model, body.seq_id, self._jobs.loading(body), gap=True)

    def save_for_sampler(self, body: types.SaveWeightsForSamplerRequest) -> str:
        """Returns the id of a request for weights to sample with: saved by name, or kept for a new
        sampling session.
        """
        if body.kind != "snapshot":
            raise refuse(f"kind = {body.kind!r}", "take a snapshot after each update")
        session = body.model_id.rpartition(":train:")[0]
        sampler = f"{session}:sample:{body.sampling_session_seq_id}"
        if body.path is None:
            self._add_sampler(sampler, f"{body.model_id}@{body.seq_id}")
        attempt = self._jobs.save_for_sampler(body, sampler)
        return self._in_order(body.model_id, body.seq_id, attempt)

    def _in_order(
        self, model: str, number: int | None, attempt: Attempt, *, gap: bool = False
    ) -> str:
        """Submits a model's request, once for each number. Raises RequestError for a number that
        leaves a `gap`, unless it may.
        """
        entry = self.models.get(model)
        if number is None or number < 1:
            raise RequestError(f"seq_id = {number}: must be a number from 1")
        request = f"{model}:{number}"
        if request in self.answers:
            return request
        if number < entry.next:
            self.answers.open(request)(attempt.repeat(entry, number))
            return request
        if number > entry.next and not gap:
            text = f"request {number} came, and {entry.next} is next"
            raise RequestError(f"{text}: send it again, or load a state", status=400)
        before, entry.next = entry.next, number + 1
        try:
            return self._submit(request, lambda: attempt.run(entry, number))
        except RequestError:
            entry.next = before
            raise

    def _submit(self, request: str, work: Callable[[], Steps] | Work) -> str:
        put = self.answers.open(request)
        try:
            self.devices.submit(Job(work, put))
        except CompassError:
            self.answers.forget(request)
            raise
        return request

    # ---- sampling --------------------------------------------------------------------------------

    def create_sampler(self, body: types.CreateSamplingSessionRequest) -> str:
        """Returns the id of a new sampling session, of the base or of a saved state."""
        self._session(body.session_id)
        if body.base_model is not None:
            self._check_base(body.base_model)
        if body.model_path is not None:
            self.models.states.meta(body.model_path)
        sampler = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
        self._add_sampler(sampler, body.model_path or BASE)
        return sampler

    def _add_sampler(self, sampler: str, weights: str) -> None:
        """Registers a sampling session; the oldest ones beyond SAMPLERS are forgotten."""
        self._samplers[sampler] = weights
        while len(self._samplers) > SAMPLERS:
            del self._samplers[next(iter(self._samplers))]

    def sampler_info(self, sampler: str) -> JsonObject:
        """Returns what the client knows about a sampling session."""
        weights = self._weights(sampler)
        path = weights if weights.startswith("tinker://") else None
        return {
            "sampler_id": sampler,
            "base_model": self.models.base.name,
            "model_path": path,
        }

    def _weights(self, sampler: str | None) -> str:
        if sampler is None:
            raise refuse("a sample without sampling_session_id", "create a sampling session")
        if sampler not in self._samplers:
            text = f"there is no sampling session {sampler[:100]!r}; make a new sampling client"
            raise RequestError(text, status=404)
        return self._samplers[sampler]

    def sample(self, body: types.SampleRequest) -> tuple[str, list[str]]:
        """Returns (id of a sampling request, ids of its sequences)."""
        weights, engine = self._weights(body.sampling_session_id), self.models.base.engine
        _check_sample(body)
        request = f"{body.sampling_session_id}:{body.seq_id}"
        sequences = [f"{request}:{i}" for i in range(body.num_samples)]
        if request in self.answers:
            return request, sequences
        prompt, params = training_jobs.token_array(body.prompt), body.sampling_params
        most = engine.config.max_new_tokens if params.max_tokens is None else params.max_tokens
        check_fits(engine, len(prompt), most)
        stop_ids, stop_texts = _stops(params.stop)
        put: Callable[[Answer], None] = self.answers.open(request)
        job = SampleJob(
            weights=weights,
            prompt=prompt,
            sequences=sequences,
            max_tokens=most,
            temperature=params.temperature,
            top_k=max(params.top_k, 0),
            top_p=params.top_p,
            seed=secrets.randbits(32) if params.seed is None else params.seed % 2**32,
            finish=put,
            stop_ids=stop_ids,
            stop_texts=stop_texts,
            prompt_logprobs=bool(body.prompt_logprobs),
        )
        try:
            self.devices.sample(job)
        except CompassError:
            self.answers.forget(request)
            raise
        return request, sequences


def _check_sample(body: types.SampleRequest) -> None:
    """Raises RequestError for what this server does not sample."""
    params = body.sampling_params
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if getattr(body, name):
            raise refuse(name, "leave it 0")
    for name in ("target_prompt_logprobs", "prompt_logprobs_last_n", "record_stability_info"):
        if getattr(body, name):
            raise refuse(name, "leave it out")
    if not 1 <= body.num_samples <= 4096:
        raise RequestError(f"num_samples = {body.num_samples}: must be from 1 to 4096")
    if body.seq_id is None:
        raise RequestError("seq_id is missing: number the requests of a sampling session")
    if not (0 <= params.temperature <= 100 and 0 < params.top_p <= 1):
        raise RequestError("temperature must be from 0 to 100, top_p above 0 and at most 1")


def _stops(
    stop: str | Sequence[str] | Sequence[int] | None,
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Returns the token ids and the texts that end a sample, besides the model's end tokens."""
    values = [stop] if isinstance(stop, str) else list(stop or ())
    if stop is not None and not values:
        raise refuse("stop = []", "the model's end tokens always end a sample; leave stop out")
    if len(values) > 16 or any(isinstance(x, str) and not 0 < len(x) <= 200 for x in values):
        raise RequestError("stop: give at most 16 tokens or texts, of 1 to 200 characters")
    texts = tuple(x for x in values if isinstance(x, str))
    return frozenset(x for x in values if isinstance(x, int)), texts
