"""The estimators, compared with enumeration and with numpy references from their equations."""

import itertools
import math

import numpy as np
import pytest

from compass_jax.experience.estimators import (
    clustered,
    maj_at_k,
    pass_at_k,
    pass_counts,
    sign_test,
    wilson,
)


@pytest.mark.parametrize("known", range(1, 7))
def test_pass_at_k_is_the_share_of_the_subsets_with_a_right_answer(known):
    for right, k in itertools.product(range(known + 1), range(1, known + 1)):
        samples = [1] * right + [0] * (known - right)
        drawn = [any(subset) for subset in itertools.combinations(samples, k)]
        assert pass_at_k(right, known, k) == pytest.approx(np.mean(drawn), abs=1e-15)
        exact = 1 - math.comb(known - right, k) / math.comb(known, k)
        assert pass_at_k(right, known, k) == pytest.approx(exact, abs=1e-15)


def test_pass_at_k_of_many_samples_does_not_overflow_and_of_too_few_is_unknown():
    exact = 1 - math.comb(60_000, 512) / math.comb(60_010, 512)
    assert pass_at_k(10, 60_010, 512) == pytest.approx(exact, rel=1e-9)
    assert math.isnan(pass_at_k(2, 3, 4))


def test_pass_at_k_is_told_at_powers_of_two_and_at_k():
    assert [pass_counts(k) for k in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def by_lot(votes, right):
    """Returns maj@k by enumeration: the first of the tied answers in each order of the samples."""
    means = []
    for order in itertools.permutations(range(len(votes))):
        counts = {}
        for i in order:
            if votes[i] is not None:
                counts.setdefault(votes[i], []).append(right[i])
        winner = max(counts.values(), key=len, default=[0.0])
        means.append(np.mean(winner))
    return np.mean(means)


@pytest.mark.parametrize(
    ("votes", "right"),
    [
        ("aab", (1, 1, 0)),
        ("ab", (1, 0)),  # a tie
        ("aabbc", (0, 0, 1, 1, 0)),
        ("abc", (0, 1, 0)),
        ([None, None, "a"], (0, 0, 1)),  # samples without an answer have no vote
        ([None, None], (0, 0)),
        ("aab", (1, 0, 0)),  # one answer that is judged in two ways
    ],
)
def test_ties_for_the_majority_are_broken_by_lot_in_expectation(votes, right):
    assert maj_at_k(list(votes), right) == pytest.approx(by_lot(votes, right))


def test_the_error_is_clustered_by_prompt():
    """The error is that of the double sum over pairs of samples of one prompt (arXiv
    2411.00640).
    """
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 2, n).astype(float) for n in (1, 5, 3, 8, 2, 8)]
    flat = np.concatenate(groups)
    mean, n, g = flat.mean(), len(flat), len(groups)
    variance = sum(
        (a - mean) * (b - mean) for group in groups for a in group for b in group
    )  # each sample with itself, too
    estimate = clustered(np.array([x.sum() for x in groups]), np.array([len(x) for x in groups]), 0)
    assert estimate.mean == pytest.approx(mean)
    assert estimate.se == pytest.approx(math.sqrt(variance * g / (g - 1)) / n)


def test_equal_groups_have_the_error_of_the_mean_of_prompts():
    right = np.array([0, 1, 4, 2, 4, 3, 0, 1])
    estimate = clustered(right, np.full(8, 4), 0)
    assert estimate.se == pytest.approx((right / 4).std(ddof=1) / math.sqrt(8))


def test_the_bootstrap_draws_prompts_not_samples():
    """The interval of 40 prompts with 16 samples, each all right or all wrong, is that of 40
    draws.
    """
    right = np.array([16] * 20 + [0] * 20)
    estimate = clustered(right, np.full(40, 16), 1)
    draws = np.random.default_rng(5).binomial(40, 0.5, 100_000) / 40
    low, high = np.percentile(draws, (2.5, 97.5))
    assert estimate.low == pytest.approx(low, abs=0.026) and estimate.high == pytest.approx(
        high, abs=0.026
    )
    assert clustered(right, np.full(40, 16), 1) == estimate != clustered(right, np.full(40, 16), 2)


def test_the_interval_covers_the_truth_in_about_nineteen_of_twenty_cases():
    rng, hits = np.random.default_rng(2), 0
    for trial in range(300):
        chance = rng.beta(0.6, 0.9, 60)  # of each prompt; mean 0.4
        estimate = clustered(rng.binomial(4, chance), np.full(60, 4), trial)
        hits += estimate.low <= 0.4 <= estimate.high
    assert 0.90 <= hits / 300 <= 0.98


def test_prompts_that_are_all_alike_have_wilsons_interval_and_one_prompt_has_all():
    all_wrong = clustered(np.zeros(10), np.full(10, 4), 0)
    assert (all_wrong.mean, all_wrong.se, all_wrong.low) == (0, 0, 0)
    assert all_wrong.high == pytest.approx(wilson(0.0, 10)[1])
    gains = clustered(np.zeros(10), np.ones(10), 0, support=(-1.0, 1.0))
    assert gains.high == -gains.low == pytest.approx(wilson(0.0, 10)[1])
    one = clustered(np.array([2]), np.array([4]), 0)
    assert one.mean == 0.5 and math.isnan(one.se) and (one.low, one.high) == (0, 1)


def test_equal_evaluations_differ_by_no_more_than_unseen_prompts_could():
    """If so large a share of prompts differed, none among n would in less than one case of 40, and
    the interval is little wider than needed.
    """
    for n in (20, 53, 1000):
        estimate = clustered(np.zeros(n), np.ones(n), 0, support=(-1.0, 1.0))
        exact = 1 - 0.025 ** (1 / n)  # the share at which that has probability 1/40
        assert 0.9 * exact < estimate.high < 1.1 * exact
    shifted = clustered(np.full(53, 0.25), np.ones(53), 0, support=(-1.0, 1.0))
    assert shifted.low == pytest.approx(0.25 - 1.25 * wilson(0.0, 53)[1])
    assert shifted.high == pytest.approx(0.25 + 0.75 * wilson(0.0, 53)[1])


def test_prompts_without_a_known_score_are_in_no_estimate():
    right, known = np.array([1, 0, 2, 0]), np.array([2, 0, 2, 0])
    some, fewer = clustered(right, known, 3), clustered(right[::2], known[::2], 3)
    assert some == fewer
    assert all(math.isnan(x) for x in clustered(np.zeros(2), np.zeros(2), 0))


def test_wilson_solves_its_equation():
    """The ends of the interval are the p for which |share - p| is z standard errors."""
    for share, trials in ((0.0, 7), (0.3, 10), (0.5, 200), (1.0, 12)):
        for p in wilson(share, trials):
            inner = 1.959963984540054 * math.sqrt(p * (1 - p) / trials)
            assert abs(share - p) == pytest.approx(inner, abs=1e-9)
    assert wilson(0.0, 5)[0] == 0 and wilson(1.0, 5)[1] == 1 and wilson(math.nan, 0) == (0, 1)


def test_the_sign_test_counts_outcomes_as_uneven_as_these():
    for first, second in ((0, 0), (1, 0), (3, 3), (8, 1), (2, 7)):
        n, distance = first + second, abs(first - second)
        outcomes = [abs(2 * sum(flips) - n) for flips in itertools.product((0, 1), repeat=n)]
        expected = np.mean([x >= distance for x in outcomes])
        assert sign_test(first, second) == pytest.approx(expected)
    assert sign_test(0, 3000) == pytest.approx(0, abs=1e-300)
