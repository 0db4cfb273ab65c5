"""The grouped matmuls for CPU against a pair-by-pair reference, under every kind of load: values,
and gradients of the one that is used in training.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.model.experts import cpu
from compass_jax.model.experts.cpu import (
    MANY_ROWS,
    Blocks,
    batched_swiglu,
    block_heights,
    block_shapes,
    grouped_swiglu,
    sized_forward,
    sized_swiglu,
)
from compass_jax.model.experts.dispatch import Dispatch

SHAPES = [(1, 2), (38, 5), (1024, 8), (8192, 16), (512, 128), (256, 16)]


@pytest.mark.parametrize(("pairs", "experts"), SHAPES)
def test_a_batched_block_holds_two_deviations_more_than_the_mean(pairs, experts):
    height, extra = block_heights(pairs, experts)
    assert 8 <= extra <= max(8, height) and height % 8 == 0 and extra % 8 == 0
    mean = pairs / experts
    assert mean + 2 * mean**0.5 <= height < mean + 2 * mean**0.5 + 8


@pytest.mark.parametrize(("pairs", "experts"), SHAPES)
def test_a_full_block_of_units_is_about_the_mean(pairs, experts):
    blocks = block_shapes(pairs, experts, 128 * 128)
    assert blocks.unit % 8 == 0 and 2 <= blocks.sizes <= 8
    assert blocks == (8, 2) or abs(blocks.full - pairs / experts) <= 32


@pytest.mark.parametrize(("pairs", "experts"), SHAPES)
def test_small_experts_have_two_sizes_of_blocks(pairs, experts):
    """XLA compiles one matrix product for each block size, so small experts use only two sizes."""
    unit, sizes = block_shapes(pairs, experts, 64 * 64)
    assert sizes == 2 and unit % 8 == 0 and 0 <= 2 * unit - pairs / experts < 16


def numpy_swiglu(x, gates, weights, expert_of, g):
    """Returns every token's output and the pullback of `g`, computed pair by pair from the
    definition. A pair without an expert adds nothing to either.
    """
    k = gates.shape[1]
    out, dx, d_gates = np.zeros_like(x), np.zeros_like(x), np.zeros_like(gates)
    d = {name: np.zeros_like(w) for name, w in weights.items()}
    for p, e in enumerate(expert_of):
        if e == len(weights["gate"]):
            continue
        row, gate = x[p // k], gates[p // k, p % k]
        a, b = row @ weights["gate"][e], row @ weights["up"][e]
        sigmoid = 1 / (1 + np.exp(-a))
        hidden = a * sigmoid * b
        value = hidden @ weights["down"][e]
        out[p // k] += gate * value
        d_gates[p // k, p % k] = value @ g[p // k]
        d_hidden = weights["down"][e] @ g[p // k] * gate
        d_a, d_b = d_hidden * b * (sigmoid + a * sigmoid * (1 - sigmoid)), d_hidden * a * sigmoid
        for name, part in (
            ("gate", np.outer(row, d_a)),
            ("up", np.outer(row, d_b)),
            ("down", np.outer(hidden, gate * g[p // k])),
        ):
            d[name][e] += part
        dx[p // k] += weights["gate"][e] @ d_a + weights["up"][e] @ d_b
    return out, dx, d_gates, d


@partial(jax.jit, static_argnames=("blocks",))
def values_and_pullback(x, gates, weights, dispatch, g, blocks):
    out, pullback = jax.vjp(
        lambda x, s, w: sized_swiglu(x, s, w["gate"], w["up"], w["down"], dispatch, blocks),
        x,
        gates,
        weights,
    )
    return out, *pullback(g)


@partial(jax.jit, static_argnames=("blocks",))
def side_by_side(x, gates, weights, dispatch, blocks):
    return sized_forward(
        x,
        gates,
        (jnp.concatenate([weights["gate"], weights["up"]], axis=2),),
        weights["down"],
        dispatch,
        blocks,
    )[0]


@partial(jax.jit, static_argnames=("height", "extra"))
def batched(x, gates, weights, dispatch, height, extra):
    return batched_swiglu(
        x,
        gates,
        jnp.concatenate([weights["gate"], weights["up"]], axis=2),
        weights["down"],
        dispatch,
        height,
        extra,
    )


def loads(tokens, k, experts, edges):
    """Returns (name, rows of each expert) cases: the fullest expert fills a block exactly or
    exceeds it by one row, one expert gets everything, or no expert gets anything.
    """
    pairs, rng = tokens * k, np.random.default_rng(3)

    def fullest(size):
        rest = rng.multinomial(pairs - size, np.full(experts - 1, 1 / (experts - 1)))
        return np.concatenate([[size], rest])[rng.permutation(experts)]

    only = np.eye(experts, dtype=int) * pairs
    few = [np.ones(experts, int), np.zeros(experts, int)]
    around = [(f"fullest_{edge}", fullest(edge)) for edge in edges if edge <= pairs]
    return [*around, ("first", only[0]), ("last", only[-1]), ("one_each", few[0]), ("none", few[1])]


def problems(tokens, k, experts, edges):
    """Yields (name, (x, gates, weights), dispatch, gradient of the output, expert of each pair) for
    every load. Some pairs have no expert.
    """
    rng = np.random.default_rng(1)
    weights = {
        name: rng.standard_normal(shape)
        for name, shape in {
            "gate": (experts, 3, 4),
            "up": (experts, 3, 4),
            "down": (experts, 4, 3),
        }.items()
    }
    for name, sizes in loads(tokens, k, experts, edges):
        expert_of = np.full(tokens * k, experts)
        expert_of[: sizes.sum()] = np.repeat(np.arange(experts), sizes)
        rng.shuffle(expert_of)
        order = np.argsort(expert_of, kind="stable")
        dispatch = Dispatch(*(jnp.asarray(v, jnp.int32) for v in (order, np.argsort(order), sizes)))
        inputs = rng.standard_normal((tokens, 3)), rng.standard_normal((tokens, k)), weights
        yield name, inputs, dispatch, rng.standard_normal((tokens, 3)), expert_of


def close(actual, expected, name):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10, err_msg=name),
        actual,
        expected,
    )


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "unit", "sizes"),
    [(60, 2, 5, 2, 8), (100, 1, 6, 8, 3), (30, 2, 3, 1, 2)],
)
def test_blocks_of_all_sizes_give_the_values_and_gradients_of_the_definition(
    x64, tokens, k, experts, unit, sizes
):
    """The cases cover an expert of every number of units up to a full block, of one row more and of
    two full blocks, as well as empty experts and one expert for all rows.
    """
    blocks = Blocks(unit, sizes)
    edges = [
        *(n * unit for n in range(1, sizes + 1)),
        blocks.full + 1,
        2 * blocks.full,
        2 * blocks.full + unit,
    ]
    for name, inputs, dispatch, g, expert_of in problems(tokens, k, experts, edges):
        expected = numpy_swiglu(*inputs, expert_of, g)
        inputs = jax.tree.map(jnp.asarray, inputs)
        close(values_and_pullback(*inputs, dispatch, jnp.asarray(g), blocks), expected, name)
        close(side_by_side(*inputs, dispatch, blocks), expected[0], name)


@pytest.mark.parametrize(
    ("tokens", "k", "experts", "height", "extra"),
    [(40, 2, 8, 8, 8), (60, 2, 16, 16, 16), (20, 2, 4, 40, 8), (30, 2, 3, 1, 4)],
)
def test_batched_blocks_and_the_loop_behind_them_give_the_values_of_the_definition(
    x64, tokens, k, experts, height, extra
):
    """The cases cover full, empty and overfull blocks, and loops over zero, one and many blocks."""
    for name, inputs, dispatch, g, expert_of in problems(
        tokens, k, experts, [height, height + 1, height + extra, height + extra + 1]
    ):
        expected = numpy_swiglu(*inputs, expert_of, g)[0]
        close(batched(*jax.tree.map(jnp.asarray, inputs), dispatch, height, extra), expected, name)


@pytest.mark.parametrize("tokens", [40, 4 * MANY_ROWS])
def test_few_and_many_rows_give_the_same(monkeypatch, tokens):
    """Gate and up are in one matrix. Decoding's batched blocks run below MANY_ROWS rows an expert,
    and blocks of several sizes from there on.
    """
    rng, calls = np.random.default_rng(0), []
    for name in ("batched_swiglu", "sized_forward"):
        real = getattr(cpu, name)
        monkeypatch.setattr(
            cpu, name, lambda *args, name=name, real=real: calls.append(name) or real(*args)
        )
    weights = {"gate_up": rng.standard_normal((4, 8, 12)), "down": rng.standard_normal((4, 6, 8))}
    expert_of = rng.integers(0, 4, tokens)
    order = np.argsort(expert_of, kind="stable")
    dispatch = Dispatch(
        *(
            jnp.asarray(v, jnp.int32)
            for v in (order, np.argsort(order), np.bincount(expert_of, minlength=4))
        )
    )
    x, gates = rng.standard_normal((tokens, 8)), rng.standard_normal((tokens, 1))
    split_weights = {
        "gate": weights["gate_up"][:, :, :6],
        "up": weights["gate_up"][:, :, 6:],
        "down": weights["down"],
    }
    f32 = jax.tree.map(lambda v: jnp.asarray(v, jnp.float32), (x, gates, weights))
    expected = numpy_swiglu(x, gates, split_weights, expert_of, np.zeros((tokens, 8)))[0]
    np.testing.assert_allclose(grouped_swiglu(*f32, dispatch), expected, rtol=2e-4, atol=2e-4)
    assert calls == ["batched_swiglu" if tokens < 4 * MANY_ROWS else "sized_forward"]
