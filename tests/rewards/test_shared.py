"""Scores over several processes, which are threads in these tests: each scores its share, and all
get all scores."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from compass_jax.base.records import Prompt, Score
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.joined import SharedScorer

PROMPT = Prompt(1, 0, "sum", "1 + 1?", np.zeros(1, np.int32), "2")
LATE = Score(0.0, False, "timeout", "no answer")


class Checks:
    """A scorer that rewards the length of a response; a response "late" stands for a hang. The
    results come one by one, the last first.
    """

    def __init__(self, failure=None):
        self.seen, self._waiting, self.closed, self._failure = [], [], False, failure

    def submit(self, key, prompt, response):
        self.seen.append(response)
        score = LATE if response == "late" else Score(len(response) / 3, True)
        self._waiting.append((key, score))

    @property
    def outstanding(self):
        return len(self._waiting)

    def collect(self, block):
        assert block
        if self._failure:
            raise self._failure
        return [self._waiting.pop()]

    def wait_ready(self):
        pass

    def close(self):
        self.closed = True


def together(checks, work):
    """Runs `work(scorer)` in a thread for each scorer; returns the results."""
    payloads, barrier = [b""] * len(checks), threading.Barrier(len(checks))

    def run(number):
        def exchange(payload):
            payloads[number] = payload
            barrier.wait(10)
            exchanged = list(payloads)
            barrier.wait(10)
            return exchanged

        with SharedScorer(checks[number], number, len(checks), exchange) as scorer:
            return work(scorer)

    with ThreadPoolExecutor(len(checks)) as pool:
        return list(pool.map(run, range(len(checks))))


@pytest.mark.parametrize("count", [2, 3])
def test_every_process_gets_every_score_in_the_order_of_the_samples(count):
    responses = ["a", "bb", "late", "dddd", "", "ffffff", "g"]
    checks = [Checks() for _ in range(count)]

    def work(scorer):
        collected = []
        scorer.wait_ready()
        for part in (responses, responses[:3]):
            for key, response in enumerate(part):
                scorer.submit(10 + key, PROMPT, response)
            assert scorer.outstanding == len(part) and scorer.collect(block=False) == []
            collected.append(scorer.collect(block=True))
            assert scorer.outstanding == 0 and scorer.collect(block=True) == []
        return collected

    results = together(checks, work)
    assert all(result == results[0] for result in results)
    first, second = results[0]
    assert [key for key, _ in first] == list(range(10, 17))
    assert [score.reward for _, score in first] == [1 / 3, 2 / 3, 0.0, 4 / 3, 0.0, 2.0, 1 / 3]
    assert second == first[:3] and first[2][1] == LATE
    submitted = responses + responses[:3]
    assert [check.seen for check in checks] == [submitted[n::count] for n in range(count)]
    assert all(check.closed for check in checks)


def test_a_sample_is_submitted_once():
    scorer = SharedScorer(Checks(), 0, 2, lambda payload: [payload])
    scorer.submit(1, PROMPT, "a")
    with pytest.raises(ValueError, match="1 was submitted twice"):
        scorer.submit(1, PROMPT, "a")


def test_an_error_of_one_process_is_raised_in_all():
    def work(scorer):
        for n in range(6):
            scorer.submit(n, PROMPT, "a")
        with pytest.raises(VerifierError, match="nobody reaches the judge"):
            scorer.collect(block=True)

    together([Checks(), Checks(VerifierError("nobody reaches the judge")), Checks()], work)
