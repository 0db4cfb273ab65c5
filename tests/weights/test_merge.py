"""The methods of merging against references written from their equations, on models in memory that
are cut into blocks at random.
"""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compass_jax.weights.merge import (
    Block,
    Dare,
    Linear,
    MergeError,
    OfficialTies,
    Slerp,
    TaskArithmetic,
    Ties,
    kth_magnitudes,
    method_of,
)
from compass_jax.weights.merge_maths import drawn, kept_count

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
                yield Block(name, at, base[part], models[:, part])


def model_of(deltas, base=None, size=10**6):
    """One tensor whose parents differ from its base by `deltas` [p n]."""
    deltas = np.asarray(deltas, F32)
    base = np.zeros(deltas.shape[1], F32) if base is None else np.asarray(base, F32)
    return InMemory([("w", base, base + deltas)], size)


def merged(method, model):
    """(kept [p n], merged [n]) of a whole model."""
    parts = list(model.map(method.prepare(model)))
    return (
        np.concatenate([part.kept for part in parts], 1),
        np.concatenate([part.merged for part in parts]),
    )


def random_model(seed, parents=3, entries=5000, size=700):
    """Two tensors; deltas of very different sizes, some of them zero, with ties by rounding."""
    rng = np.random.default_rng(seed)
    shape = (parents, entries)
    deltas = rng.standard_normal(shape) * np.exp(3 * rng.standard_normal(shape))
    deltas = np.where(rng.random(shape) < 0.1, 0, np.round(deltas, 2)).astype(F32)
    base = np.zeros(entries, F32)
    cut = entries // 3
    tensors = [("a", base[:cut], deltas[:, :cut]), ("b", base[cut:], deltas[:, cut:])]
    return InMemory(tensors, size), deltas


def ties_reference(deltas, weights, density):
    """Algorithm 1 of arXiv 2306.01708 with weights, entry by entry, from a full sort; float32."""
    kept = []
    for delta, share in zip(deltas, density, strict=True):
        count = -(-len(delta) * round(share * 10**6) // 10**6)
        least = sorted(np.abs(delta))[len(delta) - count]
        kept.append([d if abs(d) >= least else F32(0) for d in delta])
    out = []
    for column in zip(*kept, strict=True):
        total = F32(0)
        for weight, d in zip(weights, column, strict=True):
            total = F32(total + F32(weight) * d)
        numerator, denominator = F32(0), F32(0)
        for weight, d in zip(weights, column, strict=True):
            if d != 0 and np.sign(d) == np.sign(total):
                numerator = F32(numerator + F32(weight) * d)
                denominator = F32(denominator + F32(weight))
        out.append(numerator / denominator if denominator > 0 else F32(0))
    return np.array(kept, F32), np.array(out, F32)


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
    kept, found = merged(Ties(weights, density), model)
    wanted_kept, wanted = ties_reference(deltas, weights, density)
    np.testing.assert_array_equal(kept, wanted_kept)
    np.testing.assert_array_max_ulp(found, wanted, 2)
    assert np.count_nonzero(found) > 0


def test_ties_by_hand():
    """Of six entries 0.5 keeps three. Parent 1: 3, -2, 4. Parent 2: -5, 3, 2 and its tie -2."""
    deltas = [[3, -2, 1, 0, 0.5, 4], [-5, 3, 1, 2, 1, -2]]
    kept, found = merged(Ties((1.0, 3.0), (0.5, 0.5)), model_of(deltas))
    np.testing.assert_array_equal(kept, [[3, -2, 0, 0, 0, 4], [-5, 3, 0, 2, 0, -2]])
    # sums with weights 1 and 3: -12, 7, 0, 6, 0, -2
    np.testing.assert_array_equal(found, [-5, 3, 0, 2, 0, -2])


def test_a_mean_counts_the_weights_of_those_that_agree():
    found = merged(Ties((1.0, 3.0, 2.0), (1.0, 1.0, 1.0)), model_of([[4], [2], [-1]]))[1]
    assert found == [(4 + 3 * 2) / (1 + 3)]


def test_a_sum_of_zero_is_no_direction():
    kept, found = merged(Ties((1.0, 2.0), (1.0, 1.0)), model_of([[4, 1], [-2, 1]]))
    np.testing.assert_array_equal(found, [0, 1])
    np.testing.assert_array_equal(kept, [[4, 1], [-2, 1]])


def test_all_ties_at_the_threshold_stay():
    kept, _ = merged(Ties((1.0,), (0.25,)), model_of([[1, -1, 1, 2, -1, 0.5, 0, 1]]))
    np.testing.assert_array_equal(kept, [[1, -1, 1, 2, -1, 0, 0, 1]])


def test_density_one_keeps_all_and_a_tiny_one_the_largest():
    deltas = np.random.default_rng(0).standard_normal((1, 999)).astype(F32)
    kept, found = merged(Ties((0.7,), (1.0,)), model_of(deltas))
    np.testing.assert_array_equal(kept, deltas)
    np.testing.assert_array_max_ulp(found, deltas[0], 1)
    kept, _ = merged(Ties((1.0,), (1e-6,)), model_of(deltas))
    assert np.flatnonzero(kept).tolist() == [np.argmax(np.abs(deltas))]


def test_the_count_is_of_the_decimal_that_was_written():
    assert [kept_count(0.1, 30), kept_count(0.2, 11), kept_count(1e-6, 5)] == [3, 3, 1]
    assert math.ceil(0.1 * 3 * 10) == 4  # why


@given(
    st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1, max_size=60),
    st.data(),
)
def test_the_kth_magnitude_is_exact(values, data):
    k = data.draw(st.integers(1, len(values)))
    size = data.draw(st.integers(1, 60))
    values = np.array([values], F32)
    (found,) = kth_magnitudes(model_of(values, size=size), lambda n: [k])
    assert found.view(F32) == np.sort(np.abs(values[0]))[-k]


