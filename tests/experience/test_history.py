"""The history of prompts: sums by hand, the expected length of a prompt, and its state after a
restart.
"""

import json
import math

import numpy as np
import pytest

from compass_jax.base.records import Outcome, Prompt
from compass_jax.experience.history import PromptHistory

A, B, NEW, OTHER = (
    Prompt(i, 0, label, f"q{i}", np.array([i], np.int32), "")
    for i, label in enumerate(("sums", "sums", "sums", "products"))
)


def seen():
    history = PromptHistory()
    history.update([(A, Outcome(4, 1.0, 40, "", 4)), (B, Outcome(3, 3.0, 80, "easy", 4))])
    history.update([(A, Outcome(0, 0.0, 120, "", 4))])  # no verdict: lengths count, rewards do not
    return history


def test_sums_and_the_last_group():
    history = seen()
    assert history[A.id] == {
        "samples": 8,
        "scored": 4,
        "reward_sum": 1,
        "tokens": 160,
        "last_reward": 0.25,
        "last_length": 30,
    }
    assert history[B.id]["last_reward"] == 1 and len(history) == 2


def test_the_expected_length_is_that_of_the_last_group_or_of_the_label():
    history = seen()
    assert history.expected_length(A) == 30 and history.expected_length(B) == 20
    assert history.expected_length(NEW) == pytest.approx((0.9 * 120 + 120) / (0.9 * 8 + 4))
    assert math.isnan(history.expected_length(OTHER))


def test_it_is_the_same_after_a_restart():
    history, restored = seen(), PromptHistory()
    restored.restore(json.loads(json.dumps(history.state())))
    assert restored.state() == history.state()
    restored.update([(NEW, Outcome(4, 0.0, 4, "hard", 4))])
    assert len(history) == 2 and restored.expected_length(NEW) == 1
