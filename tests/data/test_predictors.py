"""Predictors: the regression against its equation, what they learn of unlabelled prompts, and their
state.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
from howto_code import write_code
from scipy import optimize, special, stats

from compass_jax.base.records import Outcome, Prompt, stable_id
from compass_jax.config import (
    ConfigError,
    Predictor,
    RewardConfig,
    RLConfig,
    ZeroVarianceConfig,
    seam_class,
)
from compass_jax.data.posterior import PosteriorSelector, coverage
from compass_jax.data.predictors import regression
from compass_jax.data.predictors.inputs import PredictorInputs, Seen
from compass_jax.data.predictors.label import Label
from compass_jax.data.predictors.regression import ByRegression, fit_regression, moments
from compass_jax.data.predictors.state import State
from compass_jax.data.predictors.text import Text, grams
from compass_jax.data.stream import PromptStream
from compass_jax.weights.state import joined, split

RNG = np.random.default_rng(0)
X = np.concatenate([RNG.normal(size=(40, 3)), np.ones((40, 1))], axis=1)
JUDGED = RNG.integers(1, 9, 40).astype(float) * 0.9
RIGHT = JUDGED * RNG.random(40)
VARIANCE = np.array([4.0, 1.0, 0.5, 9.0])


def log_posterior(w):
    """log p(w | outcomes) but for a constant, from the module's equation."""
    p = 1 / (1 + np.exp(-(X @ w)))
    likelihood = np.sum(RIGHT * np.log(p) + (JUDGED - RIGHT) * np.log(1 - p))
    return likelihood - np.sum(w**2 / VARIANCE) / 2


def test_the_fit_is_laplaces_approximation():
    fitted = fit_regression(X, RIGHT, JUDGED, VARIANCE)
    slope = optimize.approx_fprime(fitted.mean, log_posterior, 1e-6)
    np.testing.assert_allclose(slope, 0, atol=1e-4)
    # the covariance is the inverse of the negative second derivative
    second = np.array(
        [
            optimize.approx_fprime(
                fitted.mean, lambda w, i=i: optimize.approx_fprime(w, log_posterior, 1e-5)[i], 1e-4
            )
            for i in range(4)
        ]
    )
    np.testing.assert_allclose(fitted.covariance @ -second, np.eye(4), atol=5e-3)
    mean, variance = fitted.logit(X[:5])
    np.testing.assert_allclose(mean, X[:5] @ fitted.mean)
    np.testing.assert_allclose(variance, [x @ fitted.covariance @ x for x in X[:5]], rtol=1e-12)


def test_without_outcomes_the_fit_is_the_prior_and_many_features_have_a_diagonal(monkeypatch):
    prior = fit_regression(np.zeros((0, 4)), np.zeros(0), np.zeros(0), VARIANCE)
    np.testing.assert_array_equal(prior.mean, 0)
    np.testing.assert_allclose(prior.covariance, np.diag(VARIANCE))
    full = fit_regression(X, RIGHT, JUDGED, VARIANCE)
    monkeypatch.setattr(regression, "FULL", 3)
    diagonal = fit_regression(X, RIGHT, JUDGED, VARIANCE)
    np.testing.assert_allclose(diagonal.mean, full.mean)
    np.testing.assert_allclose(1 / diagonal.covariance, np.diag(np.linalg.inv(full.covariance)))
    np.testing.assert_allclose(diagonal.logit(X)[1], X**2 @ diagonal.covariance)


def test_a_fit_begins_at_the_mode_before_it_and_ends_at_the_same_one(monkeypatch):
    evaluations, minimize = [], optimize.minimize

    def counted(*args, **kwargs):
        result = minimize(*args, **kwargs)
        evaluations.append(result.nfev)
        return result

    monkeypatch.setattr(regression.optimize, "minimize", counted)
    rng = np.random.default_rng(3)
    x, judged, variance = rng.normal(size=(400, 60)), np.full(400, 4.0), np.full(60, 16.0)
    right = rng.binomial(4, special.expit(x[:, 0]))
    former = fit_regression(x[:390], right[:390], judged[:390], variance)
    cold = fit_regression(x, right, judged, variance)
    warm = fit_regression(x, right, judged, variance, former.mean)
    np.testing.assert_allclose(warm.mean, cold.mean, atol=1e-4)
    assert evaluations[2] < evaluations[1]


@pytest.mark.parametrize(("mean", "variance"), [(0.0, 1.0), (-3.0, 4.0), (2.0, 0.0)])
def test_moments_are_those_of_a_gaussian_logit(mean, variance):
    rates = special.expit(mean + np.sqrt(variance) * np.random.default_rng(1).normal(size=2**20))
    first, second = moments(np.array([mean]), np.array([variance]))
    assert first[0] == pytest.approx(rates.mean(), abs=1e-3)
    assert second[0] == pytest.approx(rates.var(), abs=1e-3)


