"""The merging methods against references written from their equations, on models in memory that
are cut into blocks.
"""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compass_jax.apps.curate.merge import (
    Block,
    Linear,
    MergeError,
    Ties,
    kept_count,
    kth_magnitudes,
    method_of,
)

F32 = np.float32


class InMemory:
    """A model of some tensors: (name, base [n], parents [p n]), in blocks of `size` entries."""

    def __init__(self, tensors, size=10**6):
        self.tensors, self.size = tensors, size

    def map(self, function):
        return (function(block) for block in self.blocks())

    def blocks(self):
        for name, base, models in self.tensors:
            for at in range(0, len(base), self.size):
                part = slice(at, at + self.size)
                yield Block(name, base[part], models[:, part])


def model_of(deltas, base=None, size=10**6):
    """Returns a model of one tensor whose parents differ from its base by `deltas` [p n]."""
    deltas = np.asarray(deltas, F32)
    base = np.zeros(deltas.shape[1], F32) if base is None else np.asarray(base, F32)
    return InMemory([("w", base, base + deltas)], size)


def merged(method, model):
    """Returns the trimmed deltas [p n] and the merged entries [n] of a model."""
    parts = list(model.map(method.prepare(model)))
    return (
        np.concatenate([part.trimmed for part in parts], 1),
        np.concatenate([part.merged for part in parts]),
    )


def random_model(seed, parents=3, entries=5000, size=700):
    """Returns a model of two tensors and its deltas, which have very different sizes, zeros and
    ties by rounding.
    """
    rng = np.random.default_rng(seed)
    shape = (parents, entries)
    deltas = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    deltas = np.where(rng.random(shape) < 0.1, 0, np.round(deltas, 2)).astype(F32)
    base = np.zeros(entries, F32)
    cut = entries // 3
    tensors = [("a", base[:cut], deltas[:, :cut]), ("b", base[cut:], deltas[:, cut:])]
    return InMemory(tensors, size), deltas


def ties_reference(deltas, weights, density):
    """Computes Algorithm 1 of arXiv 2306.01708 with weights, entry by entry, from a full sort, in
    float32.
    """
    trimmed = []
    for delta, share in zip(deltas, density, strict=True):
        count = -(-len(delta) * round(share * 10**6) // 10**6)
        least = sorted(np.abs(delta))[len(delta) - count]
        trimmed.append([d if abs(d) >= least else F32(0) for d in delta])
    out = []
    for column in zip(*trimmed, strict=True):
        total = F32(0)
        for weight, d in zip(weights, column, strict=True):
            total = F32(total + F32(weight) * d)
        numerator, denominator = F32(0), F32(0)
        for weight, d in zip(weights, column, strict=True):
            if d != 0 and np.sign(d) == np.sign(total):
                numerator = F32(numerator + F32(weight) * d)
                denominator = F32(denominator + F32(weight))
        out.append(numerator / denominator if denominator > 0 else F32(0))
    return np.array(trimmed, F32), np.array(out, F32)


@pytest.mark.parametrize(
    ("weights", "density"),
    [
        ((1.0, 1.0, 1.0), (0.2, 0.2, 0.2)),
        ((0.5, 0.3, 0.2), (0.1, 0.9, 1.0)),
        ((2.0, 0.0, 1.0), (0.0002, 0.5, 0.2)),
        ((1.0,), (0.3,)),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_ties_equals_an_independent_implementation_within_2_ulp(weights, density, seed):
    model, deltas = random_model(seed, len(weights))
    trimmed, actual = merged(Ties(weights, density), model)
    expected_trimmed, expected = ties_reference(deltas, weights, density)
    np.testing.assert_array_equal(trimmed, expected_trimmed)
    np.testing.assert_array_max_ulp(actual, expected, 2)
    assert np.count_nonzero(actual) > 0


def test_ties_by_hand():
    """A density of 0.5 keeps three of six entries: 3, -2 and 4 of parent 1; -5, 3, 2 and the tie -2
    of parent 2.
    """
    deltas = [[3, -2, 1, 0, 0.5, 4], [-5, 3, 1, 2, 1, -2]]
    trimmed, actual = merged(Ties((1.0, 3.0), (0.5, 0.5)), model_of(deltas))
    np.testing.assert_array_equal(trimmed, [[3, -2, 0, 0, 0, 4], [-5, 3, 0, 2, 0, -2]])
    # sums with weights 1 and 3: -12, 7, 0, 6, 0, -2
    np.testing.assert_array_equal(actual, [-5, 3, 0, 2, 0, -2])


def test_a_sum_of_zero_is_no_direction():
    trimmed, actual = merged(Ties((1.0, 2.0), (1.0, 1.0)), model_of([[4, 1], [-2, 1]]))
    np.testing.assert_array_equal(actual, [0, 1])
    np.testing.assert_array_equal(trimmed, [[4, 1], [-2, 1]])


def test_all_ties_at_the_threshold_stay():
    trimmed, _ = merged(Ties((1.0,), (0.25,)), model_of([[1, -1, 1, 2, -1, 0.5, 0, 1]]))
    np.testing.assert_array_equal(trimmed, [[1, -1, 1, 2, -1, 0, 0, 1]])


def test_the_count_is_of_the_decimal_that_was_written():
    assert [kept_count(0.1, 30), kept_count(0.2, 11), kept_count(1e-6, 5)] == [3, 3, 1]
    assert math.ceil(0.1 * 3 * 10) == 4  # the product in floating point is above 3


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=60), st.data())
def test_the_kth_magnitude_is_exact(values, data):
    k = data.draw(st.integers(1, len(values)))
    size = data.draw(st.integers(1, 60))
    values = np.array([values], F32)
    (magnitude,) = kth_magnitudes(model_of(values, size=size), lambda n: [k])
    assert magnitude.view(F32) == np.sort(np.abs(values[0]))[-k]


def test_linear_is_the_weighted_mean():
    deltas = [[1, 2, 0], [3, -2, 1]]
    assert merged(Linear((1.0, 3.0)), model_of(deltas))[1].tolist() == [2.5, -1.0, 0.75]


@pytest.mark.parametrize(
    ("name", "given_settings", "message"),
    [
        ("best", {}, "method 'best': there is no such method; there are ties, linear"),
        ("linear", {"density": [0.2]}, "density: linear has none; it has weights alone"),
        ("ties", {"weights": [1.0]}, "weights: 1 numbers for 2 models"),
        ("ties", {"density": [0.1] * 3}, "density: 3 numbers for 2 models"),
        ("ties", {"density": [0.0]}, "density: 0.0 must be from 1e-6 to 1"),
        ("ties", {"density": [1.5]}, "density: 1.5 must be"),
        ("ties", {"density": [math.nan]}, "density: nan must be"),
        ("ties", {"weights": [1.0, -1.0]}, "weights: -1.0 must be 0, or from 1e-6 to 1e6"),
        ("linear", {"weights": [0.0, 0.0]}, "weights: all are 0"),
        ("linear", {"weights": [math.inf, 1.0]}, "weights: inf must be 0, or from"),
        ("linear", {"weights": [math.nan, 1.0]}, "weights: nan must be"),
    ],
)
def test_settings_that_cannot_be_are_named(name, given_settings, message):
    with pytest.raises(MergeError, match=message):
        method_of(name, 2, **given_settings)


def test_what_is_not_given_has_its_default():
    assert method_of("ties", 2) == Ties((1.0, 1.0), (0.2, 0.2))
    assert method_of("ties", 2, density=[0.5]) == Ties((1.0, 1.0), (0.5, 0.5))
