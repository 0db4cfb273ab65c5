"""Scores over several processes, which are threads here: each checks its share, and all get the
same.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from compass_jax.records import Prompt, Score
from compass_jax.rewards.faults import VerifierError
from compass_jax.rewards.joined import SharedScorer

PROMPT = Prompt(1, 0, "sum", "1 + 1?", np.zeros(1, np.int32), "2")


class Checks:
    """A scorer that says of each response its length; a response of "late" is a hang. Answers come
    one by one, the last first.
    """

    def __init__(self):
        self.seen, self._waiting, self.closed = [], [], False

    def submit(self, key, prompt, response):
        self.seen.append(response)
        self._waiting.append(
            (
                key,
                Score(0.0, False, "timeout", "no answer")
                if response == "late"
                else Score(len(response) / 3, True),
            )
        )

    @property
    def outstanding(self):
        return len(self._waiting)

    def collect(self, block):
        assert block
        return [self._waiting.pop()]

    def wait_ready(self):
        pass

    def close(self):
        self.closed = True


class Processes:
    """`exchange` for threads."""

    def __init__(self, count):
        self.payloads, self.barrier = [b""] * count, threading.Barrier(count)

    def exchange(self, number):
        def of(payload):
            self.payloads[number] = payload
            self.barrier.wait(10)
            found = list(self.payloads)
            self.barrier.wait(10)
            return found

        return of


@pytest.mark.parametrize("count", [2, 3])
def test_every_process_gets_every_score_in_the_order_of_the_samples(count):
    responses, together, checks = (
        ["a", "bb", "late", "dddd", "", "ffffff", "g"],
        Processes(count),
        [Checks() for _ in range(count)],
    )

    def run(number):
        out = []
        with SharedScorer(checks[number], number, count, together.exchange(number)) as scorer:
            scorer.wait_ready()
            for part in (responses, responses[:3]):
                for key, response in enumerate(part):
                    scorer.submit(10 + key, PROMPT, response)
                assert scorer.outstanding == len(part) and scorer.collect(block=False) == []
                out.append(scorer.collect(block=True))
                assert scorer.outstanding == 0 and scorer.collect(block=True) == []
        return out

    with ThreadPoolExecutor(count) as pool:
        found = list(pool.map(run, range(count)))
    assert all(x == found[0] for x in found)
    assert [key for key, _ in found[0][0]] == list(range(10, 17))
    assert [score.reward for _, score in found[0][0]] == [1 / 3, 2 / 3, 0.0, 4 / 3, 0.0, 2.0, 1 / 3]
    assert found[0][1] == found[0][0][:3] and found[0][0][2][1] == Score(
        0.0, False, "timeout", "no answer"
    )
    everything = responses + responses[:3]
    assert [check.seen for check in checks] == [everything[n::count] for n in range(count)] and all(
        check.closed for check in checks
    )


def test_a_sample_is_submitted_once():
    scorer = SharedScorer(Checks(), 0, 2, lambda payload: [payload])
    scorer.submit(1, PROMPT, "a")
    with pytest.raises(ValueError, match="1 was submitted twice"):
        scorer.submit(1, PROMPT, "a")


def test_an_error_of_one_process_is_raised_in_all():
    class Broken(Checks):
        def collect(self, block):
            raise VerifierError("nobody reaches the judge")

    together, checks = Processes(3), [Checks(), Broken(), Checks()]

    def run(number):
        scorer = SharedScorer(checks[number], number, 3, together.exchange(number))
        for n in range(6):
            scorer.submit(n, PROMPT, "a")
        with pytest.raises(VerifierError, match="nobody reaches the judge"):
            scorer.collect(block=True)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