def test_the_authors_variant_by_hand():
    """Ten entries, density 0.3: int(3.0) + 1 = 4 are kept. Sums of what is kept: 5, -4, 0, 4, 0, 0,
    0, -2, 0, 7: three above zero, two below, so zero takes plus.
    """
    deltas = [
        [6, -4, 5, 0.5, -0.5, 0, 0.1, 0.2, 0, 7],
        [-1, 0.5, -5, 4, 0, -0.5, 0.1, -2, 3, 0],
    ]
    deltas[1][0] = -0.9
    deltas[1][8] = 0.4
    deltas[1][9] = -1
    # kept: 6, -4, 5, 7 of the first; -5, 4, -2, -1 of the second
    kept, found = merged(OfficialTies((0.3, 0.3)), model_of(deltas))
    np.testing.assert_array_equal(
        kept, [[6, -4, 5, 0, 0, 0, 0, 0, 0, 7], [0, 0, -5, 4, 0, 0, 0, -2, 0, -1]]
    )
    np.testing.assert_array_equal(found, [6, -4, 5, 4, 0, 0, 0, -2, 0, 7])


def official_reference(deltas, density):
    """`topk_values_mask`, `resolve_sign` and `disjoint_merge` of the authors' code, in numpy."""
    kept = []
    for delta, share in zip(deltas, density, strict=True):
        n = len(delta)
        k = max(n - int(n * share), 1)  # kthvalue has no 0th; the k-th smallest, from 1
        kept.append(delta * (np.abs(delta) >= np.sort(np.abs(delta))[k - 1]))
    kept = np.array(kept, F32)
    signs = np.sign(kept.sum(0))
    signs[signs == 0] = np.sign(signs.sum())
    rows = np.where(signs > 0, kept > 0, kept < 0)
    chosen = kept * rows
    return chosen.sum(0) / np.maximum((chosen != 0).sum(0).astype(F32), 1)


