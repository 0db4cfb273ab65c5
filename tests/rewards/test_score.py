import os
import random
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from compass_jax.base.records import Prompt, Score
from compass_jax.config import DataConfig, FileSource, RewardConfig
from compass_jax.rewards.score import Scorer, ScorerError
from compass_jax.rewards.tasks.rows import encode_row

ACT = "corpus_verifiers:act"
PROMPT = Prompt(1, 0, "x", "q", np.zeros(1, np.int32), "ref", encode_row({"answer": "ref"}))


def judged_by(verifier):
    return DataConfig(sources=(FileSource("unused.jsonl", verifier=verifier),))


def scorer(workers=1, timeout_s=20.0, verifier=ACT, data=None):
    return Scorer(RewardConfig(workers=workers, timeout_s=timeout_s), data or judged_by(verifier))


def drain(scorer, limit_s=30.0):
    got, end = {}, time.monotonic() + limit_s
    while scorer.outstanding:
        for key, score in scorer.collect(block=True):
            assert key not in got
            got[key] = score
        assert time.monotonic() < end
    return got


def alive(pid):
    """Returns whether a process runs (a zombie does not)."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def descendants(pid):
    """Returns the process ids of children, their children and so on."""
    try:
        children = [
            int(child)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):  # the process ended meanwhile
        return []
    return [descendant for child in children for descendant in (child, *descendants(child))]


def wait_until(condition, limit_s=10.0):
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_many_results_keep_their_keys_and_come_fast():
    numbers = random.Random(0).sample(range(10_000), 600)
    with scorer(workers=2) as s:
        s.wait_ready()
        start = time.monotonic()
        for n in numbers:
            s.submit(("sample", n), PROMPT, str(n))
        got = drain(s)
        seconds = time.monotonic() - start
        assert got == {("sample", n): Score(float(n), True) for n in numbers}
        assert seconds < 30.0
        assert s.collect(block=True) == [] and s.collect(block=False) == []


def test_a_text_that_is_still_to_be_made_is_made_by_another_thread_and_holds_up_nobody():
    """Detokenising takes 0.2 s; three calls of `submit` return at once, and the texts are scored. A
    text that cannot be made raises an error.
    """
    threads = []

    def text(value):
        threads.append(threading.current_thread())
        time.sleep(0.2)
        return value

    with scorer() as s:
        s.wait_ready()
        start = time.monotonic()
        for n in range(3):
            s.submit(n, PROMPT, partial(text, str(n)))
        assert time.monotonic() - start < 0.15
        assert drain(s) == {n: Score(float(n), True) for n in range(3)}
        assert len(threads) == 3 and threading.main_thread() not in threads
        s.submit("bad", PROMPT, partial(int, "no number"))
        with pytest.raises(ScorerError, match="no number"):
            drain(s)


BAD = {
    3: ("while True: pass", "timeout", "no answer after 0.5 s"),
    10: ("os._exit(3)", "crash", "code 3"),
    11: ("ctypes.string_at(0)", "crash", f"code -{int(signal.SIGSEGV)}"),
    17: ("raise RuntimeError('cannot check')", "error", "RuntimeError: cannot check"),
    20: ("time.sleep(60)", "timeout", "no answer after 0.5 s"),
    25: ("float('nan')", "error", "nan"),
    29: ("sys.exit('done')", "error", "SystemExit: done"),
    33: ("len(bytearray(2**36))", "error", "MemoryError"),
}


def test_hang_crash_and_exception_cost_only_their_own_sample():
    with scorer(timeout_s=0.5) as s:
        for n in range(40):
            s.submit(n, PROMPT, BAD[n][0] if n in BAD else str(n))
        got = drain(s)
    assert sorted(got) == list(range(40))
    for n, score in got.items():
        if n in BAD:
            assert score.outcome == BAD[n][1] and BAD[n][2] in score.detail
            assert not score.known and not score.reward
        else:
            assert score == Score(float(n), True)


def test_workers_have_no_jax_and_a_killed_one_is_replaced():
    with scorer() as s:
        s.submit("jax", PROMPT, "'jax' in sys.modules")
        assert drain(s)["jax"].reward == 0.0
        first = s._workers[0].process.pid
        os.kill(first, signal.SIGKILL)
        assert wait_until(lambda: not alive(first))
        s.submit("again", PROMPT, "7")
        assert drain(s)["again"].reward == 7.0
        second = s._workers[0].process.pid
        assert second != first and alive(second)
    assert not alive(first) and not alive(second)


def test_a_response_whose_worker_was_killed_from_outside_is_judged_once_more():
    """If its worker dies again, the response is taken as the cause and given up, like one that ends
    every worker.
    """
    with scorer() as s:
        s.submit("first", PROMPT, "time.sleep(0.5) or -1.0")
        for kills in (1, 2):
            assert wait_until(lambda: s._workers[0].begun)
            s._workers[0].process.kill()
            if kills == 1:
                assert drain(s) == {"first": Score(-1.0, True)}
                s.submit("second", PROMPT, "time.sleep(0.5) or -1.0")
        assert drain(s) == {"second": Score(-1.0, True)}
        s.submit("third", PROMPT, "os._exit(3)")
        assert drain(s)["third"].outcome == "crash"


def test_random_kills_lose_at_most_the_sample_in_hand():
    rng = random.Random(1)
    with scorer(workers=2) as s:
        s.wait_ready()
        for n in range(300):
            s.submit(n, PROMPT, "time.sleep(0.004) or -1.0" if n % 2 else str(n))
        for _ in range(5):
            time.sleep(rng.uniform(0.0, 0.1))
            s._workers[rng.randrange(2)].process.send_signal(signal.SIGKILL)
        got = drain(s)
    assert sorted(got) == list(range(300))
    lost = [n for n in got if not got[n].known]
    assert len(lost) <= 5 and all(got[n].outcome == "crash" for n in lost)
    assert all(got[n].reward == (-1.0 if n % 2 else n) for n in got if n not in lost)


def test_modules_of_a_worker_import_no_jax():
    code = (
        "import sys; import compass_jax.rewards.worker; print('jax' in sys.modules, 'numpy' in"
        " sys.modules)"
    )
    assert subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split() == ["False", "False"]


@pytest.mark.parametrize("killed", [signal.SIGKILL, signal.SIGTERM])
def test_a_busy_worker_dies_with_its_parent(killed):
    code = f"""
