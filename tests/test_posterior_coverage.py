"""The experiment on the coverage of predicted pass rates, with rates drawn from the posteriors."""

import dataclasses

import numpy as np
import pytest

from benchmarks import posterior_coverage as experiment
from benchmarks import tokens_to_accuracy
from compass_jax.base.records import Outcome, Prompt
from compass_jax.config import RewardConfig, ZeroVarianceConfig
from compass_jax.data.keep import PassRate
from compass_jax.data.posterior import PosteriorSelector

SAMPLES = 64


def selector_and_prompts(count):
    tokens = np.zeros(1, np.int32)
    prompts = [Prompt(i, 0, "sums", f"question {i}", tokens, "") for i in range(count)]
    selector = PosteriorSelector(ZeroVarianceConfig(posterior=True), RewardConfig(), seed=0)
    rng = np.random.default_rng(1)
    right = rng.binomial(8, rng.beta(1, 3, count))
    results = [(x, Outcome(8, float(right[x.id]), 40, "", 8)) for x in prompts[::2]]
    selector.update(results, 0.0)
    return selector, prompts, rng


def measured(prompt, right):
    rate = right / SAMPLES
    return PassRate(prompt.id, "sums", prompt.question, rate, SAMPLES, SAMPLES, 0, 0, 1, True)


def test_rates_from_the_posteriors_are_covered_at_the_stated_level():
    selector, prompts, rng = selector_and_prompts(3000)
    rates = {}
    for prompt in prompts:
        rate = rng.beta(*selector.posterior(prompt))
        rates[prompt.id] = measured(prompt, rng.binomial(SAMPLES, rate))
    summary = experiment.covered(selector, prompts, rates)
    assert summary["prompts"] == 3000 and summary["visited"] == 1500
    assert 0.88 < summary["coverage"] < 0.92
    assert 0.88 < summary["coverage_visited"] < 0.92
    assert 0.89 < summary["coverage_closed"] < 0.94  # integer intervals hold at least 90%


def test_rates_of_another_policy_are_not_covered():
    selector, prompts, _ = selector_and_prompts(200)
    summary = experiment.covered(selector, prompts, {x.id: measured(x, SAMPLES) for x in prompts})
    assert summary["coverage"] < 0.15 and summary["abs_error"] > 0.5
    assert summary["mean_rate"] == 1 and summary["coverage_of_beta"] == 0


def test_a_run_without_predictions_is_refused(tmp_path):
    config = tokens_to_accuracy.base_config(0, tmp_path, smoke=True)
    assert not config.rl.zero_variance.posterior
    with pytest.raises(SystemExit, match=r"RUN: its rl\.zero_variance\.posterior is off"):
        experiment.selector_of("RUN", dataclasses.replace(config, name="x"), [])
