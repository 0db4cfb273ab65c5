"""The posterior of pass rates: its recursion by hand, prior, choices and calibration."""

import json
from math import comb, gamma

import numpy as np
import pytest

from compass_jax.base.records import Outcome, Prompt
from compass_jax.config import ConfigError, RewardConfig, ZeroVarianceConfig
from compass_jax.data.difficulty import Measured
from compass_jax.data.files import DataError
from compass_jax.data.posterior import PosteriorSelector, coverage
from compass_jax.data.predictors.inputs import Prediction
from compass_jax.data.predictors.label import fit_prior
from compass_jax.data.selectors import prompt_selector
from compass_jax.data.stream import PromptStream

REWARDS = RewardConfig()


def prompts(count, label="sums"):
    return [Prompt(i, 0, label, f"q{i}", np.array([i], np.int32), "") for i in range(count)]


def outcome(right, samples):
    kind = "easy" if right == samples else "hard" if right == 0 else ""
    return Outcome(samples, float(right), 40, kind, samples)


def selector(seed=0, pool=(), **changes):
    config = ZeroVarianceConfig(posterior=True, **changes)
    return PosteriorSelector(config, REWARDS, seed, prompts=pool)


def prior_of(chosen, prompt):
    chosen.posterior(prompt)  # fits what was added
    return tuple(chosen.prediction.priors([prompt])[0])


def test_the_posterior_is_the_discounted_recursion():
    discount, one = 0.8, prompts(1)[0]
    chosen = selector(posterior_discount=discount)
    groups = [(3, 4), (0, 4), (8, 8)]
    for right, samples in groups:
        chosen.update([(one, outcome(right, samples))], 0.0)
    alpha_0, beta_0 = prior_of(chosen, one)
    alpha, beta = alpha_0, beta_0
    for right, samples in groups:
        alpha = discount * alpha + (1 - discount) * alpha_0 + right
        beta = discount * beta + (1 - discount) * beta_0 + samples - right
    assert chosen.posterior(one) == pytest.approx((alpha, beta), rel=1e-12)


def test_rewards_count_on_their_scale_and_groups_without_a_verdict_do_not():
    config = ZeroVarianceConfig(posterior=True, posterior_discount=1.0)
    one, other = prompts(2)
    chosen = PosteriorSelector(config, RewardConfig(right_at=1.0, wrong_at=-1.0), 0)
    chosen.update([(one, Outcome(4, 2.0, 40, "", 4)), (other, Outcome(0, 0.0, 40, "", 4))], 0.0)
    alpha_0, beta_0 = prior_of(chosen, one)
    # 0.5 is 3/4 of the way from -1 to 1
    assert chosen.posterior(one) == pytest.approx((alpha_0 + 3, beta_0 + 1))
    assert chosen.posterior(other) == prior_of(chosen, other)


def test_an_unseen_prompt_is_predicted_by_its_label():
    chosen, pool = selector(), [*prompts(20, "easy"), *prompts(1, "new")]
    chosen.update([(p, outcome(7, 8)) for p in pool[:10]], 0.0)
    alpha, beta = chosen.posterior(pool[15])
    assert alpha / (alpha + beta) == pytest.approx(71 / 82)
    new = Prompt(99, 0, "new", "q", np.array([9], np.int32), "")
    assert chosen.posterior(new) == (1.0, 1.0)


@pytest.mark.parametrize("samples", [2, 4, 16, (2, 4)])
@pytest.mark.parametrize("concentration", [2.0, 12.0])
def test_the_prior_has_the_spread_of_the_labels_prompts(concentration, samples):
    rng, mean, count = np.random.default_rng(0), 0.3, 400_000
    rates = rng.beta(concentration * mean, concentration * (1 - mean), count)
    judged = rng.choice(samples, count) if isinstance(samples, tuple) else np.full(count, samples)
    right = rng.binomial(judged, rates)
    alpha, beta = fit_prior(np.stack([right, judged], axis=1).astype(float))
    assert alpha / (alpha + beta) == pytest.approx(mean, abs=0.02)
    assert alpha + beta == pytest.approx(concentration, rel=0.1)


def test_a_prompt_measured_without_a_verdict_shows_nothing():
    pool = prompts(20)
    measured = [Measured(prompt, 1.0, 4.0) for prompt in pool[:12]]
    config = ZeroVarianceConfig(posterior=True)
    with_unknown = [*measured, Measured(pool[12], 0.0, 0.0)]
    priors = [
        prior_of(PosteriorSelector(config, REWARDS, 0, rows), pool[15])
        for rows in (measured, with_unknown)
    ]
    assert priors[0] == priors[1] and np.isfinite(priors[1]).all()


def test_single_samples_show_no_spread():
    counts = np.stack([np.arange(40) % 2, np.ones(40)], axis=1)
    assert fit_prior(counts) == (1.0, 1.0)


def run(seed, rates, steps=40, groups=16, samples=8, **changes):
    """Selects and updates on prompts of fixed pass rates. Returns the selector, the prompts, and
    the rates of the chosen prompts.
    """
    pool, rng = prompts(len(rates)), np.random.default_rng((seed, 1))
    stream, chosen = PromptStream(pool, seed), selector(seed, **changes)
    chosen_rates = []
    for _ in range(steps):
        batch = chosen.next_batch(stream, groups)
        assert len({p.id for p in batch}) == groups
        results = [(p, outcome(rng.binomial(samples, rates[p.id]), samples)) for p in batch]
        chosen.update(results, 0.0)
        chosen_rates += [rates[p.id] for p in batch]
    return chosen, pool, chosen_rates