@pytest.mark.parametrize("turned", [1, -1])
@pytest.mark.parametrize("density", [0.2, 0.7, 1.0])
def test_the_authors_variant_is_their_code(density, turned):
    deltas = random_model(5, entries=4000)[1]
    deltas[1, :900] = -deltas[0, :900]  # sums of zero
    deltas[2, :900] = 0
    deltas[:, 900:2000] = turned * np.abs(deltas[:, 900:2000])
    kept, found = merged(OfficialTies((density,) * 3), model_of(deltas, size=333))
    np.testing.assert_array_max_ulp(found, official_reference(deltas, (density,) * 3), 2)
    undecided = found[(kept.sum(0) == 0) & kept.any(0)]
    assert len(undecided) > 100 and (np.sign(undecided) == turned).all()


def test_where_no_sign_is_the_majoritys_the_authors_code_takes_what_is_negative():
    found = merged(OfficialTies((1.0, 1.0)), model_of([[2, 1, -3], [-2, 1, -3]]))[1]
    np.testing.assert_array_equal(found, [-2, 1, -3])
    np.testing.assert_array_equal(
        found, official_reference(np.array([[2, 1, -3], [-2, 1, -3]], F32), (1, 1))
    )


def test_linear_is_the_weighted_mean_and_task_arithmetic_the_sum():
    deltas = [[1, 2, 0], [3, -2, 1]]
    assert merged(Linear((1.0, 3.0)), model_of(deltas))[1].tolist() == [2.5, -1.0, 0.75]
    assert merged(TaskArithmetic((1.0, 3.0)), model_of(deltas))[1].tolist() == [10.0, -4.0, 3.0]
    assert merged(TaskArithmetic((1.0, -1.0)), model_of(deltas))[1].tolist() == [-2.0, 4.0, -1.0]


def test_dare_keeps_the_mean_and_drops_what_it_says():
    """n = 200,000 entries of 1, density 0.2: kept entries are 5, their share 0.2 within five
    standard errors, sqrt(0.2 0.8 / n).
    """
    n = 200_000
    kept, found = merged(Dare((1.0, 0.5), (0.2, 0.5)), model_of(np.ones((2, n)), size=10_007))
    assert set(np.unique(kept[0])) == {0.0, 5.0} and set(np.unique(kept[1])) == {0.0, 2.0}
    assert abs((kept[0] > 0).mean() - 0.2) < 5 * math.sqrt(0.2 * 0.8 / n)
    assert abs(found.mean() - 1.5) < 5 * math.sqrt((0.8 / 0.2 + 0.25) / n)
    both = ((kept[0] > 0) & (kept[1] > 0)).mean()  # the parents' draws are independent
    assert abs(both - 0.1) < 5 * math.sqrt(0.1 * 0.9 / n)
    np.testing.assert_array_equal(found, kept[0] + F32(0.5) * kept[1])


def test_dares_draws_follow_from_seed_parent_tensor_and_place_alone():
    whole = drawn((3, 1, "w"), 0, 1000, 0.4)
    parts = [drawn((3, 1, "w"), at, 137, 0.4) for at in range(0, 1000, 137)]
    np.testing.assert_array_equal(np.concatenate(parts)[:1000], whole)
    for other in ((4, 1, "w"), (3, 0, "w"), (3, 1, "v")):
        assert 350 < np.count_nonzero(drawn(other, 0, 1000, 0.4) != whole) < 610
    assert drawn((0, 0, "w"), 0, 1000, 1.0).all()


def slerp_reference(one, two, t):
    """Shoemake's formula in float64."""
    angle = np.arccos(one @ two / np.linalg.norm(one) / np.linalg.norm(two))
    return (np.sin((1 - t) * angle) * one + np.sin(t * angle) * two) / np.sin(angle)


