"""The simulated rollout of benchmarks/rollout_ticks.py."""

import dataclasses

import numpy as np

from benchmarks import rollout_ticks
from benchmarks.rollout_ticks import CALL, SETTINGS, Fake, token_steps
from compass_jax.base.records import SampleKey


def test_lengths_are_those_of_the_description():
    fake = Fake(SETTINGS["plain"], 0)
    lengths = [fake.length(SampleKey(n, 0, i)) for n in range(64) for i in range(16)]
    assert abs(np.mean(lengths) / 8_100 - 1) < 0.05 and 20_000 < max(lengths) <= 30_720


def test_token_steps_are_those_of_the_longest_answers_of_each_round(monkeypatch):
    """By hand, from the lengths: in rounds each round costs its longest answer; in one rollout each
    group begins its further answers when its first ones have ended.
    """
    monkeypatch.setattr(rollout_ticks, "STEPS", 2)
    for name, first, further in (("plain", 16, 0), ("growth to 32", 16, 16)):
        config, fake = SETTINGS[name], Fake(SETTINGS[name], 0)

        def longest(group, indices, fake=fake):
            lengths = [fake.length(SampleKey(group, 0, i)) for i in indices]
            return max((-(-x // CALL) for x in lengths), default=0)

        groups = range(64, 128)  # of the second step
        begun = {n: longest(n, range(first)) for n in groups}
        # groups of even number have equal rewards
        more = {n: 0 if n % 2 else longest(n, range(first, first + further)) for n in groups}
        in_rounds = max(begun.values()) + max(more.values())
        together = max(begun[n] + more[n] for n in groups)
        for ticks, calls in ((None, in_rounds), (0, together)):
            changed = dataclasses.replace(config, verdict_ticks=ticks)
            assert token_steps(changed, 0) == CALL * calls
