"""Remote trackers: each gets every step that it lacks, and costs the run nothing if it hangs or
fails."""

import math
import threading
import time

import pytest

from compass_jax.runs.trackers import remote
from compass_jax.runs.trackers.remote import Remote
from compass_jax.runs.trackers.services import Service


class Memory:
    """A tracker that keeps its rows in memory over several runs."""

    def __init__(self, has=()):
        self.rows = list(has)
        self.finished = 0

    def open(self, folder, stage, settings, tell):
        tell("memory: here")
        return self, max((step for step, _ in self.rows), default=0)

    def log(self, numbers, step):
        self.rows.append((step, dict(numbers)))

    def finish(self):
        self.finished += 1


def remote_of(memory, run_dir, tell):
    return Remote(Service("memory", memory.open), run_dir, "rl", {}, tell)


def test_every_step_that_the_tracker_lacks_comes_once(tmp_path):
    """The tracker has steps 1 and 2. The run resumes after step 1; a second resume repeats steps 3
    and 4.
    """
    messages = []
    service = Memory([(1, {"x": 1.0}), (2, {"x": 2.0})])
    for first, last in ((2, 4), (3, 6)):
        tracker = remote_of(service, tmp_path, messages.append)
        for step in range(first, last + 1):
            tracker.log(step, {"x": float(step), "bad": math.nan, "worse": math.inf})
        tracker.close()
        tracker.close()
        assert service.rows == [(step, {"x": float(step)}) for step in range(1, last + 1)]
    assert service.finished == 2 and messages == ["memory: here"] * 2


@pytest.mark.parametrize("where", ["open", "log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_nothing_else_happens(tmp_path, monkeypatch, where):
    def fail(self, *_, **__):
        raise OSError("the server\nis away")

    monkeypatch.setattr(Memory, where, fail)
    messages = []
    tracker = remote_of(Memory(), tmp_path, messages.append)
    for step in range(1, 50):
        tracker.log(step, {"x": 1.0})
        time.sleep(0.001)
    tracker.close()
    assert [message for message in messages if "here" not in message] == [
        "memory: the server is away; the run goes on without it, and"
        f" {tmp_path / 'metrics.jsonl'} has every number"
    ]
    if where != "finish":  # steps for a failed tracker do not pile up in the queue
        assert tracker._work.qsize() < 49


def test_a_tracker_that_hangs_holds_up_no_step_and_the_end_for_a_bounded_time(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(remote, "CLOSE_S", 0.2)
    free = threading.Event()
    monkeypatch.setattr(Memory, "open", lambda *_: free.wait(60))
    messages = []
    tracker = remote_of(Memory(), tmp_path, messages.append)
    start = time.monotonic()
    for step in range(1, 100):
        tracker.log(step, {"x": 1.0})
    assert time.monotonic() - start < 0.2
    tracker.close()
    assert time.monotonic() - start < 10
    free.set()
    assert len(messages) == 1 and "did not take everything within 0 s" in messages[0]


def test_nothing_is_started_for_a_run_that_logs_nothing(tmp_path):
    threads = threading.active_count()
    tracker = remote_of(Memory(), tmp_path, pytest.fail)
    assert threading.active_count() == threads
    tracker.close()
