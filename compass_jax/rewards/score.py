"""Scores responses in worker processes that can be killed, while the rollout goes on.

One thread for each worker hands it responses and collects its answers; `submit` and `collect` touch
queues alone. A check that runs longer than `rewards.timeout_s` is ended, and a worker that dies
takes with it only the response that it was judging: such a sample has a Score that is not known,
and the responses after it go to other workers. Results carry the caller's key.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from compass_jax.config import DataConfig, RewardConfig
from compass_jax.errors import CompassError
from compass_jax.processes.channel import ChannelError
from compass_jax.processes.start import Child, environment
from compass_jax.records import Prompt, Score
from compass_jax.rewards import detect
from compass_jax.rewards.checks import Response, checks_of
from compass_jax.rewards.faults import Faults, VerifierError
from compass_jax.rewards.readable import refuse_readable_sources

logger = logging.getLogger(__name__)

BATCH = 32  # most responses that are sent to a worker at once
SEND_LIMIT_S = 30.0  # a worker reads at once; one that does not is lost
# first imports on a cold disk are slow; a worker that needs longer than this does not start
START_LIMIT_S = 300.0
GRACE_S = 2.0  # a worker ends a check itself; after this it is ended with the check
UNLUCKY_LIMIT = 5
OUTCOMES = ("ok", "error", "timeout", "crash", "unjudged")
STATUSES = ("ready", "failed", "refused", "begun")


class ScorerError(CompassError, RuntimeError):
    """The verifier workers cannot run at all; the message holds the worker's traceback."""


class Worker(Child):
    """A worker, and the responses that it was sent and has not judged, each with its ticket; the
    first is the one that it is judging.
    """

    def __init__(self, setup: dict[str, Any]):
        super().__init__("compass_jax.rewards.worker", environment(not setup["guards"]))
        self.held: deque[tuple[int, Response]] = deque()
        self.ready = False
        self.begun = False  # it has received the responses
        self._setup = setup

    def receive(self, seconds: float) -> Any:
        """Returns the next message, in one of the forms of worker.py: (status, detail) or (index,
        score). Raises TimeoutError, EOFError and ChannelError.
        """
        return parse(self.channel.receive(time.monotonic() + seconds))

    def start(self) -> None:
        """Waits until it has imported its verifiers. Raises VerifierError where they
        cannot be used, and ScorerError where it fails otherwise.
        """
        self.channel.send(self._setup, time.monotonic() + SEND_LIMIT_S)
        status, detail = self.receive(START_LIMIT_S)
        if status == "refused":
            raise VerifierError(detail)
        if status == "failed":
            raise ScorerError(f"a verifier worker cannot start:\n{detail}")
        if status != "ready":
            raise ChannelError(f"{status!r} before it was ready")

    def send(self) -> None:
        """Hands over the responses that it holds."""
        self.begun = False
        batch = [response for _, response in self.held]
        self.channel.send(batch, time.monotonic() + SEND_LIMIT_S)


def parse(value: Any) -> tuple[str, str] | tuple[int, Score]:
    """Returns a worker's message. Raises ChannelError for any other form than the two."""
    match value:
        case [str(status), str(detail)] if status in STATUSES:
            return status, detail
        case [
            int(index),
            float() | None as reward,
            str(outcome),
            str(detail),
            dict(parts),
            bool(extracted),
            str(says),
        ]:
            known = reward is not None and math.isfinite(reward)
            numbers = all(type(x) is float and math.isfinite(x) for x in parts.values())
            fits = outcome in OUTCOMES and known == (outcome == "ok") and type(index) is int
            if fits and numbers and (known or not (parts or says)):
                score = Score(reward or 0.0, known, outcome, detail, parts, extracted, says)
                return index, score
    raise ChannelError(f"a line of no known form: {value!r:.200}")


