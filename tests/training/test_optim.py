"""AdamW, clipping and schedules against float64 numpy; a bad gradient changes the counters
alone.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import OptimConfig
from compass_jax.training import optim, step

CONFIG = OptimConfig(
    learning_rate=0.02,
    warmup_steps=2,
    schedule="cosine",
    b1=0.8,
    b2=0.9,
    eps=1e-6,
    weight_decay=0.3,
    clip_grad_norm=1.5,
)
TOTAL = 6
# in the tree's order: embed, final_norm, attention_norm, q, q_bias, router
DECAYS = (True, False, False, True, False, True)


def tree(seed, scale=1.0):
    rng = np.random.default_rng(seed)
    shapes = {
        "embed": (3, 2),
        "final_norm": (2,),
        "run_0": {"q": (2, 4), "q_bias": (4,), "attention_norm": (5, 2), "router": (2, 3)},
    }
    return jax.tree.map(
        lambda s: scale * rng.standard_normal(s), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def numpy_rate(config, n, total):
    """Returns the learning rate of update n (0-based)."""
    if n < config.warmup_steps:
        return config.learning_rate * (n + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return config.learning_rate
    return (
        config.learning_rate
        * 0.5
        * (1 + np.cos(np.pi * min(1.0, (n - config.warmup_steps) / (total - config.warmup_steps))))
    )


def numpy_adamw(params, gradients, config, total, factors=(1,) * TOTAL):
    """Returns the parameters after updates by AdamW (arXiv 1711.05101, algorithm 2), with weight
    decay on everything but norms and biases, after global-norm clipping. `factors` multiply the
    rates. A gradient of 0 moves the schedule alone.
    """
    flat, structure = jax.tree.flatten(params)
    m, v, applied = [np.zeros_like(x) for x in flat], [np.zeros_like(x) for x in flat], 0
    for n, gradient in enumerate(gradients):
        g = jax.tree.leaves(gradient)
        norm = np.sqrt(sum(np.sum(x**2) for x in g))
        if norm == 0:
            continue
        applied += 1
        g = [x * min(1.0, config.clip_grad_norm / norm) for x in g]
        rate = factors[n] * numpy_rate(config, n, total)
        for i, x in enumerate(g):
            m[i] = config.b1 * m[i] + (1 - config.b1) * x
            v[i] = config.b2 * v[i] + (1 - config.b2) * x**2
            update = (m[i] / (1 - config.b1**applied)) / (
                np.sqrt(v[i] / (1 - config.b2**applied)) + config.eps
            )
            flat[i] = flat[i] - rate * (update + config.weight_decay * flat[i] * DECAYS[i])
    return structure.unflatten(flat)


def test_updates_equal_a_numpy_adamw_with_clipping_and_schedule(x64):
    """Six updates; the gradients' norms are below and above the limit."""
    gradients = [tree(10 + n, 0.1 if n % 2 else 2.0) for n in range(TOTAL)]
    state, rates = optim.init_state(jax.tree.map(jnp.asarray, tree(0)), CONFIG, TOTAL), []
    for gradient in gradients:
        norm = np.sqrt(sum(np.sum(x**2) for x in jax.tree.leaves(gradient)))
        state, info = step.apply(
            state,
            jax.tree.map(jnp.asarray, gradient),
            config=CONFIG,
            total_steps=TOTAL,
            decays=DECAYS,
        )
        np.testing.assert_allclose(info["grad_norm"], norm, rtol=1e-12)
        rates.append(float(info["lr"]))
    assert list(jax.tree_util.tree_leaves_with_path(tree(0)))[2][0][-1].key == "attention_norm"
    np.testing.assert_allclose(
        rates, [numpy_rate(CONFIG, n, TOTAL) for n in range(TOTAL)], rtol=1e-6
    )
    assert (
        rates[0] == pytest.approx(0.02 / 3)
        and max(rates) == pytest.approx(0.02)
        and (int(state.step), int(state.skipped)) == (6, 0)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8),
        state.params,
        numpy_adamw(tree(0), gradients, CONFIG, TOTAL),
    )
    assert np.abs(np.asarray(state.params["embed"]) - tree(0)["embed"]).max() > 0.02


