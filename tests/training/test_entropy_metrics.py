"""The entropy of responses by verdict and label, and the notice of a collapse."""

import dataclasses

import numpy as np
import pytest
from tiny_run import tiny_run

from compass_jax.config import RewardConfig
from compass_jax.records import Group, Prompt, StepArrays
from compass_jax.training.hooks.base import StepRecord
from compass_jax.training.hooks.entropy import COLLAPSED, FIRST, LATEST, EntropyMetrics
from compass_jax.training.rl import rl_steps


def step_of(entropy, reward, known, labels, number=1, mean=1.0):
    """A step of two responses to each prompt."""
    prompts = [Prompt(i, 0, x, f"q{i}", np.arange(2), "") for i, x in enumerate(labels)]
    rows = len(entropy)
    arrays = StepArrays(
        **{
            field.name: np.zeros((rows, 4), np.float32)
            for field in dataclasses.fields(StepArrays)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
    )
    arrays = dataclasses.replace(
        arrays,
        reward=np.array(reward, np.float32),
        known=np.array(known),
        group=np.repeat(np.arange(len(labels)), 2),
    )
    groups = [Group(prompt, (), ()) for prompt in prompts]
    record = StepRecord(number, groups, arrays=arrays)
    record.entropy, record.metrics["entropy_nats"] = np.array(entropy), mean
    return record


def test_entropies_are_means_over_scored_responses_by_verdict_and_label():
    nan = float("nan")
    step = step_of(
        [0.1, 0.5, nan, 0.9, 0.2, 0.4],
        [1.0, 0.0, 1.0, 1.0, 0.0, 0.0],
        [True, True, True, True, True, False],
        ["a", "b", "a"],
    )
    EntropyMetrics(RewardConfig(), ["a", "b"], print).on_metrics(step)
    metrics = {name: x for name, x in step.metrics.items() if name != "entropy_nats"}
    assert metrics == pytest.approx(
        {
            "entropy/right": (0.1 + 0.9) / 2,
            "entropy/wrong": (0.5 + 0.2) / 2,
            "label/a/entropy_nats": (0.1 + 0.5 + 0.2 + 0.4) / 4,
            "label/b/entropy_nats": 0.9,
        }
    )
    one_label = step_of([0.1, 0.5], [1.0, 1.0], [True, True], ["a"])
    EntropyMetrics(RewardConfig(), ["a"], print).on_metrics(one_label)
    assert set(one_label.metrics) == {"entropy_nats", "entropy/right"}


def test_a_collapse_is_told_once_the_mean_of_the_latest_steps_is_below_the_share():
    told = []

    def watch(values, hook=None):
        hook = hook or EntropyMetrics(RewardConfig(), ["a"], lambda *words: told.append(words))
        for value in values:
            hook.on_metrics(step_of([0.1, 0.1], [1.0, 1.0], [True, True], ["a"], mean=value))
        return hook

    watch([1.0] * FIRST + [COLLAPSED + 0.01] * 3 * LATEST)
    assert told == []
    hook = watch([1.0] * FIRST + [COLLAPSED - 0.01] * (LATEST - 1))
    assert told == []  # too few steps
    restored = EntropyMetrics(RewardConfig(), ["a"], lambda *words: told.append(words))
    restored.restore(hook.state(), 12)
    watch([COLLAPSED - 0.01], restored)
    assert [kind for kind, _ in told] == ["entropy"] and "24% of that of the first" in told[0][1]


def test_a_run_logs_the_entropy_of_wrong_responses(tmp_path):
    config = dataclasses.replace(tiny_run(), run_dir=str(tmp_path))
    metrics = next(iter(rl_steps(config))).metrics
    assert 0 < metrics["entropy/wrong"] < np.log(config.model.vocab_size)