class Scorer:
    """Verifier workers for `data.sources`. Use as a context manager, or call `close()`.

    Args:
        guards: names out of guards.GUARDS, instead of those that `rewards.sandbox` chooses.
        missing: the guards that this machine lacks, with the reasons; None: found by trying.

    Raises ConfigError where `rewards.sandbox` requires a guard that this machine lacks. A verifier
    that cannot be used is a VerifierError of the next call.
    """

    slow = False  # a verdict takes seconds

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
            guards, runs_programs = detect.guards_for(rewards.sandbox, missing), not missing
        guards = guards or ()
        if guards:
            refuse_readable_sources(data, rewards.program_packages)
        self._setup = {
            "checks": checks,
            "tag": rewards.answer_tag,
            "timeout_s": rewards.timeout_s,
            "guards": guards,
            "packages": rewards.program_packages,
            "programs": runs_programs,
        }
        self._timeout_s = rewards.timeout_s
        self._conversation_s = rewards.conversation_limit_s
        self._faults = Faults(checks)
        self._tickets = itertools.count()
        # ticket -> key, of everything submitted and not collected
        self._keys: dict[int, Hashable] = {}
        self._outstanding: set[Hashable] = set()
        self._queue: deque[tuple[int, Response]] = deque()  # their texts may be functions
        self._results: list[tuple[Hashable, Score]] = []
        self._error: Exception | None = None
        self._unlucky = 0  # workers in a row that died with no response begun
        self._again: set[int] = set()  # tickets of responses that a worker died on
        self._closing = False
        self.tried_rows: set[str] = set()  # rows that can be judged (rewards/rows.py)
        self._changed = threading.Condition()
        self._workers = [Worker(self._setup) for _ in range(rewards.workers)]
        names = [f"reward-worker-{number}" for number in range(rewards.workers)]
        self._threads = [
            threading.Thread(target=self._run, args=(number,), name=name, daemon=True)
            for number, name in enumerate(names)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response; returns at once. `key` must not belong to a sample that is still
        outstanding.

        A function is called for the text in a worker's thread: detokenising takes no time of the
        caller's.
        """
        text: Any = response
        self._queue_up(key, Response(prompt.source, text, prompt.row, prompt.question))

    def submit_rows(self, key: Hashable, source: int, rows: Sequence[str]) -> None:
        """Queues rows to be tried without a response (rewards/rows.py)."""
        self._queue_up(key, Response(source, "", "", "", tuple(rows)))

    def _queue_up(self, key: Hashable, response: Response) -> None:
        with self._changed:
            self._check_usable()
            if key in self._outstanding:
                raise ValueError(f"{key!r} was submitted twice: a sample is scored once")
            self._outstanding.add(key)
            ticket = next(self._tickets)
            self._keys[ticket] = key
            self._queue.append((ticket, response))
            self._changed.notify_all()

    @property
    def workers(self) -> Scorer:
        """The scorer itself, among those that add to its scores."""
        return self

    @property
    def outstanding(self) -> int:
        """Number of samples that are submitted and not yet collected."""
        with self._changed:
            return len(self._outstanding)

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """Returns the scores since the last call, in the order in which they were finished.

        `block` waits until there is at least one, and returns an empty list only if nothing is
        outstanding. Raises ScorerError if the workers cannot run. A wait ends: each response has
        `rewards.timeout_s`, each start START_LIMIT_S.
        """
        with self._changed:
            self._wait(lambda: bool(self._results or not block or not self._outstanding))
            results, self._results = self._results, []
            self._outstanding.difference_update(key for key, _ in results)
            return results

    def wait_ready(self) -> None:
        """Returns when every worker has finished its imports; raises ScorerError if one cannot."""
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
        self._faults.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._closing:
            raise ScorerError("the scorer is closed")

    # The rest runs in the threads of the workers.

    def _run(self, number: int) -> None:
        """Gives work to a worker and those that replace it, until the scorer is closed."""
        worker = self._workers[number]
        try:
            while (outcome := self._use(worker)) and not self._closing:
                self._give_up(worker, outcome)
                with self._changed:
                    if self._closing:
                        break
                    worker = self._workers[number] = Worker(self._setup)
        except Exception as error:  # the caller must hear of it
            known = isinstance(error, ScorerError | VerifierError)
            with self._changed:
                self._error = (
                    error if known else ScorerError(f"the scorer's thread failed: {error!r}")
                )
                self._changed.notify_all()
        finally:
            worker.kill()

    def _use(self, worker: Worker) -> str:
        """Gives work to a worker. Returns "crash" or "timeout" if it must be replaced, and an empty
        text when the scorer is closed.
        """
        try:
            worker.start()
            with self._changed:
                worker.ready = True
                self._changed.notify_all()
            while self._hand_out(worker):
                worker.send()
                self._collect_answers(worker)
        except (EOFError, OSError) as error:
            return "timeout" if isinstance(error, TimeoutError) else "crash"
        except ChannelError as error:
            logger.warning("a verifier worker is replaced: it sent %s", error)
            return "crash"
        return ""

    def _hand_out(self, worker: Worker) -> bool:
        """Waits for responses and gives the worker its share; False when the scorer ends."""
        with self._changed:
            while not (self._queue or self._closing or self._error):
                self._changed.wait()
            if self._closing or self._error:
                return False
            share = min(BATCH, -(-len(self._queue) // len(self._workers)))
            batch = [self._queue.popleft() for _ in range(share)]
        # not under the lock, for which `submit` would wait
        worker.held = deque((ticket, _with_text(response)) for ticket, response in batch)
        return True

    def _collect_answers(self, worker: Worker) -> None:
        judged = 0
        while worker.held:
            start = time.monotonic()
            first, answer = worker.receive(self._timeout_s + GRACE_S)
            if first == "begun":
                worker.begun = True
            elif isinstance(answer, Score) and worker.begun and first == judged:
                judged += 1
                if answer.says:
                    seconds = time.monotonic() - start
                    answer = dataclasses.replace(answer, spent=seconds / self._conversation_s)
                self._finish(*worker.held.popleft(), answer)
            else:
                raise ChannelError(f"{first!r}, which is not the answer to response {judged}")

    def _finish(self, ticket: int, response: Response, score: Score) -> None:
        with self._changed:
            if not response.rows:
                self._faults.note(response, score)
            if score.outcome != "crash":
                self._unlucky = 0
            self._again.discard(ticket)
            self._results.append((self._keys.pop(ticket), score))
            self._changed.notify_all()

    def _give_up(self, worker: Worker, outcome: str) -> None:
        """Ends a worker that hangs or died. The response that it was judging is judged once more
        after a death, which may have come from outside, and then given up; those after it are
        queued first.
        """
        code = worker.kill()
        # it ended itself, and would again
        if not worker.ready and (outcome == "timeout" or code >= 0):
            how = (
                f"was not ready after {START_LIMIT_S:.0f} s"
                if outcome == "timeout"
                else f"ended with code {code} before it was ready"
            )
            raise ScorerError(f"a verifier worker {how}; its standard error says why")
        late = outcome == "timeout"
        # no response's doing: it was killed from outside
        if not late and not (worker.held and worker.begun):
            with self._changed:
                self._unlucky += 1
                unlucky = self._unlucky
            if unlucky > UNLUCKY_LIMIT:
                raise ScorerError(
                    f"{unlucky} verifier workers in a row were killed before they began a"
                    f" response (code {code}); is memory short?"
                )
        elif not late and worker.held[0][0] not in self._again:
            self._again.add(worker.held[0][0])
        elif worker.held:
            detail = f"no answer after {self._timeout_s} s"
            detail = detail if late else f"the worker ended with code {code}"
            score = Score(0.0, False, outcome, detail, extracted=False)
            self._finish(*worker.held.popleft(), score)
        with self._changed:
            self._queue.extendleft(reversed(worker.held))
            worker.held.clear()
            self._changed.notify_all()


def _with_text(response: Response) -> Response:
    if not callable(response.text):
        return response
    try:
        return response._replace(text=response.text())
    except BaseException as error:  # a panic of the tokenizer is no Exception
        raise ScorerError(f"the text of a response cannot be made: {error!r}") from error