import sys, time; sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_score as t
s = t.scorer(timeout_s=600); s.submit(0, t.PROMPT, "1"); t.drain(s)
print(s._workers[0].process.pid, flush=True)
s.submit(1, t.PROMPT, "while True: pass"); time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        worker = int(parent.stdout.readline())
        assert wait_until(lambda: len(descendants(worker)) == 2), (
            "the process that answers, and the check that spins"
        )
        everyone = [worker, *descendants(worker)]
        assert all(map(alive, everyone))
    finally:
        parent.send_signal(killed)
        parent.wait()
        parent.stdout.close()
    assert wait_until(lambda: not any(map(alive, everyone)))


def test_a_worker_that_dies_while_starting_is_reported(tmp_path, monkeypatch):
    (tmp_path / "dies_at_import.py").write_text("import os\nos._exit(7)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with (
        scorer(verifier="dies_at_import:f") as s,
        pytest.raises(ScorerError, match="ended with code 7 before it was ready"),
    ):
        s.wait_ready()


def test_workers_that_are_always_killed_end_the_wait():
    with scorer() as s:
        s.wait_ready()

        def kill():
            end = time.monotonic() + 20
            while not s._error and time.monotonic() < end:
                s._workers[0].process.kill()
                time.sleep(0.005)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with pytest.raises(
                ScorerError, match=r"in a row were killed before they began a response \(code -9\)"
            ):
                for _ in range(50):
                    s.submit(object(), PROMPT, "time.sleep(1) or -1.0")
                    s.collect(block=True)
        finally:
            killer.join()


def test_misuse_is_refused():
    s = scorer()
    s.submit("a", PROMPT, "1")
    with pytest.raises(ValueError, match="'a' was submitted twice"):
        s.submit("a", PROMPT, "2")
    assert drain(s)["a"].reward == 1.0
    s.submit("a", PROMPT, "2")
    assert drain(s)["a"].reward == 2.0
    s.close()
    s.close()
    with pytest.raises(ScorerError, match="closed"):
        s.submit("b", PROMPT, "1")