def test_a_factor_of_the_rate_is_an_array(x64):
    """The updates are AdamW's with rates times the factors, of one compiled program."""
    factors, compiled = [1.0, 0.5, 0.0, 2.0, 1.0, 0.25], step.apply._cache_size()
    gradients = [tree(10 + n, 2.0) for n in range(TOTAL)]
    state, rates = optim.init_state(jax.tree.map(jnp.asarray, tree(0)), CONFIG, TOTAL), []
    for factor, gradient in zip(factors, gradients, strict=True):
        arrays = jax.tree.map(jnp.asarray, gradient)
        options = dict(config=CONFIG, total_steps=TOTAL, decays=DECAYS)
        state, info = step.apply(state, arrays, factor=jnp.float32(factor), **options)
        rates.append(float(info["lr"]) / numpy_rate(CONFIG, len(rates), TOTAL))
    assert step.apply._cache_size() == compiled + 1
    np.testing.assert_allclose(rates, factors, rtol=1e-6)
    expected = numpy_adamw(tree(0), gradients, CONFIG, TOTAL, factors)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


def numbers_of(state):
    """Returns (applied, consecutive bad, all bad) updates."""
    return int(state.step), int(state.bad_steps), int(state.skipped)


def test_a_gradient_of_zero_moves_the_schedule_alone(x64):
    """The first update, one with momentum from before, and the last have a gradient of 0. The
    others are AdamW's with the rates of their places, and nothing is compiled again.
    """
    gradients = [tree(10 + n, 2.0 * (n not in (0, 3, 5))) for n in range(TOTAL)]
    state, rates = optim.init_state(jax.tree.map(jnp.asarray, tree(0)), CONFIG, TOTAL), []
    options, compiled = dict(config=CONFIG, total_steps=TOTAL, decays=DECAYS), set()
    for n, gradient in enumerate(gradients):
        before = jax.device_get((state.params, state.step))
        state, info = step.apply(state, jax.tree.map(jnp.asarray, gradient), **options)
        compiled.add(step.apply._cache_size())
        rates.append(float(info["lr"]))
        assert bool(info["zero_gradient_updates"]) == (n in (0, 3, 5))
        if info["zero_gradient_updates"]:
            jax.tree.map(np.testing.assert_array_equal, (state.params, state.step), before)
    expected = numpy_adamw(tree(0), gradients, CONFIG, TOTAL)
    for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)
    places = [numpy_rate(CONFIG, n, TOTAL) for n in range(TOTAL)]
    np.testing.assert_allclose(rates, places, rtol=1e-6)
    assert numbers_of(state) == (3, 0, 0) and len(compiled) == 1


def test_a_gradient_of_zero_ends_a_row_of_bad_ones_and_is_none():
    floats = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree(0))
    state, options = optim.init_state(floats, CONFIG, TOTAL), {"config": CONFIG, "decays": DECAYS}
    numbers = []
    for value in (jnp.nan, 0.0, 1.0, 0.0):
        gradient = jax.tree.map(lambda x, value=value: jnp.full_like(x, value), floats)
        before = jax.device_get(state)
        state, _ = step.apply(state, gradient, total_steps=TOTAL, **options)
        numbers.append(numbers_of(state))
        if value == 0:  # neither master nor moments
            moments, master = state.opt_state
            jax.tree.map(np.testing.assert_array_equal, master, before.opt_state.master)
            np.testing.assert_array_equal(moments[0].count, before.opt_state.moments[0].count)
            jax.tree.map(np.testing.assert_array_equal, moments[0], before.opt_state.moments[0])
    assert numbers == [(0, 1, 1), (0, 0, 1), (1, 0, 1), (1, 0, 1)]


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("warmup", [0, 3])
def test_learning_rates(schedule, warmup):
    config = OptimConfig(learning_rate=0.5, warmup_steps=warmup, schedule=schedule)
    with jax.numpy_dtype_promotion("standard"):
        rates = [float(optim.learning_rate(config, 10)(n)) for n in range(12)]
    np.testing.assert_allclose(rates, [numpy_rate(config, n, 10) for n in range(12)], atol=1e-7)
    assert rates[warmup] == 0.5 and (
        rates[10] == 0.5 if schedule == "constant" else rates[10] < 1e-7
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_bad_gradient_changes_nothing_but_the_counters(bad):
    def floats(seed):
        return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree(seed))

    def apply(state, gradient):
        return step.apply(state, gradient, config=CONFIG, total_steps=TOTAL, decays=DECAYS)

    state = apply(apply(optim.init_state(floats(0), CONFIG, TOTAL), floats(1))[0], floats(2))[0]
    before = jax.device_get(state)
    poisoned = floats(3)
    poisoned["run_0"]["q"] = poisoned["run_0"]["q"].at[1, 2].set(bad)
    for n in (1, 2):
        state, info = apply(state, jax.tree.map(jnp.copy, poisoned))
        assert not np.isfinite(info["grad_norm"]) and (
            int(state.step),
            int(state.bad_steps),
            int(state.skipped),
        ) == (2, n, n)
    jax.tree.map(
        np.testing.assert_array_equal,
        jax.device_get((state.params, state.opt_state)),
        (before.params, before.opt_state),
    )
    good, info = apply(state, floats(4))
    assert (int(good.step), int(good.bad_steps), int(good.skipped)) == (3, 0, 2) and np.isfinite(
        info["grad_norm"]
    )
    expected, _ = apply(jax.device_put(before), floats(4))
    # the bad gradients have had no effect
    jax.tree.map(np.testing.assert_array_equal, good.params, expected.params)


