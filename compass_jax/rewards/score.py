"""Scores responses in worker processes that can be killed, while the rollout goes on.

A thread hands tasks to idle workers and collects their answers; `submit` and `collect` only touch queues. A check that
runs longer than `rewards.timeout_s` has its worker killed; a worker that dies took down only the task it was on. Such a
sample gets a Score that is not known; the tasks behind it go to the next worker. Results carry the caller's key.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path

from compass_jax.config import DataConfig, ProceduralSource, RewardConfig
from compass_jax.records import Prompt, Score
from compass_jax.rewards.verifiers import Check, Task

BATCH = 32  # most tasks that are sent to a worker at once
START_LIMIT_S = 300.0  # first imports on a cold disk are slow; a worker that needs longer than this does not start
UNLUCKY_LIMIT = 5


class ScorerError(RuntimeError):
    """The verifier workers cannot run at all; the message holds the worker's traceback."""


class _Worker:
    """A process, its connection, and the tasks it was sent and has not answered (the first is the one it is on)."""

    def __init__(self, setup: tuple[list[Check], str, float]):
        self.connection, theirs = Pipe()
        lifeline, self._lifeline = os.pipe()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, _import_path())), "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        command = [sys.executable, "-P", "-m", "compass_jax.rewards.worker", str(theirs.fileno()), str(lifeline)]
        # not multiprocessing: its children import the program's main module, and with it jax
        kept = (theirs.fileno(), lifeline)
        self.process = subprocess.Popen(command, pass_fds=kept, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        theirs.close()
        os.close(lifeline)
        self.tasks: deque[tuple[int, Task]] = deque()
        self.ready = False
        self.begun = False  # it has received the tasks
        self.since = time.monotonic()  # when it began what it is doing
        self.connection.send(setup)

    def send(self, tasks: list[tuple[int, Task]]) -> None:
        self.tasks.extend(tasks)
        self.begun = False
        self.since = time.monotonic()
        self.connection.send([task for _, task in tasks])

    def kill(self) -> int:
        """Ends it and returns its exit code. May be called twice."""
        self.process.kill()
        code = self.process.wait()
        self.connection.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        return code


def _import_path() -> list[str]:
    """What the worker imports is what this process imports."""
    package = str(Path(__file__).resolve().parents[2])
    return [package, *(os.path.abspath(entry) for entry in sys.path)]


def _checks(data: DataConfig) -> list[Check]:
    return [Check("reasoning_gym", s.dataset, s.options) if isinstance(s, ProceduralSource) else Check("math") for s in data.sources]


def _with_text(task: Task) -> Task:
    return task._replace(response=task.response()) if callable(task.response) else task


class Scorer:
    """Verifier workers for `data.sources`. Use as a context manager, or call `close()`.

    `verifier` ("module:function", called with response and reference answer) replaces every source's own check.
    """

    def __init__(self, rewards: RewardConfig, data: DataConfig, verifier: str = ""):
        checks = [Check(verifier) for _ in data.sources] if verifier else _checks(data)
        self._setup = (checks, rewards.answer_tag, rewards.timeout_s)
        self._timeout_s = rewards.timeout_s
        self._tickets = itertools.count()
        self._keys: dict[int, Hashable] = {}  # ticket -> key, of everything submitted and not collected
        self._outstanding: set[Hashable] = set()
        self._queue: deque[tuple[int, Task]] = deque()  # their responses may be functions still
        self._results: list[tuple[Hashable, Score]] = []
        self._error: str = ""
        self._ever_ready = False
        self._unlucky = 0  # workers in a row that died with no task begun
        self._closing = False
        self._changed = threading.Condition()
        self._wake_read, self._wake_write = Pipe(duplex=False)
        self._workers = [_Worker(self._setup) for _ in range(rewards.workers)]
        self._thread = threading.Thread(target=self._run, name="reward-dispatch", daemon=True)
        self._thread.start()

    def submit(self, key: Hashable, prompt: Prompt, response: str | Callable[[], str]) -> None:
        """Queues a response; returns at once. `key` must not belong to a sample that is still outstanding.

        A function is called for the text in the dispatching thread: detokenising takes no time of the caller's.
        """
        with self._changed:
            self._check_usable()
            if key in self._outstanding:
                raise ValueError(f"{key!r} was submitted twice: a sample is scored once")
            self._outstanding.add(key)
            ticket = next(self._tickets)
            self._keys[ticket] = key
            self._queue.append((ticket, Task(prompt.source, response, prompt.answer, prompt.item)))
            if len(self._queue) == 1:
                self._wake_write.send_bytes(b"!")

    @property
    def outstanding(self) -> int:
        """Samples submitted and not yet collected."""
        with self._changed:
            return len(self._outstanding)

    def collect(self, block: bool) -> list[tuple[Hashable, Score]]:
        """What has been scored since the last call, in the order it was finished.

        `block` waits until there is at least one, and returns an empty list only if nothing is outstanding. Raises
        ScorerError if the workers cannot run. A wait ends: each task has `rewards.timeout_s`, each start START_LIMIT_S.
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
            self._wake_write.send_bytes(b"!")
            self._changed.notify_all()
        self._thread.join()
        for worker in self._workers:
            worker.kill()
        self._wake_read.close()
        self._wake_write.close()

    def __enter__(self) -> Scorer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_usable(self) -> None:
        if self._error:
            raise ScorerError(self._error)
        if self._closing:
            raise ScorerError("the scorer is closed")

    # The rest runs in the dispatching thread, the only one that touches connections.

    def _run(self) -> None:
        try:
            while not self._closing:
                self._hand_out()
                connections: list[Connection] = [self._wake_read, *(worker.connection for worker in self._workers)]
                wait(connections, self._patience())
                while self._wake_read.poll():
                    self._wake_read.recv_bytes()
                for i, worker in enumerate(self._workers):
                    outcome = self._receive(worker)
                    if outcome:
                        self._replace(i, outcome)
        except BaseException as error:  # whatever it is (a panic of the tokenizer is no Exception), whoever waits must hear of it
            with self._changed:
                self._error = str(error) if isinstance(error, ScorerError) else f"the scorer's thread failed: {error!r}"
                self._changed.notify_all()

    def _hand_out(self) -> None:
        for worker in self._workers:
            if not worker.ready or worker.tasks:
                continue
            with self._changed:
                share = min(BATCH, -(-len(self._queue) // len(self._workers)))
                waiting = [self._queue.popleft() for _ in range(share)]
            tasks = [(ticket, _with_text(task)) for ticket, task in waiting]  # not under the lock, for which `submit` would wait
            if tasks:
                try:
                    worker.send(tasks)
                except OSError:  # it died while idle: none of these was begun, and its end of file is read next
                    worker.tasks.clear()
                    with self._changed:
                        self._queue.extendleft(reversed(tasks))

    def _limit_s(self, worker: _Worker) -> float:
        return self._timeout_s if worker.ready else START_LIMIT_S

    def _patience(self) -> float | None:
        """Seconds until the next limit; None if every worker is idle."""
        busy = [worker.since + self._limit_s(worker) for worker in self._workers if worker.tasks or not worker.ready]
        return max(0.0, min(busy) - time.monotonic()) if busy else None

    def _receive(self, worker: _Worker) -> str:
        """Takes all that a worker has sent. Returns "crash" or "timeout" if it must be replaced, else ""."""
        try:
            while worker.connection.poll():
                value, detail = worker.connection.recv()
                worker.since = time.monotonic()
                if not worker.ready:
                    if value != "ready":
                        raise ScorerError(f"a verifier worker cannot start:\n{detail}")
                    with self._changed:
                        worker.ready = self._ever_ready = True
                        self._changed.notify_all()
                elif value == "begun":
                    worker.begun = True
                else:
                    self._unlucky = 0
                    known = value is not None
                    self._finish(worker.tasks.popleft()[0], Score(value if known else 0.0, known, "ok" if known else "error", detail))
        except (EOFError, OSError):
            return "crash"
        late = (worker.tasks or not worker.ready) and time.monotonic() - worker.since > self._limit_s(worker)
        return "timeout" if late else ""

    def _finish(self, ticket: int, score: Score) -> None:
        with self._changed:
            self._results.append((self._keys.pop(ticket), score))
            self._changed.notify_all()

    def _replace(self, index: int, outcome: str) -> None:
        """A fresh worker for one that hangs or died; the task it was on is given up, those behind it are queued first."""
        worker = self._workers[index]
        code = worker.kill()
        if not worker.ready and (outcome == "timeout" or not self._ever_ready):
            how = f"was not ready after {START_LIMIT_S:.0f} s" if outcome == "timeout" else f"ended with code {code} before it was ready"
            raise ScorerError(f"a verifier worker {how}; its standard error says why")
        if outcome == "crash" and not (worker.tasks and worker.begun):  # no task's doing: it was killed from outside
            self._unlucky += 1
            if self._unlucky > UNLUCKY_LIMIT:
                raise ScorerError(f"{self._unlucky} verifier workers in a row were killed before they began a task (code {code}); is memory short?")
        elif worker.tasks:
            detail = f"no answer after {self._timeout_s} s" if outcome == "timeout" else f"the worker ended with code {code}"
            self._finish(worker.tasks.popleft()[0], Score(0.0, False, outcome, detail))
        with self._changed:
            self._queue.extendleft(reversed(worker.tasks))
        self._workers[index] = _Worker(self._setup)