def make(kind, i, label="file"):
    """A prompt of one of four kinds, which differ in the length of their numbers."""
    rng = np.random.default_rng((i, 7))
    numbers = " + ".join(str(rng.integers(10**kind, 10 ** (kind + 1))) for _ in range(3))
    text = f"State the answer: {numbers} ="
    return Prompt(stable_id(f"{i} {text}"), 0, label, text, np.arange(4 + kind), "")


RATES = np.array([0.9, 0.5, 0.1, 0.0])
POOL = [make(i % 4, i) for i in range(1200)]
KIND = {prompt.id: i % 4 for i, prompt in enumerate(POOL)}


def of_state(prompts):
    """Hidden states in which the kind is one direction among noise, all far from 0."""
    rows = [np.random.default_rng(p.id).normal(size=48) for p in prompts]
    states = np.array(rows, np.float32) + 5
    states[:, 0] += [4.0 * KIND[p.id] for p in prompts]
    return states


def selector_of(predictor, pool, seed=0, states=of_state, version=lambda: 0):
    prediction = predictor.start(PredictorInputs(pool, seed, states, version))
    config = ZeroVarianceConfig(posterior=True)
    return PosteriorSelector(config, RewardConfig(), seed, prompts=pool, prediction=prediction)


def train(selector, pool, steps, seed=0, samples=4):
    stream, rng, taken, inside = PromptStream(pool, seed), np.random.default_rng(seed), [], []
    for _ in range(steps):
        batch = selector.next_batch(stream, 16)
        right = rng.binomial(samples, [RATES[KIND[p.id]] for p in batch])
        alpha, beta = np.transpose([p.predicted for p in batch])
        inside += list(coverage(right, np.full(16, samples), alpha, beta))
        results = [
            (p, Outcome(samples, float(r), 40, "", samples))
            for p, r in zip(batch, right, strict=True)
        ]
        selector.update(results, 0.0)
        taken += [KIND[p.id] for p in batch]
    return stream, np.array(taken), np.array(inside)


def log_loss(selector, prompts):
    alpha, beta = selector.posteriors(prompts).T
    rates = RATES[[KIND[p.id] for p in prompts]]
    mean = alpha / (alpha + beta)
    return -np.mean(special.xlogy(rates, mean) + special.xlog1py(1 - rates, -mean))


@pytest.mark.parametrize("predictor", [Text(), State(features=32)], ids=["text", "state"])
def test_prompts_without_labels_are_predicted_nearly_as_with_them(predictor):
    """The bounds are those of the project's goal: at least half of the way from the global rate to
    the labels' prediction, at most 15% of the prompts impossible, intervals that hold 85 to 95%.
    """
    trained, unseen = POOL[:800], POOL[800:]
    labelled = [replace(p, label=str(KIND[p.id])) for p in POOL]
    by_label = selector_of(Label(), labelled[:800])
    train(by_label, labelled[:800], 30)
    one_label = selector_of(Label(), trained)
    _, without, _ = train(one_label, trained, 30)
    chosen = selector_of(predictor, trained)
    _, taken, inside = train(chosen, trained, 30)
    best, worst = log_loss(by_label, labelled[800:]), log_loss(one_label, unseen)
    assert log_loss(chosen, unseen) < best + 0.5 * (worst - best)
    assert np.mean(taken[80:] == 3) <= 0.15 < np.mean(without[80:] == 3)
    assert 0.85 <= inside[160:].mean() <= 0.95


def test_labels_that_the_text_does_not_show_count_too():
    """Questions say nothing of the kind; with labels unseen prompts are predicted as by label."""
    pool = [replace(p, question=f"question {p.id}", label=str(KIND[p.id])) for p in POOL]
    trained, unseen = pool[:800], pool[800:]
    losses = {}
    for name, predictor in {"label": Label(), "text": Text()}.items():
        chosen = selector_of(predictor, trained)
        train(chosen, trained, 30)
        losses[name] = log_loss(chosen, unseen)
    one_label = [replace(p, label="file") for p in trained]
    chosen = selector_of(Text(), one_label)
    train(chosen, one_label, 30)
    losses["without"] = log_loss(chosen, [replace(p, label="file") for p in unseen])
    assert losses["text"] < losses["label"] + 0.02 < losses["without"] - 0.1