def test_the_state_is_a_copy_that_updates_may_consume():
    params = {"embed": jnp.ones((2, 2))}
    state = optim.init_state(params, CONFIG, TOTAL)
    ones = {"embed": jnp.ones((2, 2))}
    step.apply(state, ones, config=CONFIG, total_steps=TOTAL, decays=(True,))
    np.testing.assert_array_equal(params["embed"], np.ones((2, 2)))


SLOW = OptimConfig(learning_rate=1e-4, weight_decay=0.1)


def halved(tree):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), tree)


def test_bfloat16_parameters_with_a_master_go_where_float32_ones_go():
    """40 updates of 1e-4: each is less than bfloat16 can add to a weight near 1. The master is a
    float32 run's parameters, to the bit.
    """
    start, gradients = halved(tree(0)), [halved(tree(10 + n)) for n in range(40)]
    states = {
        "float32": optim.init_state(optim.widen(start), SLOW, 40),
        "master": optim.init_state(start, SLOW, 40),
        "none": optim.init_state(start, dataclasses.replace(SLOW, float32_master=False), 40),
    }
    for gradient in gradients:
        for name, config in (
            ("float32", SLOW),
            ("master", SLOW),
            ("none", dataclasses.replace(SLOW, float32_master=False)),
        ):
            states[name], _ = step.apply(
                states[name], gradient, config=config, total_steps=40, decays=DECAYS
            )
    wide, state = states["float32"], states["master"]
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.master, wide.params)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state.moments, wide.opt_state)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(jnp.bfloat16)),
        state.params,
        wide.params,
    )
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("bfloat16")}
    lost = [
        np.abs(np.asarray(a, np.float32) - b).max()
        for a, b in zip(*map(jax.tree.leaves, (states["none"].params, wide.params)), strict=True)
    ]
    assert max(lost) > 1e-3  # without a master, weights near 1 do not move


def test_a_bad_gradient_leaves_the_master_as_it_is():
    state = optim.init_state(halved(tree(0)), SLOW, 4)
    before = jax.tree.map(np.array, state)
    bad = halved(tree(1))
    bad["embed"] = bad["embed"].at[0, 0].set(jnp.nan)
    after, _ = step.apply(state, bad, config=SLOW, total_steps=4, decays=DECAYS)
    jax.tree.map(
        np.testing.assert_array_equal,
        (after.params, after.opt_state),
        (before.params, before.opt_state),
    )
    assert int(after.skipped) == 1


def test_gradients_of_bfloat16_parameters_are_summed_in_float32():
    """1 + 256 times 2^-8: in bfloat16 every addition would be lost."""
    one, small = {"w": jnp.ones((2,), jnp.bfloat16)}, {"w": jnp.full((2,), 2.0**-8, jnp.bfloat16)}
    total = step.add(None, one)
    for _ in range(256):
        total = step.add(total, small)
    assert total["w"].dtype == jnp.float32 and total["w"].tolist() == [2.0, 2.0]
