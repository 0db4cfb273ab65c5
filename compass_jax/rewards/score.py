"""Scores responses in worker processes that can be killed, while the rollout goes on.

A thread hands responses to idle workers and collects their answers; `submit` and `collect` touch
queues alone. What a check may do is the workers' affair (worker.py); what comes from them is JSON
of a fixed form (channel.py). A check that runs longer than `rewards.timeout_s` is ended, and a
worker that dies took down only the response it was on. Such a sample gets a Score that is not
known; the responses after it go to the next worker. Results carry the caller's key.
"""

from __future__ import annotations

import itertools
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from compass_jax.config import DataConfig, RewardConfig
from compass_jax.errors import CompassError
from compass_jax.records import Prompt, Score
from compass_jax.rewards.channel import ChannelError, Said
from compass_jax.rewards.checks import Response, checks_of
from compass_jax.rewards.detect import guards_for, missing_guards
from compass_jax.rewards.faults import Faults, VerifierError
from compass_jax.rewards.process import Worker
from compass_jax.rewards.readable import refuse_readable_sources

logger = logging.getLogger(__name__)

BATCH = 32  # most responses that are sent to a worker at once
# first imports on a cold disk are slow; a worker that needs longer than this does not start
START_LIMIT_S = 300.0
GRACE_S = 2.0  # a worker ends a check in a child itself; after this it is ended with the check
UNLUCKY_LIMIT = 5
RESTARTS = 3


class ScorerError(CompassError, RuntimeError):
    """The verifier workers cannot run at all; the message holds the worker's traceback."""


def _with_text(response: Response) -> Response:
    if not callable(response.text):
        return response
    try:
        return response._replace(text=response.text())
    except BaseException as error:  # whatever it is: a panic of the tokenizer is no Exception
        raise ScorerError(f"the text of a response cannot be made: {error!r}") from error


