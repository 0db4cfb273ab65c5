"""The grouped matmuls of CPU against the definition, pair by pair, under every kind of load: values, and the gradients of the one that trains."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.model import grouped
from compass_jax.model.grouped import MANY_ROWS, batched_swiglu, block_heights, grouped_swiglu
from compass_jax.model.sized import SIZES, Dispatch, sized_forward, sized_swiglu, unit_rows

SHAPES = [(1, 2), (38, 5), (1024, 8), (8192, 16), (512, 128), (256, 16)]


@pytest.mark.parametrize(("pairs", "experts"), SHAPES)
def test_a_batched_block_holds_two_deviations_more_than_the_mean(pairs, experts):
    height, extra = block_heights(pairs, experts)
    assert 8 <= extra <= max(8, height) and height % 8 == 0 and extra % 8 == 0
    mean = pairs / experts
    assert mean + 2 * mean**0.5 <= height < mean + 2 * mean**0.5 + 8


@pytest.mark.parametrize(("pairs", "experts"), SHAPES)
def test_a_full_block_of_units_is_about_the_mean(pairs, experts):
    unit = unit_rows(pairs, experts)
    assert unit % 8 == 0 and (unit == 8 or abs(SIZES * unit - pairs / experts) <= 32)


def numpy_swiglu(x, weights, expert_of, k, g):
    """Values of every pair and the pullback of `g`, from the definition, pair by pair; a pair of no expert gives and takes nothing."""
    out, dx = np.zeros((len(expert_of), x.shape[1])), np.zeros_like(x)
    d = {name: np.zeros_like(w) for name, w in weights.items()}
    for p, e in enumerate(expert_of):
        if e == len(weights["gate"]):
            continue
        row = x[p // k]
        a, b = row @ weights["gate"][e], row @ weights["up"][e]
        sigmoid = 1 / (1 + np.exp(-a))
        hidden = a * sigmoid * b
        out[p] = hidden @ weights["down"][e]
        d_hidden = weights["down"][e] @ g[p]
        d_a, d_b = d_hidden * b * (sigmoid + a * sigmoid * (1 - sigmoid)), d_hidden * a * sigmoid
        for name, value in (("gate", np.outer(row, d_a)), ("up", np.outer(row, d_b)), ("down", np.outer(hidden, g[p]))):
            d[name][e] += value
        dx[p // k] += weights["gate"][e] @ d_a + weights["up"][e] @ d_b
    return out, dx, d


@partial(jax.jit, static_argnames=("k", "unit"))
def values_and_pullback(x, weights, dispatch, g, k, unit):
    out, pullback = jax.vjp(lambda x, w: sized_swiglu(x, w["gate"], w["up"], w["down"], dispatch, k, unit), x, weights)
    return out, *pullback(g)


@partial(jax.jit, static_argnames=("k", "unit"))
def side_by_side(x, weights, dispatch, k, unit):
    return sized_forward(x, (jnp.concatenate([weights["gate"], weights["up"]], axis=2),), weights["down"], dispatch, k, unit)[0]


@partial(jax.jit, static_argnames=("k", "height", "extra"))
def batched(x, weights, dispatch, k, height, extra):
    return batched_swiglu(x, jnp.concatenate([weights["gate"], weights["up"]], axis=2), weights["down"], dispatch, k, height, extra)


def loads(tokens, k, experts, edges):
    """(name, rows of each expert): the fullest exactly as large as a block can be, one above; extremes; nothing at all."""
    pairs, rng = tokens * k, np.random.default_rng(3)

    def fullest(size):
        rest = rng.multinomial(pairs - size, np.full(experts - 1, 1 / (experts - 1)))
        return np.concatenate([[size], rest])[rng.permutation(experts)]

    only = np.eye(experts, dtype=int) * pairs
    few = [np.ones(experts, int), np.zeros(experts, int)]
    around = [(f"fullest_{edge}", fullest(edge)) for edge in edges if edge <= pairs]
    return [*around, ("first", only[0]), ("last", only[-1]), ("one_each", few[0]), ("none", few[1])]


def problems(tokens, k, experts, edges):
    """(name, x, weights, dispatch, gradient of the output, expert of each pair) for every load; some tokens are masked."""
    rng = np.random.default_rng(1)
    weights = {name: rng.standard_normal(shape) for name, shape in {"gate": (experts, 3, 4), "up": (experts, 3, 4), "down": (experts, 4, 3)}.items()}
    for name, sizes in loads(tokens, k, experts, edges):
        expert_of = np.full(tokens * k, experts)
        expert_of[: sizes.sum()] = np.repeat(np.arange(experts), sizes)
        rng.shuffle(expert_of)
        order = np.argsort(expert_of, kind="stable")
        dispatch = Dispatch(*(jnp.asarray(v, jnp.int32) for v in (order, np.argsort(order), sizes)))
        yield name, rng.standard_normal((tokens, 3)), weights, dispatch, rng.standard_normal((tokens * k, 3)), expert_of


def close(found, expected, name):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10, err_msg=name), found, expected)


@pytest.mark.parametrize(("tokens", "k", "experts", "unit"), [(60, 2, 5, 2), (100, 1, 6, 8), (30, 2, 3, 1)])
def test_blocks_of_all_sizes_give_the_values_and_gradients_of_the_definition(x64, tokens, k, experts, unit):
    """An expert of every number of units up to a full block, of a row more, of two full blocks; empty experts; one expert for all."""
    edges = [*(n * unit for n in range(1, SIZES + 1)), SIZES * unit + 1, 2 * SIZES * unit, 2 * SIZES * unit + unit]
    for name, x, weights, dispatch, g, expert_of in problems(tokens, k, experts, edges):
        expected = numpy_swiglu(x, weights, expert_of, k, g)
        close(values_and_pullback(jnp.asarray(x), weights, dispatch, jnp.asarray(g), k, unit), expected, name)
        close(side_by_side(jnp.asarray(x), weights, dispatch, k, unit), expected[0], name)


@pytest.mark.parametrize(("tokens", "k", "experts", "height", "extra"), [(40, 2, 8, 8, 8), (60, 2, 16, 16, 16), (20, 2, 4, 40, 8), (30, 2, 3, 1, 4)])
def test_batched_blocks_and_the_loop_behind_them_give_the_values_of_the_definition(x64, tokens, k, experts, height, extra):
    """Blocks that are full, empty and overfull, loops of none, one and many blocks."""
    for name, x, weights, dispatch, g, expert_of in problems(tokens, k, experts, [height, height + 1, height + extra, height + extra + 1]):
        expected = numpy_swiglu(x, weights, expert_of, k, g)[0]
        close(batched(jnp.asarray(x), weights, dispatch, k, height, extra), expected, name)


@pytest.mark.parametrize("tokens", [40, 4 * MANY_ROWS])
def test_few_and_many_rows_give_the_same(monkeypatch, tokens):
    """Weights side by side: decoding's batched blocks below MANY_ROWS an expert, blocks of several sizes from there on."""
    rng, calls = np.random.default_rng(0), []
    for name in ("batched_swiglu", "sized_forward"):
        real = getattr(grouped, name)
        monkeypatch.setattr(grouped, name, lambda *args, name=name, real=real: calls.append(name) or real(*args))
    weights = {"gate_up": rng.standard_normal((4, 8, 12)), "down": rng.standard_normal((4, 6, 8))}
    expert_of = rng.integers(0, 4, tokens)
    order = np.argsort(expert_of, kind="stable")
    dispatch = Dispatch(*(jnp.asarray(v, jnp.int32) for v in (order, np.argsort(order), np.bincount(expert_of, minlength=4))))
    x = rng.standard_normal((tokens, 8))
    apart = {"gate": weights["gate_up"][:, :, :6], "up": weights["gate_up"][:, :, 6:], "down": weights["down"]}
    found = grouped_swiglu(jnp.asarray(x, jnp.float32), {n: jnp.asarray(w, jnp.float32) for n, w in weights.items()}, dispatch, 1)
    np.testing.assert_allclose(found, numpy_swiglu(x, apart, expert_of, 1, np.zeros((tokens, 8)))[0], rtol=2e-4, atol=2e-4)
    assert calls == ["batched_swiglu" if tokens < 4 * MANY_ROWS else "sized_forward"]
