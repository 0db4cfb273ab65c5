"""Scoring of responses in worker processes, concurrent with the rollout.

Each worker has a thread that sends it responses and receives its answers; `submit` and `collect`
only access queues. A check that exceeds `rewards.timeout_s` is killed. When a worker dies, only the
sample that it was checking has an unknown Score; the samples after it are sent to other workers.
Results carry the caller's key.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from compass_jax.base.aliases import JsonObject
from compass_jax.base.chat.base import UnknownMarks
from compass_jax.base.errors import CompassError
from compass_jax.base.records import Prompt, Score
from compass_jax.config import DataConfig, RewardConfig
from compass_jax.config.chat import find_format
from compass_jax.devices.processes.start import Child, environment
from compass_jax.rewards import detect
from compass_jax.rewards.checks import Response, checks_of
from compass_jax.rewards.faults import Faults, VerifierError

BATCH = 32  # maximum number of responses sent to a worker at once
# timeout of a worker's start; first imports on a cold disk are slow
START_LIMIT_S = 300.0
GRACE_S = 2.0  # a worker kills slow checks itself; after this delay it is killed, too
UNLUCKY_LIMIT = 5


class ScorerError(CompassError, RuntimeError):
    """The verifier workers cannot run. The message holds a worker's traceback."""


@dataclasses.dataclass(eq=False)
class Job:
    """A response that has no score yet, with the caller's key."""

    key: Hashable
    response: Response
    retried: bool = False  # whether a worker died during it


class Worker(Child):
    """A worker process, with the jobs that it has not answered yet. The first is in progress."""

    def __init__(self, setup: JsonObject):
        super().__init__("compass_jax.rewards.worker", environment(not setup["guards"]))
        self.held: deque[Job] = deque()
        self.ready = False
        self.begun = False  # whether it has confirmed the responses


