"""Pass rate and length by label, and the distributions of a step, compared with counts by hand."""

import numpy as np
import pytest

from compass_jax.base.records import Group, Prompt, Rollout, Score
from compass_jax.data.difficulty import label_of
from compass_jax.experience.metrics import histogram, label_metrics, step_histograms


def rollout(length):
    tokens = np.zeros(length, np.int32)
    values = np.zeros(length, np.float32)
    prompt = Prompt(1, 0, "x", "q", np.zeros(0, np.int32), "")
    return Rollout(prompt, 0, tokens, values, values, False, tokens, 0)


def group(label, rewards, lengths, labels=()):
    prompt = Prompt(1, 0, label, "q", np.zeros(0, np.int32), "", labels=labels)
    scores = tuple(Score(r or 0.0, r is not None) for r in rewards)
    return Group(prompt, tuple(map(rollout, lengths)), scores)


GROUPS = [
    group("easy", (1.0, 0.9), (2, 4)),
    group("easy", (1.0, None), (6, 8)),
    group("hard", (None, None), (3, 5)),
    group("maths", (0.0, 1.0), (1, 1), ("difficulty/3", "domain/algebra")),
]


def test_pass_rate_and_length_of_each_label():
    labels = [label_of(one.prompt) for one in GROUPS]
    assert label_metrics(GROUPS, labels, right_at=1.0) == {
        "label/easy/pass_rate": pytest.approx(2 / 3),
        "label/easy/length_mean_tokens": 5.0,
        "label/hard/length_mean_tokens": 4.0,  # no reward is known, so there is no pass rate
        "label/maths/3/pass_rate": 0.5,
        "label/maths/3/length_mean_tokens": 1.0,
    }
    assert label_metrics(GROUPS, labels, right_at=0.9)["label/easy/pass_rate"] == 1.0


def test_the_bins_of_a_step_hold_every_sample_once():
    bins = step_histograms(GROUPS)
    assert bins["reward"] == [(0.0, 0.0, 1), (0.9, 0.9, 1), (1.0, 1.0, 3)]
    assert sum(count for _, _, count in bins["response_length"]) == 8


def test_many_values_share_bins_of_equal_width():
    bins = histogram(list(range(100)), bins=4)
    assert bins == [(0.0, 24.75, 25), (24.75, 49.5, 25), (49.5, 74.25, 25), (74.25, 99.0, 25)]
    sparse = histogram([0.0, *(1000.0 + i for i in range(20))], bins=4)
    assert sparse == [(0.0, 254.75, 1), (764.25, 1019.0, 20)]  # empty bins are left out
    assert histogram([]) == [] == histogram([float("nan")])
    assert histogram([0.1 + 0.2, 0.3]) == [(0.3, 0.3, 2)]  # equal up to rounding
