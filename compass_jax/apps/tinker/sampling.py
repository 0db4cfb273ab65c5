"""Sampling requests: a queue in order of arrival, and the batcher that runs them.

The requests in the batcher have the same weights. A request for other weights waits until the
batcher is empty, so that no sample changes its weights in flight.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from compass_jax.apps.tinker.errors import RequestError
from compass_jax.apps.tinker.sample_routes import SampleRoutes
from compass_jax.apps.tinker.wire import SampledTokens, sample_result
from compass_jax.base.aliases import Tree
from compass_jax.base.errors import CompassError
from compass_jax.base.records import Prompt
from compass_jax.data.tokenizer import Tokenizer
from compass_jax.devices.sharding import fetch
from compass_jax.rollout.batcher import Batcher
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.request import Columns, Request
from compass_jax.rollout.sampling import Purpose, Sampler
from compass_jax.rollout.sizes import prompt_bucket

Outcome = bytes | CompassError


@dataclass(eq=False)
class SampleJob:
    """A sampling request."""

    weights: str  # the name of its weights
    prompt: np.ndarray
    sequences: Sequence[str]  # the ids of its samples
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int
    finish: Callable[[Outcome], None]
    stop_ids: frozenset[int] = frozenset()
    stop_texts: tuple[str, ...] = ()
    prompt_logprobs: bool = False
    started: int = 0  # number of samples that are in the batcher or have left it
    done: dict[int, SampledTokens] = field(default_factory=dict)
    prompt_logp: np.ndarray | None = None


@dataclass(eq=False)
class Sample(Request):
    """A sample of a job."""

    job: SampleJob | None = None
    checked: int = 0  # number of tokens that were searched for the end of the sample
    stopped: bool = False  # by the request's own end


class WeightCopies:
    """Weights for sampling by name: at most `count`, of which the least recently used go first."""

    def __init__(self, load: Callable[[str], Tree], count: int):
        self._load, self._count = load, count
        self._copies: OrderedDict[str, Tree] = OrderedDict()

    def put(self, name: str, params: Tree) -> None:
        """Stores weights."""
        self._copies[name] = params
        self._copies.move_to_end(name)
        while len(self._copies) > self._count:
            self._copies.popitem(last=False)

    def get(self, name: str) -> Tree:
        """Returns weights; loads them if they are not there. Raises RequestError if they are
        gone.
        """
        if name not in self._copies:
            self.put(name, self._load(name))
        self._copies.move_to_end(name)
        return self._copies[name]


class SampleQueue:
    """The queue of sampling requests. All methods but `put` belong to the thread of the devices.

    Args:
        engine: the engine.
        routes: receives the routes of the samples.
        copies: the weights.
        tokenizer: decodes texts that end a sample.
    """

    def __init__(
        self, engine: Engine, routes: SampleRoutes, copies: WeightCopies, tokenizer: Tokenizer
    ):
        self.engine, self.routes, self.copies = engine, routes, copies
        self._tokenizer = tokenizer
        self._jobs: deque[SampleJob] = deque()
        self._active: list[Sample] = []
        self._weights = ""
        self._batcher: Batcher | None = None

    def put(self, job: SampleJob) -> None:
        """Queues a request."""
        self._jobs.append(job)

    @property
    def busy(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self._jobs or self._active)

    @property
    def waiting(self) -> int:
        """The number of requests that have not started."""
        return len(self._jobs)

    def fail_all(self, error: CompassError) -> None:
        """Ends every request with an error."""
        jobs = {id(sample.job): sample.job for sample in self._active} | {
            id(job): job for job in self._jobs
        }
        self._active, self._batcher = [], None
        self._jobs.clear()
        for job in jobs.values():
            assert job is not None
            job.finish(error)

    def tick(self) -> None:
        """Starts requests while there is room, and decodes once."""
        self._admit()
        if not self._active:
            return
        assert self._batcher is not None
        finished = set(self._batcher.step())
        at_end = [sample for sample in self._active if self._ends(sample)]
        if early := [sample for sample in at_end if sample not in finished]:
            # The routes of samples in slots are copied before they leave.
            self._batcher.abort()
            self._batcher.cancel(*early)
        for sample in list(self._active):
            if sample in finished or sample in early:
                self._active.remove(sample)
                self._finish(sample)

    # ---- into the batcher ------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._jobs:
            job = self._jobs[0]
            if job.weights != self._weights or self._batcher is None:
                if self._active:
                    return
                if not self._takes_weights(job):
                    continue
            assert self._batcher is not None
            if not job.started and job.prompt_logprobs:
                job.prompt_logp = self._prompt_logp(job.prompt)
            while job.started < len(job.sequences) and self._batcher.room > 0:
                if not self._start(job):
                    return
            if job.started < len(job.sequences):
                return
            self._jobs.popleft()

    def _takes_weights(self, job: SampleJob) -> bool:
        """Changes the batcher's weights to those of a job; ends a job whose weights are gone."""
        self._weights = ""
        try:
            params = self.copies.get(job.weights)
        except CompassError as error:
            self._jobs.popleft()
            job.finish(error)
            return False
        if self._batcher is None:
            self._batcher = Batcher(
                self.engine,
                params,
                Purpose.SERVE,
                0,
                sampler=Sampler(per_request=True),
                routes=self.routes.buffer,
            )
        else:
            self._batcher.renew(params, 0)
        self._weights = job.weights
        return True

    def _start(self, job: SampleJob) -> bool:
        """Adds samples of a job to the batcher; returns whether there was room for their routes."""
        assert self._batcher is not None
        prompt = Prompt(job.seed, 0, "", "", job.prompt, "")
        limit, first = len(job.prompt) + job.max_tokens, job.started
        samples: list[Sample] = []
        for column in range(first, min(first + self._batcher.room, len(job.sequences))):
            row = self.routes.allocate()
            if row is None:
                break
            options = {"temperature": job.temperature, "top_k": job.top_k, "top_p": job.top_p}
            sample = Sample.of(prompt, column, row, limit, 0, job=job, **options)
            sample.checked = len(job.prompt)
            samples.append(sample)
        if samples:
            job.started += len(samples)
            self._active += samples
            # A power of two of samples a prefill, so that few shapes are compiled.
            width = 2 ** (len(samples) - 1).bit_length()
            self._batcher.add(samples, range(first, first + width))
        return bool(samples)

    def _prompt_logp(self, prompt: np.ndarray) -> np.ndarray:
        """Returns the log-probs of a prompt's tokens; NaN for the first."""
        assert self._batcher is not None
        padded = np.zeros((1, prompt_bucket(self.engine.config, len(prompt))), np.int32)
        padded[0, : len(prompt)] = prompt
        lengths = jnp.asarray([len(prompt)], jnp.int32)
        rows = self.engine.prompt_logprobs(self._batcher.params, jnp.asarray(padded), lengths, 1)
        logp = np.array(fetch(rows).logp[: len(prompt), 0], np.float32)
        logp[0] = math.nan
        return logp

    # ---- out of it -------------------------------------------------------------------------------

    def _ends(self, sample: Sample) -> bool:
        """Returns whether a sample's new tokens have the request's own end; cuts it off there."""
        job = sample.job
        assert job is not None
        if not (job.stop_ids or job.stop_texts):
            return False
        tokens = sample.tokens
        for end in range(sample.checked + 1, len(tokens) + 1):
            if int(tokens[end - 1]) in job.stop_ids or self._has_text(job, tokens[:end]):
                sample.put(Columns(*(x[:end] for x in sample.columns)))
                sample.stopped = True
                return True
        sample.checked = len(tokens)
        return False

    def _has_text(self, job: SampleJob, tokens: np.ndarray) -> bool:
        """Returns whether the newest token completes a text that ends the sample."""
        response = tokens[len(job.prompt) :]
        for text in job.stop_texts:
            window = response[-(len(text.encode()) + 1) :]
            if text in self._tokenizer.decode(window, special=True):
                return True
        return False

    def _finish(self, sample: Sample) -> None:
        job, first = sample.job, len(sample.prompt.tokens)
        assert job is not None
        tokens = sample.tokens
        self.routes.record(job.sequences[sample.column], tokens, first, sample.row)
        stopped = sample.stopped or int(tokens[-1]) in self.engine.end_ids
        job.done[sample.column] = SampledTokens(tokens[first:], sample.logp[first:], stopped)
        if len(job.done) == len(job.sequences):
            ordered = [job.done[i] for i in range(len(job.sequences))]
            job.finish(sample_result(ordered, job.prompt_logp))


def check_fits(engine: Engine, prompt: int, max_tokens: int) -> None:
    """Raises RequestError for a prompt or an answer that is too long for the engine."""
    longest, most = engine.config.prompt_buckets[-1], engine.config.max_new_tokens
    if not 1 <= prompt <= longest:
        raise RequestError(f"the prompt has {prompt} tokens: it may have 1 to {longest}")
    if not 1 <= max_tokens <= most:
        raise RequestError(f"max_tokens = {max_tokens}: must be from 1 to {most}")
