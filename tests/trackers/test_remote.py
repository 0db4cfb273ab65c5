"""Remote trackers: each gets every step once and in order, and costs the run nothing if it hangs or
fails."""

import json
import math
import threading
import time

import pytest

from compass_jax.trackers import remote
from compass_jax.trackers.remote import Remote, logged
from compass_jax.trackers.services import Service


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


def metrics_file(path, steps, stage="rl", cut=""):
    rows = [{"stage": stage, "step": s, "metrics": {"x": float(s), "bad": None}} for s in steps]
    with open(path, "a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows) + cut)
    return path


def test_every_step_comes_once_whatever_the_tracker_has_and_the_log_holds(tmp_path):
    """The tracker has steps 1 and 2, and the log has steps 1 to 4 and half a line. The run resumes
    after step 4: steps 3 and 4 come from the log, later ones from the run. A second resume after
    step 4 adds only step 7.
    """
    path = metrics_file(tmp_path / "metrics.jsonl", [1, 2])
    metrics_file(path, [1, 9], stage="sft")
    metrics_file(
        path, [3, 4], cut='not a line\n{"step": 3, "metrics": {}}\n{"stage": "rl", "step": 5, "met'
    )
    messages = []
    service = Memory([(1, {"x": 1.0}), (2, {"x": 2.0})])
    tracker = remote_of(service, tmp_path, messages.append)
    tracker.go_on(4)
    for step in (5, 6):
        tracker.log(step, {"x": float(step), "bad": math.nan, "worse": math.inf})
    tracker.close()
    tracker.close()
    assert service.rows == [(step, {"x": float(step)}) for step in range(1, 7)]
    assert service.finished == 1 and messages == ["memory: here"]
    resumed = remote_of(service, tmp_path, messages.append)
    resumed.go_on(4)  # step of the checkpoint
    for step in (5, 6, 7):
        resumed.log(step, {"x": float(step)})
    resumed.close()
    assert [step for step, _ in service.rows] == [1, 2, 3, 4, 5, 6, 7]
    assert list(logged(tmp_path / "nothing", "rl", 9)) == []


@pytest.mark.parametrize("where", ["open", "log", "finish"])
def test_a_tracker_that_fails_is_told_once_and_nothing_else_happens(tmp_path, monkeypatch, where):
    def fail(self, *_, **__):
        raise OSError("the server\nis away")

    monkeypatch.setattr(Memory, where, fail)
    messages = []
    tracker = remote_of(Memory(), tmp_path, messages.append)
    tracker.go_on(0)
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