class Scorer:
    """The verifier workers of `data.sources`. Use it as a context manager, or call `close()`.

    `guards` are used instead of those that `rewards.sandbox` selects, `missing` instead of the
    guards that are detected to be missing. Raises ConfigError if `rewards.sandbox` requires a
    missing guard. For a verifier that cannot be used, the next call raises VerifierError.
    """

    slow = False  # verdicts take seconds at most
    workers_only = True  # no judge

    def __init__(
        self,
        rewards: RewardConfig,
        data: DataConfig,
        guards: tuple[str, ...] | None = None,
        missing: Mapping[str, str] | None = None,
    ):
        checks = checks_of(data)
        runs_programs = guards is not None or rewards.sandbox == "off"
        if not runs_programs:
            missing = detect.missing_guards() if missing is None else missing
            runs_programs = not missing
        guards = detect.guards_for(rewards.sandbox, missing) if guards is None else guards
        if guards:
            detect.refuse_readable_sources(data, rewards.program_packages)
        self._setup = {
            "checks": checks,
            "tag": rewards.answer_tag,
            "chat_format": data.chat_format,
            "timeout_s": rewards.timeout_s,
            "guards": guards,
            "packages": rewards.program_packages,
            "programs": runs_programs,
        }
        self._timeout_s = rewards.timeout_s
        self._conversation_s = rewards.conversation_limit_s
        self._faults = Faults(checks)
        self._unknown_marks = UnknownMarks(find_format(data.chat_format))
        self._outstanding: set[Hashable] = set()
        self._queue: deque[Job] = deque()  # a response's text may be a function
        self._results: list[tuple[Hashable, Score]] = []
        self._error: Exception | None = None
        self._unlucky = 0  # consecutive workers that died before they began a response
        self._closing = False
        self.tried_rows: set[str] = set()  # validated rows (`check_rows`)
        self._changed = threading.Condition()
        self._workers = [Worker(self._setup) for _ in range(rewards.workers)]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True)
            for number in range(rewards.workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response and returns at once. `key` must not belong to an outstanding sample.

        If `response` is a function, a worker's thread calls it for the text, so that the caller
        does not wait for detokenisation.
        """
        self._queue_up(key, Response(prompt.source, response, prompt.row, prompt.question))

    def submit_rows(self, key: Hashable, source: int, rows: Sequence[str]) -> None:
        """Queues rows for validation without a response (`check_rows`)."""
        self._queue_up(key, Response(source, "", "", "", tuple(rows)))

    def _queue_up(self, key: Hashable, response: Response) -> None:
        with self._changed:
            self._check_usable()
            if key in self._outstanding:
                raise ValueError(f"{key!r} was submitted twice: a sample is scored once")
            self._outstanding.add(key)
            self._queue.append(Job(key, response))
            self._changed.notify_all()

    @property
    def workers(self) -> Scorer:
        """The scorer itself, like `workers` of the scorers that wrap it."""
        return self

    @property
    def outstanding(self) -> int:
        """Number of samples submitted and not yet collected."""
        with self._changed:
            return len(self._outstanding)

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """Returns the scores finished since the last call, in the order in which they finished.

        With `block`, waits for at least one score if any sample is outstanding. The wait is bounded
        by `rewards.timeout_s` per response and START_LIMIT_S per start. Raises ScorerError if the
        workers cannot run.
        """
        with self._changed:
            self._wait(lambda: bool(self._results or not block or not self._outstanding))
            results, self._results = self._results, []
            self._outstanding.difference_update(key for key, _ in results)
            return results

    def wait_ready(self) -> None:
        """Waits until every worker has finished its imports. Raises ScorerError if one cannot."""
        with self._changed:
            self._wait(lambda: all(worker.ready for worker in self._workers))

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._check_usable()
        while not condition():
            self._changed.wait()
            self._check_usable()

    def close(self) -> None:
        """Kills the workers and drops uncollected samples. May be called twice."""
        with self._changed:
            self._closing = True
            for worker in self._workers:
                worker.hang_up()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._closing:
            raise ScorerError("the scorer is closed")

    # The methods below run in the threads of the workers.

    def _run(self, number: int) -> None:
        """Feeds a worker and its replacements until the scorer is closed."""
        worker = self._workers[number]
        try:
            while (outcome := self._use(worker)) and not self._closing:
                self._give_up(worker, outcome)
                with self._changed:
                    if self._closing:
                        break
                    worker = self._workers[number] = Worker(self._setup)
        except Exception as error:  # raised in the caller's thread by the next call
            known = isinstance(error, ScorerError | VerifierError)
            error = error if known else ScorerError(f"the scorer's thread failed: {error!r}")
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            worker.kill()

    def _use(self, worker: Worker) -> str:
        """Feeds a worker. Returns "crash" or "timeout", or "" when the scorer is closed."""
        try:
            worker.channel.send(self._setup)
            status, detail = worker.channel.receive(START_LIMIT_S)
            if status == "refused":
                raise VerifierError(detail)
            if status == "failed":
                raise ScorerError(f"a verifier worker cannot start:\n{detail}")
            with self._changed:
                worker.ready = True
                self._changed.notify_all()
            while self._hand_out(worker):
                worker.begun = False
                worker.channel.send([job.response for job in worker.held])
                self._collect_answers(worker)
        except (EOFError, OSError) as error:
            return "timeout" if isinstance(error, TimeoutError) else "crash"
        return ""

    def _hand_out(self, worker: Worker) -> bool:
        """Waits for responses and assigns the worker its share. Returns False at the end."""
        with self._changed:
            while not (self._queue or self._closing or self._error):
                self._changed.wait()
            if self._closing or self._error:
                return False
            # An even share, so that a short queue occupies all workers.
            share = min(BATCH, -(-len(self._queue) // len(self._workers)))
            worker.held = deque(self._queue.popleft() for _ in range(share))
        for job in worker.held:  # outside the lock: `submit` does not wait for detokenisation
            if callable(text := job.response.text):
                try:
                    job.response = job.response._replace(text=text())
                except BaseException as error:  # a panic of the tokenizer is not an Exception
                    message = f"the text of a response cannot be made: {error!r}"
                    raise ScorerError(message) from error
            self._unknown_marks.note(job.response.text)
        return True

    def _collect_answers(self, worker: Worker) -> None:
        while worker.held:
            start = time.monotonic()
            message = worker.channel.receive(self._timeout_s + GRACE_S)
            if message[0] == "begun":
                worker.begun = True
                continue
            reward, *rest = message
            score = Score(reward or 0.0, reward is not None, *rest)
            if score.says:
                seconds = time.monotonic() - start
                score = dataclasses.replace(score, spent=seconds / self._conversation_s)
            self._finish(worker.held.popleft(), score)

    def _finish(self, job: Job, score: Score) -> None:
        with self._changed:
            if not job.response.rows:
                self._faults.note(job.response, score)
            if score.outcome != "crash":
                self._unlucky = 0
            self._results.append((job.key, score))
            self._changed.notify_all()

    def _give_up(self, worker: Worker, outcome: str) -> None:
        """Kills a worker that hangs or died. After a death, which may have an external cause, the
        response in progress is tried once more and then given up. The responses after it return to
        the front of the queue.
        """
        code = worker.kill()
        late = outcome == "timeout"
        # it exited on its own; a new one would, too
        if not worker.ready and (late or code >= 0):
            how = f"ended with code {code} before it was ready"
            how = f"was not ready after {START_LIMIT_S:.0f} s" if late else how
            raise ScorerError(f"a verifier worker {how}; its standard error says why")
        # not caused by a response: it was killed from outside
        if not late and not (worker.held and worker.begun):
            with self._changed:
                self._unlucky += 1
                unlucky = self._unlucky
            if unlucky > UNLUCKY_LIMIT:
                raise ScorerError(
                    f"{unlucky} verifier workers in a row were killed before they began a"
                    f" response (code {code}); is memory short?"
                )
        elif not late and not worker.held[0].retried:
            worker.held[0].retried = True
        elif worker.held:
            detail = f"no answer after {self._timeout_s} s"
            detail = detail if late else f"the worker ended with code {code}"
            score = Score(0.0, False, outcome, detail, extracted=False)
            self._finish(worker.held.popleft(), score)
        with self._changed:
            self._queue.extendleft(reversed(worker.held))
            worker.held.clear()
            self._changed.notify_all()
