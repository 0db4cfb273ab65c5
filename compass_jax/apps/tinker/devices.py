"""The thread that owns the devices. It takes training jobs in order of arrival, and between two of
their micro-batches it decodes once for the sampling requests.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from compass_jax.apps.tinker.answers import Answer, Steps
from compass_jax.apps.tinker.errors import RequestError
from compass_jax.apps.tinker.sampling import SampleJob, SampleQueue
from compass_jax.base.errors import CompassError

Work = Callable[[], Steps]


class Job(NamedTuple):
    """A training job: a generator that yields after each micro-batch, and what takes its result or
    its error.
    """

    work: Work
    finish: Callable[[Answer], None]


class DeviceThread:
    """The thread. `submit` and `sample` may be called from others.

    Args:
        samples: the queue of sampling requests.
        max_waiting: maximum number of training jobs, and of sampling requests, that wait.
    """

    def __init__(self, samples: SampleQueue, max_waiting: int):
        self._samples, self.max_waiting = samples, max_waiting
        self._jobs: deque[Job] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="devices", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the thread after its current micro-batch or decoding step."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def submit(self, job: Job) -> None:
        """Queues a training job. Raises RequestError if too many wait."""
        with self._changed:
            self._check_room(len(self._jobs))
            self._jobs.append(job)
            self._changed.notify()

    def sample(self, job: SampleJob) -> None:
        """Queues a sampling request. Raises RequestError if too many wait."""
        with self._changed:
            self._check_room(self._samples.waiting)
            self._samples.put(job)
            self._changed.notify()

    def _check_room(self, waiting: int) -> None:
        if waiting >= self.max_waiting:
            text = f"{waiting} requests wait, the most that may: try again later"
            raise RequestError(text, status=429)

    def _run(self) -> None:
        current: tuple[Job, Steps] | None = None
        while True:
            with self._changed:
                if current is None:
                    self._changed.wait_for(self._has_work)
                if self._stopped:
                    return
                if current is None and self._jobs:
                    job = self._jobs.popleft()
                    current = job, job.work()
            if current is not None and _advance(*current):
                current = None
            if self._samples.busy:
                self._decode()

    def _has_work(self) -> bool:
        return self._stopped or bool(self._jobs) or self._samples.busy

    def _decode(self) -> None:
        try:
            self._samples.tick()
        except Exception as error:
            self._samples.fail_all(public_error(error))


def _advance(job: Job, generator: Steps) -> bool:
    """Runs a job to its next yield; returns whether it has ended."""
    try:
        next(generator)
    except StopIteration as end:
        job.finish(end.value)
    except Exception as error:
        job.finish(public_error(error))
    else:
        return False
    return True


def public_error(error: Exception) -> CompassError:
    """Returns the error that a client may read; logs others, which may name paths."""
    if isinstance(error, RequestError):
        return error
    logging.getLogger(__name__).error("a request failed", exc_info=error)
    return RequestError("the server has failed at this request; its log has the error", status=500)