@pytest.mark.parametrize("weights", [(1.0, 1.0), (3.0, 1.0), (0.0, 2.0)])
def test_slerp_turns_each_tensor_by_itself(weights):
    rng = np.random.default_rng(1)
    base, models = rng.standard_normal(900).astype(F32), rng.standard_normal((2, 900)).astype(F32)
    cuts = (slice(0, 300), slice(300, 900))
    model = InMemory([(str(c), base[c], models[:, c]) for c in cuts], 128)
    found = base + merged(Slerp(weights), model)[1]
    for c in cuts:
        wanted = slerp_reference(*models[:, c].astype(np.float64), weights[1] / sum(weights))
        np.testing.assert_allclose(found[c], wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("other", "wanted"),
    [
        ([3, 6, -3], [1.5, 3, -1.5]),  # parallel: the straight line, t = 1/4
        ([-1, -2, 1], [0.5, 1, -0.5]),  # opposite
        ([0, 0, 0], [0.75, 1.5, -0.75]),  # without a direction
        ([1, 2, -1], [1, 2, -1]),  # the same
    ],
)
def test_slerp_of_parallel_tensors_is_the_straight_line(other, wanted):
    base = np.array([5, 5, 5], F32)
    models = np.array([[1, 2, -1], other], F32)
    found = base + merged(Slerp((3.0, 1.0)), InMemory([("w", base, models)]))[1]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.permutations(range(3)), st.sampled_from([0.2, 0.5, 1.0]))
def test_the_parents_order_does_not_matter(seed, order, density):
    """On a grid where float32 adds exactly."""
    rng = np.random.default_rng(seed)
    deltas = (rng.integers(-8, 9, (3, 40)) / 8).astype(F32)
    weights, densities = (1.0, 2.0, 0.5), (density, 0.4, 0.8)
    for method, other in (
        (Ties(weights, densities), Ties(*([x[i] for i in order] for x in (weights, densities)))),
        (OfficialTies(densities), OfficialTies([densities[i] for i in order])),
        (TaskArithmetic(weights), TaskArithmetic([weights[i] for i in order])),
    ):
        one = merged(method, model_of(deltas))[1]
        two = merged(other, model_of(deltas[list(order)]))[1]
        np.testing.assert_array_max_ulp(one, two, 2)


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.sampled_from(["ties", "ties-official", "linear", "slerp"]))
def test_equal_parents_give_what_each_kept(seed, name):
    """TIES adds no sign conflict, means keep a value; slerp of a direction with itself is it."""
    delta = np.random.default_rng(seed).standard_normal(50).astype(F32)
    kept, found = merged(method_of(name, 2), model_of([delta, delta]))
    np.testing.assert_allclose(found, kept[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "given_settings", "message"),
    [
        ("best", {}, "method 'best': there is no such method; there are ties, ties-official,"),
        ("linear", {"density": [0.2]}, "density: linear has none; it has weights alone"),
        ("ties-official", {"weights": [1, 1]}, "weights: ties-official has none"),
        ("ties", {"seed": 1}, "seed: ties has none"),
        ("ties", {"weights": [1.0]}, "weights: 1 numbers for 2 models"),
        ("ties", {"density": [0.1] * 3}, "density: 3 numbers for 2 models"),
        ("ties", {"density": [0.0]}, "density: 0.0 must be from 1e-6 to 1"),
        ("ties", {"density": [1.5]}, "density: 1.5 must be"),
        ("dare", {"density": [math.nan]}, "density: nan must be"),
        ("ties", {"weights": [1.0, -1.0]}, "weights: -1.0 must be 0, or from 1e-6 to 1e6"),
        ("linear", {"weights": [0.0, 0.0]}, "weights: all are 0"),
        ("dare", {"weights": [math.inf, 1.0]}, "weights: inf must be 0, or of magnitude"),
        ("task-arithmetic", {"weights": [math.nan, 1.0]}, "weights: nan must be"),
        ("dare", {"seed": -1}, "seed: -1 must be at least 0"),
    ],
)
def test_settings_that_cannot_be_are_named(name, given_settings, message):
    with pytest.raises(MergeError, match=message):
        method_of(name, 2, **given_settings)


def test_slerp_takes_two_parents():
    with pytest.raises(MergeError, match="slerp merges two models, 3 were given"):
        method_of("slerp", 3)


def test_what_is_not_given_has_its_default():
    assert method_of("ties", 2) == Ties((1.0, 1.0), (0.2, 0.2))
    assert method_of("dare", 2, density=[0.5], seed=7) == Dare((1.0, 1.0), (0.5, 0.5), 7)