@pytest.mark.parametrize("predictor", [Text(), State(features=32, refresh=3)])
def test_a_restored_run_draws_the_same_prompts(predictor):
    versions = [0]
    chosen = selector_of(predictor, POOL, version=lambda: versions[0])
    stream, *_ = train(chosen, POOL, 3)
    state, arrays = split(chosen.state())
    later = PromptStream(POOL, 0)

    def refused(prompts):
        raise AssertionError("states of prompts that are known were computed again")

    restored = selector_of(predictor, POOL, version=lambda: versions[0], states=refused)
    restored.restore(joined(json.loads(json.dumps(state)), arrays))
    known = [p for p in POOL if p.id in restored._counts]
    np.testing.assert_array_equal(restored.posteriors(known), chosen.posteriors(known))
    again = selector_of(predictor, POOL, version=lambda: versions[0])
    versions[0] = 3  # of age, so that candidates are computed again
    chosen.next_batch(stream, 16)
    later.restore(json.loads(json.dumps(stream.state())))
    state, arrays = split(chosen.state())  # within the step
    again.restore(joined(json.loads(json.dumps(state)), arrays))
    first, second = chosen.next_batch(stream, 16), again.next_batch(later, 16)
    assert [(p.id, p.predicted) for p in first] == [(p.id, p.predicted) for p in second]


def test_states_are_computed_again_at_their_age():
    asked, versions = [], [0]

    def states(prompts):
        asked.append([p.id for p in prompts])
        return of_state(prompts)

    inputs = PredictorInputs(POOL, 0, states, lambda: versions[0])
    prediction = State(features=16, refresh=4).start(inputs)
    for version, expected in ((0, 8), (3, 0), (4, 8)):
        versions[0], before = version, len(asked)
        prediction.prepare(POOL[:8])
        assert sum(map(len, asked[before:])) == expected


def test_a_prompts_own_counts_join_once():
    """Its part of the fit is taken out of its prior: with one prompt and no other outcome the
    prior is nearly that without any.
    """
    variance = np.array([4.0])
    prediction = ByRegression(lambda prompts: np.ones((len(prompts), 1)), variance)
    before = prediction.priors(POOL[:1])
    prediction.fit(Seen(POOL[:1], np.array([1.0]), np.array([4.0])))
    own, other = prediction.priors(POOL[:2])
    assert own[0] / own.sum() == pytest.approx(before[0, 0] / before[0].sum(), abs=0.1)
    assert other[0] / other.sum() < 0.42  # of another prompt: 1 of 4 right


def test_rho_is_the_spread_of_unseen_prompts_of_equal_features():
    rng, spread = np.random.default_rng(3), 0.2
    prediction = ByRegression(lambda prompts: np.ones((len(prompts), 1)), np.array([4.0]))
    seen = Seen(list[Prompt](), np.zeros(0), np.zeros(0))
    for step in range(60):
        new = [make(1, 10_000 + 16 * step + i) for i in range(16)]
        c = 1 / spread - 1
        right = rng.binomial(8, rng.beta(0.4 * c, 0.6 * c, 16)).astype(float)
        outcomes = Seen(new, right, np.full(16, 8.0))
        prediction.compare(outcomes)
        counts = (np.append(a, b) for a, b in zip(seen[1:], outcomes[1:], strict=True))
        seen = Seen([*seen.prompts, *new], *counts)
        prediction.fit(seen)
    assert prediction.rho == pytest.approx(spread, abs=0.05)
    alpha, beta = prediction.priors([make(1, 1)])[0]
    assert alpha / (alpha + beta) == pytest.approx(0.4, abs=0.04)
    assert stats.beta(alpha, beta).var() == pytest.approx(spread * 0.24, rel=0.3)


def test_ngrams_take_digits_alike_and_the_hash_is_fixed():
    assert grams("What is 12 + 7?") == grams("what  is 98 + 3?")
    assert grams("a b")["p a b"] == 1 and grams("a b")["c a b"] == 1
    one = Text(features=16).start(PredictorInputs(POOL, 0)).features(POOL[:1])[0]
    assert one.shape == (52,) and one[-1] == 1 and not one[16:48].any()  # one label
    assert np.linalg.norm(one[:16]) == pytest.approx(1)
    # from the first implementation; other numbers would change resumed runs
    np.testing.assert_allclose(one[:3], EXPECTED, atol=1e-6)


EXPECTED = (0.195934, 0.310548, 0.391868)


def test_the_documented_predictor_of_ones_own_predicts(tmp_path):
    file = write_code("predictor.md", "by_length.py", tmp_path)
    chosen = selector_of(seam_class(Predictor, f"{file}:ByLength")(std=8.0), POOL[:800])
    train(chosen, POOL[:800], 30)
    easy, hard = (chosen.posteriors(POOL[800 + kind :: 4][:50]).mean(0) for kind in (0, 3))
    assert easy[0] / easy.sum() > 0.6 and hard[0] / hard.sum() < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"zero_variance": ZeroVarianceConfig()},
            "without rl.zero_variance.posterior: nothing reads its predictions; set"
            " rl.zero_variance.posterior, which ZeroVarianceConfig",
        ),
        ({"predictor": Text(features=3)}, "rl.predictor.features = 3"),
        ({"predictor": Text(std=0.0)}, "rl.predictor.std = 0.0"),
    ],
)
def test_predictors_that_cannot_act_are_refused(changes, message):
    rl = RLConfig(**{"predictor": Label(), **changes})
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        rl.validate()
