"""The entropy of responses by verdict and label, and the notice of a collapse."""

import dataclasses

import numpy as np
import pytest
from tiny_run import tiny_run

from compass_jax.base.records import StepArrays
from compass_jax.experience.metrics import entropy_metrics
from compass_jax.training.hooks.base import StepRecord
from compass_jax.training.hooks.entropy import COLLAPSED, FIRST, LATEST, EntropyWatch
from compass_jax.training.rl import rl_steps


def test_entropies_are_means_over_scored_responses_by_verdict_and_label():
    names = ("tokens", "lengths", "mask", "rollout_logp", "repetition")
    arrays = StepArrays(
        **dict.fromkeys(names, np.zeros(6)),
        reward=np.array([1.0, 0.0, 1.0, 1.0, 0.0, 0.0], np.float32),
        known=np.array([True, True, True, True, True, False]),
        group=np.repeat(np.arange(3), 2),
    )
    entropy = np.array([0.1, 0.5, np.nan, 0.9, 0.2, 0.4])
    metrics = entropy_metrics(arrays, entropy, 1.0, ["a", "b", "a"])
    assert metrics == pytest.approx(
        {
            "entropy/right": (0.1 + 0.9) / 2,
            "entropy/wrong": (0.5 + 0.2) / 2,
            "label/a/entropy_nats": (0.1 + 0.5 + 0.2 + 0.4) / 4,
            "label/b/entropy_nats": 0.9,
        }
    )
    alike = dataclasses.replace(arrays, reward=np.zeros(6, np.float32))
    assert set(entropy_metrics(alike, entropy, 1.0, [])) == {"entropy/wrong"}


def test_a_collapse_is_told_once_the_mean_of_the_latest_steps_is_below_the_share():
    told = []

    def watch(values, hook=None):
        hook = hook or EntropyWatch(lambda *words: told.append(words))
        for value in values:
            hook.on_metrics(StepRecord(1, [], metrics={"entropy_nats": value}))
        return hook

    watch([1.0] * FIRST + [COLLAPSED + 0.01] * 3 * LATEST)
    assert told == []
    hook = watch([1.0] * FIRST + [COLLAPSED - 0.01] * (LATEST - 1))
    assert told == []  # too few steps
    restored = EntropyWatch(lambda *words: told.append(words))
    restored.restore(hook.state(), 12)
    watch([COLLAPSED - 0.01], restored)
    assert [kind for kind, _ in told] == ["entropy"] and "24% of that of the first" in told[0][1]


def test_a_run_logs_the_entropy_of_wrong_responses(tmp_path):
    config = dataclasses.replace(tiny_run(), run_dir=str(tmp_path))
    metrics = next(iter(rl_steps(config))).metrics
    assert 0 < metrics["entropy/wrong"] < np.log(config.model.vocab_size)
