"""Draws: their distribution, their keys, truncation of given logits, and the log-probs that
training can use.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.rollout.sampling import (
    Purpose,
    RowSampling,
    Sampler,
    sample,
    sample_keys,
    truncate,
)

PROBS = np.array([0.35, 0.25, 0.15, 0.1, 0.08, 0.05, 0.02])
N = 20_000


def keys_of(prompts, visits=None, samples=None, seed=0, purpose=Purpose.TRAIN):
    prompts = np.asarray(prompts, np.uint32)
    zero = np.zeros_like(prompts)
    visits, samples = (zero if x is None else np.asarray(x, np.uint32) for x in (visits, samples))
    return np.asarray(
        sample_keys(seed, purpose, jnp.asarray(prompts), jnp.asarray(visits), jnp.asarray(samples))
    )


def draw(logits, keys, positions, sampler):
    n = len(keys)
    rows = jnp.broadcast_to(jnp.asarray(logits, jnp.float32)[None], (n, len(logits)))
    out = jax.jit(sample, static_argnums=3)(
        rows, jnp.asarray(keys), jnp.asarray(np.broadcast_to(positions, n), jnp.int32), sampler
    )
    return tuple(np.asarray(x) for x in out)


def chi_square(counts, expected):
    return float(np.sum((counts - expected) ** 2 / expected))


AXES = {
    "prompts": lambda: (keys_of(np.arange(N)), 5),
    "visits": lambda: (keys_of(np.full(N, 3), visits=np.arange(N)), 5),
    "samples": lambda: (keys_of(np.full(N, 3), samples=np.arange(N)), 5),
    "positions": lambda: (np.repeat(keys_of([3]), N, axis=0), np.arange(N)),
}


@pytest.mark.parametrize("axis", AXES)
def test_draws_follow_the_distribution_along_every_axis_of_the_key(axis):
    """The chi-square statistic with 6 degrees of freedom exceeds 33.1 with probability 1e-5. Pairs
    of neighbours along the axis are independent.
    """
    keys, positions = AXES[axis]()
    token, _, _ = draw(np.log(PROBS), keys, positions, Sampler())
    assert chi_square(np.bincount(token, minlength=7), PROBS * N) < 33.1
    pairs = np.zeros((7, 7))
    np.add.at(pairs, (token[:-1], token[1:]), 1)
    assert chi_square(pairs, np.outer(PROBS, PROBS) * (N - 1)) < 110


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_temperature_sharpens_and_flattens(temperature):
    token, logp, entropy = draw(np.log(PROBS), keys_of(np.arange(N)), 5, Sampler(temperature))
    expected = PROBS ** (1 / temperature)
    expected /= expected.sum()
    assert chi_square(np.bincount(token, minlength=7), expected * N) < 33.1
    np.testing.assert_allclose(logp, np.log(expected)[token], rtol=1e-5)
    np.testing.assert_allclose(entropy, -np.sum(expected * np.log(expected)), rtol=1e-5)


def test_temperature_zero_takes_the_largest_with_the_log_prob_of_temperature_one():
    token, logp, entropy = draw(np.log(PROBS[::-1]), keys_of([1, 2]), 5, Sampler(0.0))
    np.testing.assert_array_equal(token, [6, 6])
    np.testing.assert_allclose(logp, np.log(0.35), rtol=1e-5)
    np.testing.assert_allclose(entropy, -np.sum(PROBS * np.log(PROBS)), rtol=1e-5)


LOGITS = np.log([0.1, 0.4, 0.2, 0.3])


@pytest.mark.parametrize(
    ("top_k", "top_p", "expected"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (1, 1.0, {1}),
        (2, 1.0, {1, 3}),
        (9, 1.0, {0, 1, 2, 3}),
        (0, 0.39, {1}),
        (0, 0.41, {1, 3}),
        (0, 0.69, {1, 3}),
        (0, 0.71, {1, 2, 3}),
        (0, 0.95, {0, 1, 2, 3}),
        (0, 1e-6, {1}),
        (3, 0.5, {1, 3}),
        (1, 0.9, {1}),
    ],
)
def test_truncation_keeps_the_most_probable(top_k, top_p, expected):
    rows = np.stack([LOGITS, LOGITS[::-1]]).astype(np.float32)
    out = np.asarray(truncate(jnp.asarray(rows), top_k, top_p))
    assert {int(i) for i in np.flatnonzero(np.isfinite(out[0]))} == expected
    assert {3 - int(i) for i in np.flatnonzero(np.isfinite(out[1]))} == expected
    np.testing.assert_array_equal(out[0][list(expected)], rows[0][list(expected)])


def test_ties_with_the_last_token_kept_stay():
    rows = jnp.log(jnp.array([[0.2, 0.2, 0.4, 0.2]], jnp.float32))
    np.testing.assert_array_equal(np.isfinite(truncate(rows, 2, 1.0)), [[True] * 4])
    np.testing.assert_array_equal(
        np.isfinite(truncate(rows, 0, 0.3)), [[False, False, True, False]]
    )


def kept_by_sorting(row, top_k, top_p):
    """Returns the columns that remain, by the textbook algorithm: in float64, from the most
    probable one down.
    """
    order = np.argsort(-row, kind="stable")
    if top_k > 0:
        order = [i for i in order if row[i] >= row[order[min(top_k, len(row)) - 1]]]
    mass = np.exp(row - row.max()).astype(np.float64) * np.isfinite(row)
    mass /= mass[order].sum()
    columns, before = set(), 0.0
    for i in order:
        if (
            before >= max(top_p, 1e-9)
            and top_p < 1
            and not (columns and row[i] == min(row[j] for j in columns))
        ):
            break
        columns.add(int(i))
        before += mass[i]
    return {i for i in columns if np.isfinite(row[i])}


ROWS_OF_PARAMETERS = [(0, 1.0), (20, 0.95), (20, 1.0), (0, 0.95), (1, 0.5), (-1, 0.3), (5, 0.0)]


def test_each_row_is_truncated_by_its_own_parameters():
    random = np.random.default_rng(4)
    n = len(ROWS_OF_PARAMETERS)
    rows = (random.normal(size=(n, 700)) * 3).astype(np.float32)
    rows[:, 600:] = -np.inf  # columns without a token
    rows[2, :30] = 5.0  # ties with the last column that remains
    rows[:, 3], rows[:, 4] = 0.0, -0.0
    top_k, top_p = map(np.array, zip(*ROWS_OF_PARAMETERS, strict=True))
    out = np.asarray(truncate(*map(jnp.asarray, (rows, top_k, top_p.astype(np.float32)))))
    for row, result, (k, p) in zip(rows, out, ROWS_OF_PARAMETERS, strict=True):
        assert set(np.flatnonzero(np.isfinite(result))) == kept_by_sorting(row, k, p), (k, p)
        np.testing.assert_array_equal(result[np.isfinite(result)], row[np.isfinite(result)])


def test_the_parameters_of_a_row_are_those_of_a_sampler_of_its_own():
    keys, logits = keys_of(np.arange(9)), jnp.asarray(np.tile(np.log(PROBS), (9, 1)), jnp.float32)
    settings = [(1.0, 0, 1.0), (0.6, 2, 0.95), (0.0, 2, 0.5)] * 3
    rows = RowSampling(*(jnp.asarray(x) for x in zip(*settings, strict=True)))
    by_row = sample(logits, keys, jnp.arange(9), Sampler(per_request=True), rows)
    for i, setting in enumerate(settings):
        at = slice(i, i + 1)
        alone = sample(logits[at], keys[at], jnp.arange(9)[at], Sampler(*setting))
        for batched, other in zip(by_row, alone, strict=True):
            np.testing.assert_allclose(batched[at], other, rtol=1e-6)


def test_parameters_of_rows_belong_to_a_sampler_per_request():
    keys, logits = keys_of(np.arange(1)), jnp.asarray(np.log(PROBS)[None], jnp.float32)
    with pytest.raises(ValueError, match="parameters of each sequence"):
        sample(logits, keys, jnp.arange(1), Sampler(per_request=True))
    with pytest.raises(ValueError, match="parameters of each sequence"):
        sample(logits, keys, jnp.arange(1), Sampler(), RowSampling.plain(1))


@pytest.mark.parametrize("sampler", [Sampler(1.0, top_k=2), Sampler(1.0, top_p=0.6)])
def test_a_truncated_draw_reports_the_log_prob_and_entropy_before_truncation(sampler):
    token, logp, entropy = draw(np.log(PROBS), keys_of(np.arange(2000)), 5, sampler)
    assert set(token) == {0, 1}
    np.testing.assert_allclose(np.mean(token == 0), 0.35 / 0.6, atol=0.05)
    np.testing.assert_allclose(logp, np.log(PROBS)[token], rtol=1e-5)
    np.testing.assert_allclose(entropy, -np.sum(PROBS * np.log(PROBS)), rtol=1e-5)


def test_keys_differ_in_every_component_and_come_again():
    ids, visits, samples = (
        np.array(x)
        for x in zip(*itertools.product([0, 1, 2, 2**32 - 1], [0, 1, 2], [0, 1, 2]), strict=True)
    )
    batches = [
        keys_of(ids, visits, samples, seed, purpose)
        for seed in (0, 1, 2**32 - 1)
        for purpose in Purpose
    ]
    rows = np.concatenate(batches)
    assert len(np.unique(rows, axis=0)) == len(rows) == 3 * len(Purpose) * 36
    np.testing.assert_array_equal(
        keys_of(ids, visits, samples, 1, Purpose.EVAL), batches[len(Purpose) + int(Purpose.EVAL)]
    )


def test_a_row_is_drawn_the_same_whatever_stands_beside_it():
    keys = keys_of(np.arange(64))
    all_rows, _, _ = draw(np.log(PROBS), keys, np.arange(64), Sampler())
    part, _, _ = draw(np.log(PROBS), keys[[40, 3]], np.array([40, 3]), Sampler())
    np.testing.assert_array_equal(part, all_rows[[40, 3]])