def test_the_prompts_that_it_takes_vary():
    rates = np.array([0.0, 1.0, 0.5, 0.01] * 50)
    *_, chosen_rates = run(0, rates)
    late = np.array(chosen_rates[-320:])
    assert np.mean(late == 0.5) > 0.8  # a quarter of the prompts


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_interval_covers_the_rates_of_fresh_samples(seed):
    """The 90% interval covers the rate of 64 fresh samples for 85% to 95% of 200 prompts. It is the
    Beta-binomial's, since a fresh rate has a sampling error that the posterior lacks.
    """
    from scipy import stats

    rng = np.random.default_rng((seed, 2))
    rates = rng.beta(1.2, 1.8, 200)
    chosen, pool, _ = run(seed, rates, steps=60, posterior_discount=1.0)
    fresh = rng.binomial(64, rates)
    covered = []
    for prompt, right in zip(pool, fresh, strict=True):
        low, high = stats.betabinom.interval(0.9, 64, *chosen.posterior(prompt))
        covered.append(low <= right <= high)
        inner = chosen.interval(prompt)
        assert 0 <= inner[0] < inner[1] <= 1
    assert 0.85 <= np.mean(covered) <= 0.95
    predictions = np.transpose([chosen.posterior(prompt) for prompt in pool])
    assert 0.85 <= np.mean(coverage(fresh, np.full(200, 64), *predictions)) <= 0.95
    assert 0.8 < chosen.metrics()["posterior/coverage_90"] <= 1


@pytest.mark.parametrize("alpha, beta", [(1.0, 1.0), (0.05, 3.0), (6.0, 0.4), (8.0, 12.0)])
@pytest.mark.parametrize("samples", [1, 4, 64])
def test_a_right_prediction_is_covered_with_its_level(alpha, beta, samples):
    def beta_function(a, b):
        return gamma(a) * gamma(b) / gamma(a + b)

    counts = np.arange(samples + 1)
    chances = [
        comb(samples, k) * beta_function(alpha + k, beta + samples - k) / beta_function(alpha, beta)
        for k in range(samples + 1)
    ]
    parts = coverage(counts, *(np.full(samples + 1, x) for x in (samples, alpha, beta)))
    assert np.dot(chances, parts) == pytest.approx(0.9, abs=1e-9)
    assert parts.min() >= 0 and parts.max() <= 1 + 1e-12


def test_an_outcome_far_from_the_prediction_is_not_covered():
    assert coverage(*map(np.array, ([64.0], [64], [1.0], [99.0]))) == 0


def test_choices_are_the_same_after_a_restart():
    rates = np.random.default_rng(5).random(40)
    chosen, pool, _ = run(3, rates, steps=5)
    restored = selector(3, pool)
    restored.restore(json.loads(json.dumps(chosen.state())))
    streams = [PromptStream(pool, 3) for _ in range(2)]
    first, second = (x.next_batch(s, 6) for x, s in zip((chosen, restored), streams, strict=True))
    assert [p.id for p in first] == [p.id for p in second]
    assert restored.metrics() == chosen.metrics()
    assert [p.predicted for p in first] == [chosen.posterior(p) for p in first]
    assert chosen.skipped == 18


def test_a_state_from_before_predictors_is_refused():
    with pytest.raises(DataError, match=r"a version without rl\.predictor"):
        selector().restore({"counts": {"7": ["sums", 1.0, 2.0]}, "calibration": {}})


def test_few_prompts_are_taken_as_they_come():
    pool = prompts(3)
    assert len(selector().next_batch(PromptStream(pool, 0), 5)) == 5


def test_the_setting_selects_it_and_excludes_the_others():
    config = ZeroVarianceConfig(posterior=True)
    assert isinstance(prompt_selector(config, 8, REWARDS, 0), PosteriorSelector)
    for change, message in (
        ({"curriculum": True}, "curriculum and rl.zero_variance.posterior both decide"),
        ({"posterior_discount": 0.0}, "posterior_discount = 0.0"),
        ({"posterior_discount": 1.5}, "posterior_discount = 1.5"),
    ):
        with pytest.raises(ConfigError, match=message):
            ZeroVarianceConfig(posterior=True, **change).validate()


class Fixed(Prediction):
    """Predicts alpha and beta by the prompt's label."""

    def priors(self, prompts):
        return np.array([[float(x) for x in prompt.label.split("/")] for prompt in prompts])


def test_measured_rates_are_reported_by_predicted_ones_and_hopeless_groups_are_counted():
    """Four groups: predicted at 1/41, 1/41, 1/2 and 1; a hopeless group has a posterior below 5%
    for more than half of its mass, which the Beta's density says by summation.
    """
    kinds, rights = ("1/40", "1/40", "2/2", "40/0.001"), (0, 1, 3, 4)
    config = ZeroVarianceConfig(posterior=True)
    chosen = PosteriorSelector(config, REWARDS, 0, prediction=Fixed())
    groups = [Prompt(i, 0, x, f"q{i}", np.array([i], np.int32), "") for i, x in enumerate(kinds)]
    chosen.update(zip(groups, (outcome(right, 4) for right in rights), strict=True), 0.0)
    metrics = chosen.metrics()
    measured = {name: x for name, x in metrics.items() if "/measured_" in name}
    assert measured == {
        "posterior/measured_0": 1 / 8,
        "posterior/measured_40": 3 / 4,
        "posterior/measured_80": 1.0,
    }
    p = (np.arange(100_000) + 0.5) / 100_000
    hopeless = 0
    for label, right in zip(kinds, rights, strict=True):
        alpha, beta = (float(x) for x in label.split("/"))
        density = p ** (alpha + right - 1) * (1 - p) ** (beta + 4 - right - 1)
        hopeless += density[p < 0.05].sum() > density.sum() / 2
    assert metrics["posterior/hopeless_frac"] == hopeless / 4 == 0.5