class Scorer:
    """Verifier workers for `data.sources`. Use as a context manager, or call `close()`.

    `guards` (names out of guards.GUARDS) replaces what `rewards.sandbox` chooses; None: that.
    Raises ConfigError where `rewards.sandbox` requires a guard that this machine lacks. A verifier
    that cannot be used is a VerifierError of the next call.
    """

    slow = False  # a verdict takes seconds

    def __init__(
        self, rewards: RewardConfig, data: DataConfig, guards: tuple[str, ...] | None = None
    ):
        checks = checks_of(data)
        chosen = guards is not None
        guards = guards_for(rewards.sandbox) if guards is None else guards
        if guards:
            refuse_readable_sources(data, rewards.program_packages)
        self._setup = {
            "checks": checks,
            "tag": rewards.answer_tag,
            "timeout_s": rewards.timeout_s,
            "guards": guards,
            "packages": rewards.program_packages,
            "programs": chosen or rewards.sandbox == "off" or not missing_guards(),
        }
        self._timeout_s = rewards.timeout_s
        self._conversation_s = rewards.conversation_limit_s
        self._faults = Faults(checks)
        self._tickets = itertools.count()
        # ticket -> key, of everything submitted and not collected
        self._keys: dict[int, Hashable] = {}
        self._outstanding: set[Hashable] = set()
        self._queue: deque[tuple[int, Response]] = deque()  # their responses may be functions still
        self._results: list[tuple[Hashable, Score]] = []
        self._error: Exception | None = None
        self._unlucky = 0  # workers in a row that died with no response begun
        self._again: set[int] = set()  # tickets of responses that a worker died on
        self._closing = False
        self.tried_rows: set[str] = set()  # rows that can be judged (rewards/rows.py)
        self._changed = threading.Condition()
        self._restarts = 0  # of the thread, since the last answer
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        self._workers = [Worker(self._setup) for _ in range(rewards.workers)]
        self._thread = threading.Thread(target=self._run, name="reward-dispatch", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response; returns at once. `key` must not belong to a sample that is still
        outstanding.

        A function is called for the text in the dispatching thread: detokenising takes no time of
        the caller's.
        """
        with self._changed:
            self._check_usable()
            if key in self._outstanding:
                raise ValueError(f"{key!r} was submitted twice: a sample is scored once")
            self._outstanding.add(key)
            ticket = next(self._tickets)
            text: Any = response  # of a function it is made by this object's thread
            self._keys[ticket] = key
            sent = Response(prompt.source, text, prompt.row, prompt.question)
            self._queue.append((ticket, sent))
            if len(self._queue) == 1:
                os.write(self._wake_write, b"!")

    @property
    def workers(self) -> Scorer:
        """The scorer itself, among those that add to its scores."""
        return self

    def submit_rows(self, key: Hashable, source: int, rows: Sequence[str]) -> None:
        """Queues rows to be tried without a response (rewards/rows.py)."""
        with self._changed:
            self._check_usable()
            self._outstanding.add(key)
            ticket = next(self._tickets)
            self._keys[ticket] = key
            self._queue.append((ticket, Response(source, "", "", "", tuple(rows))))
            os.write(self._wake_write, b"!")

    @property
    def outstanding(self) -> int:
        """Samples submitted and not yet collected."""
        with self._changed:
            return len(self._outstanding)

    def collect(self, block: bool) -> list[tuple[Any, Score]]:
        """What has been scored since the last call, in the order it was finished.

        `block` waits until there is at least one, and returns an empty list only if nothing is
        outstanding. Raises ScorerError if the workers cannot run. A wait ends: each response has
        `rewards.timeout_s`, each start START_LIMIT_S.
        """
        with self._changed:
            while True:
                self._check_usable()
                if self._results or not block or not self._outstanding:
                    break
                self._changed.wait()
            results, self._results = self._results, []
            self._outstanding.difference_update(key for key, _ in results)
            return results

    def wait_ready(self) -> None:
        """Returns when every worker has finished its imports; raises ScorerError if one cannot."""
        with self._changed:
            while not all(worker.ready for worker in self._workers):
                self._check_usable()
                self._changed.wait()

    def close(self) -> None:
        """Kills the workers; what was not collected is dropped. May be called twice."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            os.write(self._wake_write, b"!")
            self._changed.notify_all()
        self._thread.join()
        self._faults.close()
        for worker in self._workers:
            worker.kill()
        os.close(self._wake_read)
        os.close(self._wake_write)

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._error is not None:
            raise type(self._error)(*self._error.args)
        if self._closing:
            raise ScorerError("the scorer is closed")

    # The rest runs in the dispatching thread, the only one that touches channels.

    def _run(self) -> None:
        while not self._closing:
            try:
                self._hand_out()
                self._wait()
                for i, worker in enumerate(self._workers):
                    outcome = self._receive(worker)
                    if outcome:
                        self._replace(i, outcome)
            except Exception as error:
                try:
                    self._recover(error)
                except Exception as last:  # whoever waits must hear of it
                    with self._changed:
                        self._error = (
                            last
                            if isinstance(last, ScorerError | VerifierError)
                            else ScorerError(f"the scorer's thread failed: {last!r}")
                        )
                        self._changed.notify_all()
                    return

    def _recover(self, error: Exception) -> None:
        """New workers after a failure of this thread itself; what was in flight is queued again, in
        its order.
        """
        self._restarts += 1
        if isinstance(error, ScorerError | VerifierError) or self._restarts > RESTARTS:
            raise error
        logger.warning(
            "the scorer's thread failed and starts again (%d of %d): %r",
            self._restarts,
            RESTARTS,
            error,
        )
        for worker in self._workers:
            worker.kill()
        with self._changed:
            held = sorted(entry for worker in self._workers for entry in worker.held)
            self._queue.extendleft(entry for entry in reversed(held) if entry[0] in self._keys)
            for worker in self._workers:
                worker.held.clear()
        self._workers = [Worker(self._setup) for _ in self._workers]

    def _wait(self) -> None:
        """Until a worker says something, something is submitted, or a limit is over."""
        poll = select.poll()
        for descriptor in (
            self._wake_read,
            *(worker.channel.connection.fileno() for worker in self._workers),
        ):
            poll.register(descriptor, select.POLLIN)
        patience = self._patience()
        for descriptor, _ in poll.poll(None if patience is None else 1000 * patience + 1):
            if descriptor == self._wake_read:
                os.read(self._wake_read, 4096)

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not worker.ready or worker.held:
                continue
            with self._changed:
                share = min(BATCH, -(-len(self._queue) // len(self._workers)))
                worker.held.extend(self._queue.popleft() for _ in range(share))
            if worker.held:
                # not under the lock, for which `submit` would wait
                worker.held = deque((ticket, _with_text(one)) for ticket, one in worker.held)
                try:
                    worker.send([response for _, response in worker.held])
                # it died while idle: none of these was begun, and its end of file is read next
                except OSError:
                    with self._changed:
                        self._queue.extendleft(reversed(worker.held))
                    worker.held.clear()

    def _limit_s(self, worker: Worker) -> float:
        return self._timeout_s + GRACE_S if worker.ready else START_LIMIT_S

    def _patience(self) -> float | None:
        """Seconds until the next limit; None if every worker is idle."""
        busy = [
            worker.since + self._limit_s(worker)
            for worker in self._workers
            if worker.held or not worker.ready
        ]
        return max(0.0, min(busy) - time.monotonic()) if busy else None

    def _receive(self, worker: Worker) -> str:
        """Takes all that a worker has sent. Returns "crash" or "timeout" if it must be replaced,
        else "".
        """
        try:
            for said in worker.channel.receive():
                before, worker.since = worker.since, time.monotonic()
                if isinstance(said, Said):
                    self._note(worker, said)
                elif not worker.begun or said.index != worker.answered:
                    raise ChannelError(
                        f"an answer to response {said.index}, which is not the one it is on"
                    )
                else:
                    worker.answered += 1
                    self._unlucky = self._restarts = 0
                    self._finish(
                        *worker.held.popleft(),
                        Score(
                            0.0 if said.reward is None else said.reward,
                            said.reward is not None,
                            said.outcome,
                            said.detail,
                            said.components,
                            said.extracted,
                            said.says,
                            (worker.since - before) / self._conversation_s if said.says else 0.0,
                        ),
                    )
        except (EOFError, OSError):
            return "crash"
        except (ChannelError, IndexError) as error:
            logger.warning("a verifier worker is replaced: it sent %s", error)
            return "crash"
        late = (
            worker.held or not worker.ready
        ) and time.monotonic() - worker.since > self._limit_s(worker)
        return "timeout" if late else ""

    def _note(self, worker: Worker, said: Said) -> None:
        if worker.ready == (said.word != "begun"):
            raise ChannelError(
                f"{said.word!r}, when it was {'ready' if worker.ready else 'not ready'}"
            )
        if said.word == "refused":
            raise VerifierError(said.detail)
        if said.word == "failed":
            raise ScorerError(f"a verifier worker cannot start:\n{said.detail}")
        with self._changed:
            worker.begun = said.word == "begun"
            worker.ready = True
            self._changed.notify_all()

    def _finish(self, ticket: int, response: Response, score: Score) -> None:
        if not response.rows:
            self._faults.note(response, score)
        self._again.discard(ticket)
        with self._changed:
            self._results.append((self._keys.pop(ticket), score))
            self._changed.notify_all()

    def _replace(self, index: int, outcome: str) -> None:
        """A fresh worker for one that hangs or died. The response it was on is judged once more
        after a death, which may have come from outside, and then given up; those after it are
        queued first.
        """
        worker = self._workers[index]
        code = worker.kill()
        # it ended itself, and would again
        if not worker.ready and (outcome == "timeout" or code >= 0):
            how = (
                f"was not ready after {START_LIMIT_S:.0f} s"
                if outcome == "timeout"
                else f"ended with code {code} before it was ready"
            )
            raise ScorerError(f"a verifier worker {how}; its standard error says why")
        # no response's doing: it was killed from outside
        if outcome == "crash" and not (worker.held and worker.begun):
            self._unlucky += 1
            if self._unlucky > UNLUCKY_LIMIT:
                raise ScorerError(
                    f"{self._unlucky} verifier workers in a row were killed before they began a"
                    f" response (code {code}); is memory short?"
                )
        elif worker.held and outcome == "crash" and worker.held[0][0] not in self._again:
            self._again.add(worker.held[0][0])
        elif worker.held:
            detail = (
                f"no answer after {self._timeout_s} s"
                if outcome == "timeout"
                else f"the worker ended with code {code}"
            )
            self._finish(
                *worker.held.popleft(), Score(0.0, False, outcome, detail, extracted=False)
            )
        with self._changed:
            self._queue.extendleft(reversed(worker.held))
        self._workers[index] = Worker(self._setup)
