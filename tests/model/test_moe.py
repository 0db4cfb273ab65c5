"""Routing and dispatch against a dense float64 mixture of experts in numpy: values and gradients,
with every grouped matmul.
"""

from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import ConfigError, MoEConfig
from compass_jax.model.experts.build import Experts, grouped_matmul, moe_ffn
from compass_jax.model.experts.dispatch import counted_dispatch, sorted_dispatch
from compass_jax.model.experts.ragged import window_rows
from compass_jax.model.moe import (
    check_routes,
    moe_layer,
    read_routes,
    route,
    routing_dtype,
    unset_id,
)
from compass_jax.model.quantize import dequantize, quantize

CONFIG = MoEConfig(experts=5, top_k=2, ffn=7)
NO_TOKAMAX = find_spec("tokamax") is None
IMPLEMENTATIONS = [
    "padded",
    "ragged",
    pytest.param(
        "tokamax", marks=pytest.mark.skipif(NO_TOKAMAX, reason="tokamax needs Python 3.12")
    ),
]
N, D = 19, 6


@pytest.fixture(autouse=True)
def promotion(request):
    """Allows implicit type promotion for tokamax, whose code needs it (in its gradient too)."""
    parameters = getattr(request.node, "callspec", None)
    name = parameters.params.get("implementation") if parameters else None
    with jax.numpy_dtype_promotion("standard" if name == "tokamax" else "strict"):
        yield


# ---- arrays of routes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("experts", "dtype"), [(8, np.uint8), (255, np.uint8), (256, np.uint16), (300, np.uint16)]
)
def test_ids_survive_the_compact_type_and_the_largest_value_means_unset(experts, dtype):
    assert routing_dtype(experts) == dtype and unset_id(dtype) >= experts
    rows = np.array([[0, experts - 1], [unset_id(dtype)] * 2, [1, unset_id(dtype)]], dtype)
    ids, is_set = read_routes(jnp.asarray(rows), experts)
    assert ids.dtype == jnp.int32
    np.testing.assert_array_equal(ids[0], [0, experts - 1])
    np.testing.assert_array_equal(is_set, [True, False, False])
    assert ids.min() >= 0 and ids.max() < experts


GOOD = np.array([[[0, 4], [255, 255]], [[3, 1], [2, 0]]], np.uint8)  # [t l k]


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (GOOD[:, :1], r"ends in \(layers, k\) = \(1, 2\), the model has \(2, 2\)"),
        (GOOD[..., :1], r"= \(2, 1\), the model has \(2, 2\)"),
        (GOOD.astype(np.int32), "dtype int32, a model of 5 experts records uint8"),
        (
            np.where(GOOD == 4, 255, GOOD).astype(np.uint8),
            r"a partly unset row at index \(0, 0\): \[0, 255\]",
        ),
        (
            np.where(GOOD == 4, 5, GOOD).astype(np.uint8),
            r"an expert id above 4 at index \(0, 0\): \[0, 5\]",
        ),
        (
            np.where(GOOD == 3, 1, GOOD).astype(np.uint8),
            r"a repeated expert id at index \(1, 0\): \[1, 1\]",
        ),
    ],
)
def test_routes_that_are_no_routes_are_refused_on_the_host(routes, message):
    check_routes(GOOD, 5, 2, 2)
    with pytest.raises(ValueError, match=f"stored batch: .*{message}"):
        check_routes(routes, 5, 2, 2, where="stored batch")


# ---- route() -------------------------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize("norm", [True, False])
def test_gates_are_the_live_probabilities_of_the_chosen_experts(norm):
    """The rows are live, replayed as live, replayed outside the live top-k, and unset."""
    config = MoEConfig(experts=5, top_k=2, ffn=7, norm_top_k=norm)
    logits = np.array([[0.1, 2.0, -1.0, 1.5, 0.0]] * 4)
    routes = np.array([[255, 255], [3, 1], [2, 4], [255, 255]], np.uint8)
    ids, gates, stats = route(
        jnp.asarray(logits, jnp.float32), jnp.asarray(routes), jnp.ones(4, bool), config
    )
    expected_ids = np.array([[1, 3], [3, 1], [2, 4], [1, 3]])
    probs = np.take_along_axis(softmax(logits), expected_ids, axis=1)
    np.testing.assert_array_equal(ids, expected_ids)
    np.testing.assert_allclose(
        gates, probs / probs.sum(1, keepdims=True) if norm else probs, rtol=1e-6
    )
    assert (float(stats.flips), float(stats.unset), float(stats.tokens)) == (1, 2, 4)
    np.testing.assert_array_equal(stats.load, [0, 3, 1, 3, 1])
    np.testing.assert_allclose(stats.probs, softmax(logits).sum(0), rtol=1e-6)


def test_statistics_count_unmasked_tokens_alone():
    logits = np.array([[3.0, 2, 1, 0, -1], [3.0, 2, 1, 0, -1], [np.nan] * 5])
    routes = np.array([[1, 0], [3, 4], [255, 255]], np.uint8)
    mask = jnp.array([True, False, False])
    _, _, stats = route(
        jnp.asarray(logits[:2], jnp.float32), jnp.asarray(routes[:2]), mask[:2], CONFIG
    )
    # the same experts in another order do not count as a flip
    assert (float(stats.flips), float(stats.unset), float(stats.tokens)) == (0, 0, 1)
    np.testing.assert_array_equal(stats.load, [1, 1, 0, 0, 0])
    np.testing.assert_allclose(stats.probs, softmax(logits[0]), rtol=1e-6)
    _, _, stats = route(jnp.asarray(logits[:2], jnp.float32), None, mask[:2], CONFIG)
    # without routes to replay, no route counts as unset
    assert (float(stats.flips), float(stats.unset), float(stats.tokens)) == (0, 0, 1)


def test_ties_go_to_the_lower_expert_and_the_recorded_ids_are_the_used_ones():
    ids, gates, _ = route(jnp.zeros((3, 5), jnp.float32), None, jnp.ones(3, bool), CONFIG)
    np.testing.assert_array_equal(ids, [[0, 1]] * 3)
    replayed_ids, replayed_gates, stats = route(
        jnp.zeros((3, 5), jnp.float32), ids.astype(jnp.uint8), jnp.ones(3, bool), CONFIG
    )
    np.testing.assert_array_equal(replayed_ids, ids)
    np.testing.assert_array_equal(replayed_gates, gates)
    assert float(stats.flips) == 0


def test_a_bfloat16_router_input_is_decided_in_float32():
    logits = jnp.array([[1.0, 1.0078125, 0, 0, 0]], jnp.bfloat16)
    _, gates, stats = route(logits, None, jnp.ones(1, bool), CONFIG)
    assert gates.dtype == jnp.float32 and stats.probs.dtype == jnp.float32
    np.testing.assert_allclose(gates[0], softmax(np.array([1.0078125, 1.0])), rtol=1e-6)


@pytest.mark.parametrize("norm", [True, False])
def test_router_gradient_equals_finite_differences_inside_and_outside_the_live_top_k(x64, norm):
    config = MoEConfig(experts=5, top_k=2, ffn=7, norm_top_k=norm)
    rng = np.random.default_rng(1)
    logits, probe = rng.standard_normal((4, 5)), rng.standard_normal((4, 2))
    worst_two = np.argsort(logits, axis=1)[:, :2]
    routes = jnp.asarray(worst_two.astype(np.uint8))

    def f(x):
        return jnp.sum(route(x, routes, jnp.ones(4, bool), config)[1] * probe)

    grad, step = np.asarray(jax.grad(f)(jnp.asarray(logits))), 1e-6
    numeric = np.zeros_like(logits)
    for at in np.ndindex(logits.shape):
        shift = np.zeros_like(logits)
        shift[at] = step
        numeric[at] = (f(jnp.asarray(logits + shift)) - f(jnp.asarray(logits - shift))) / (2 * step)
    np.testing.assert_allclose(grad, numeric, atol=1e-9)
    assert np.abs(np.take_along_axis(grad, worst_two, axis=1)).min() > 1e-4


# ---- dispatch and grouped matmul -----------------------------------------------------------------


def dense_moe(x, ids, gates, mask, weights, limit=0.0):
    """Computes the mixture token by token and choice by choice, with biases and gpt-oss's
    activation if given.
    """
    out, bias = np.zeros_like(x), {name: weights.get(f"{name}_bias") for name in weights}
    for n in np.flatnonzero(mask):
        for e, gate in zip(ids[n], gates[n], strict=True):

            def product(row, name, e=e):
                return row @ weights[name][e] + (0 if bias[name] is None else bias[name][e])

            a, b = product(x[n], "gate"), product(x[n], "up")
            if limit:
                a, b = np.minimum(a, limit), np.clip(b, -limit, limit)
                hidden = a / (1 + np.exp(-1.702 * a)) * (b + 1)
            else:
                hidden = a / (1 + np.exp(-a)) * b
            out[n] += gate * product(hidden, "down")
    return out


def problem(kind, n=N, seed=0):
    rng = np.random.default_rng(seed)
    e, f, k = CONFIG.experts, CONFIG.ffn, CONFIG.top_k
    weights = {
        "gate": rng.standard_normal((e, D, f)),
        "up": rng.standard_normal((e, D, f)),
        "down": rng.standard_normal((e, f, D)),
    }
    if kind == "biased":
        sizes = {"gate": f, "up": f, "down": D}
        weights |= {f"{name}_bias": rng.standard_normal((e, m)) for name, m in sizes.items()}
    ids = np.argsort(rng.standard_normal((n, e)), axis=1)[:, :k]
    if kind in (
        "skewed",
        "biased",
    ):  # every token's first choice is expert 3, and expert 2 gets no token
        ids = np.stack([np.full(n, 3), rng.choice([0, 1, 4], n)], axis=1)
    mask = rng.random(n) < 0.7 if kind == "masked" else np.full(n, kind != "none")
    return rng.standard_normal((n, D)), ids, rng.random((n, k)), mask, weights


# 900 tokens for 5 experts: many blocks
CASES = [
    ("even", N),
    ("skewed", N),
    ("skewed", 40),
    ("masked", N),
    ("none", 3),
    ("even", 1),
    ("skewed", 900),
    ("biased", N),
    ("biased", 900),
]
LIMIT = {"biased": 1.5}  # gpt-oss's activation


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("kind", "n"), CASES)
def test_values_equal_a_dense_reference(x64, implementation, kind, n):
    x, ids, gates, mask, weights = problem(kind, n)
    args = (
        jnp.asarray(x),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(gates),
        jnp.asarray(mask),
        jax.tree.map(jnp.asarray, weights),
    )
    limit = LIMIT.get(kind, 0.0)
    expected = dense_moe(x, ids, gates, mask, weights, limit)
    grouped = grouped_matmul(implementation, limit=limit)
    out = jax.jit(partial(moe_ffn, grouped=grouped))(*args)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    wide = partial(jnp.concatenate, axis=-1)
    weights = args[-1] | {"gate_up": wide([args[-1]["gate"], args[-1]["up"]])}
    if "gate_bias" in weights:
        weights["gate_up_bias"] = wide([weights["gate_bias"], weights["up_bias"]])
    out = jax.jit(partial(moe_ffn, grouped=grouped))(*args[:-1], weights)  # as in decoding
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("kind", "n"), [("skewed", N), ("masked", 5), ("skewed", 900), ("biased", N), ("biased", 900)]
)
def test_gradients_equal_differences_of_the_dense_reference(x64, implementation, kind, n):
    """The pullback equals the central difference of the reference in a random direction of every
    input.
    """
    x, ids, gates, mask, weights = problem(kind, n)
    rng = np.random.default_rng(2)
    probe = rng.standard_normal(x.shape)
    limit = LIMIT.get(kind, 0.0)
    grouped = grouped_matmul(implementation, limit=limit)

    def f(x, gates, weights):
        return jnp.sum(
            moe_ffn(x, jnp.asarray(ids, jnp.int32), gates, jnp.asarray(mask), weights, grouped)
            * probe
        )

    inputs = {"x": x, "gates": gates, **weights}
    dx, dgates, dweights = jax.jit(jax.grad(f, argnums=(0, 1, 2)))(
        jnp.asarray(x), jnp.asarray(gates), jax.tree.map(jnp.asarray, weights)
    )
    grads = {"x": dx, "gates": dgates, **dweights}
    for name, value in inputs.items():
        direction, step = rng.standard_normal(value.shape), 1e-6
        ends = []
        for sign in (1, -1):
            moved = inputs | {name: value + sign * step * direction}
            moved_weights = {w: moved[w] for w in weights}
            out = dense_moe(moved["x"], ids, moved["gates"], mask, moved_weights, limit)
            ends.append(np.sum(out * probe))
        numeric = (ends[0] - ends[1]) / (2 * step)
        np.testing.assert_allclose(
            np.sum(np.asarray(grads[name]) * direction), numeric, rtol=1e-6, atol=1e-7, err_msg=name
        )
        assert abs(numeric) > 1e-2
    np.testing.assert_array_equal(np.asarray(dx)[~mask], 0)
    np.testing.assert_array_equal(np.asarray(dgates)[~mask], 0)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16_values_and_gradients_are_near_the_dense_reference(implementation):
    """The sizes are ones that a GPU's kernels accept, since those kernels do not support float64.
    Some rows are masked, one expert has no rows and one has most of them.
    """
    rng, (n, d, f, e) = np.random.default_rng(0), (300, 128, 64, 6)
    ids = np.stack([np.full(n, 3), rng.choice([0, 1, 4, 5], n)], axis=1)
    mask = rng.random(n) < 0.7
    shapes = {"gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
    exact = {name: rng.standard_normal(shape) / 8 for name, shape in shapes.items()}
    half = {name: jnp.asarray(w, jnp.bfloat16) for name, w in exact.items()}
    x, gates = jnp.asarray(rng.standard_normal((n, d)), jnp.bfloat16), rng.random((n, 2))
    probe = rng.standard_normal((n, d))
    grouped = grouped_matmul(implementation)

    def f_half(x, weights):
        out = moe_ffn(
            x, jnp.asarray(ids, jnp.int32), jnp.asarray(gates), jnp.asarray(mask), weights, grouped
        )
        return jnp.sum(out.astype(jnp.float32) * jnp.asarray(probe, jnp.float32)), out

    (_, out), grads = jax.jit(jax.value_and_grad(f_half, (0, 1), has_aux=True))(x, half)
    wide = {name: np.asarray(w, np.float64) for name, w in half.items()}
    x = np.asarray(x, np.float64)
    expected = dense_moe(x, ids, gates, mask, wide)
    assert np.abs(np.asarray(out, np.float64) - expected).max() < 0.02 * np.abs(expected).max()
    assert expected[mask].std() > 0.5 and not np.asarray(out)[~mask].any()
    # finite differences for one entry of each weight, of the fullest expert, and of a token
    for name, grad in {"x": grads[0], **grads[1]}.items():
        at, step = ((int(np.flatnonzero(mask)[0]), 5) if name == "x" else (3, 7, 11)), 1e-5
        ends = []
        for sign in (1, -1):
            moved = {"x": x.copy(), **{k: w.copy() for k, w in wide.items()}}
            moved[name][at] += sign * step
            ends.append(np.sum(dense_moe(moved.pop("x"), ids, gates, mask, moved) * probe))
        numeric, largest = (ends[0] - ends[1]) / (2 * step), np.abs(np.asarray(grad)).max()
        assert abs(float(grad[at]) - numeric) < 0.02 * float(largest), (name, grad[at], numeric)
    assert not np.asarray(grads[1]["down"])[2].any()


@pytest.mark.parametrize("eight_bit", [False, True])
@pytest.mark.parametrize("share", [0.125, 0.9], ids=["a part's share", "nearly all"])
def test_a_token_step_computes_windows_of_its_pairs(share, eight_bit):
    """Experts have as few rows as in decoding, and the device has one of eight parts. A window then
    holds a quarter of the pairs, and the pairs that do not fit are computed in further windows.
    """
    rng, (n, k, d, f, e, parts) = np.random.default_rng(0), (256, 8, 16, 8, 4, 8)
    pairs = n * k
    assert window_rows(pairs, e, parts) == pairs // 4
    local = rng.random((n, k)) < share
    ids = np.where(local, rng.integers(0, e, (n, k)), e)
    shapes = {"gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
    weights = {name: jnp.asarray(rng.standard_normal(x), jnp.float32) for name, x in shapes.items()}
    if eight_bit:
        weights = {name: quantize(w, "int8") for name, w in weights.items()}
    x, gates, mask = rng.standard_normal((n, d)), rng.random((n, k)), rng.random(n) < 0.8
    out = jax.jit(partial(moe_ffn, grouped=grouped_matmul("ragged", parts)))(
        jnp.asarray(x, jnp.float32),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(gates, jnp.float32),
        jnp.asarray(mask),
        weights,
    )
    values = {
        name: np.asarray(dequantize(w, "float32") if eight_bit else w, np.float64)
        for name, w in weights.items()
    }
    empty = {name: np.concatenate([w, np.zeros_like(w[:1])]) for name, w in values.items()}
    expected = dense_moe(x, ids, gates, mask, empty)
    assert (np.sum(ids[mask] < e) > window_rows(pairs, e, parts)) == (share > 0.5)
    np.testing.assert_allclose(out, expected, atol=2e-5 * np.abs(expected).max())
    assert expected[mask].std() > 0.5


@pytest.mark.skipif(not NO_TOKAMAX, reason="tokamax is installed")
def test_tokamax_that_is_not_installed_is_told():
    with pytest.raises(ConfigError, match=r"compute.experts = 'tokamax': No module.*tokamax"):
        grouped_matmul("tokamax")


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_garbage_in_masked_tokens_reaches_nobody(implementation):
    """NaN in masked rows changes no bit of the other rows' values or of any weight's gradient."""
    x, ids, gates, mask, weights = problem("masked")
    weights = jax.tree.map(lambda w: jnp.asarray(w, jnp.float32), weights)
    grouped = grouped_matmul(implementation)

    @jax.jit
    def run(x, gates):
        def loss(x, weights):
            out = moe_ffn(
                x, jnp.asarray(ids, jnp.int32), gates, jnp.asarray(mask), weights, grouped
            )
            return jnp.sum(jnp.where(mask[:, None], out, 0) ** 2), out

        (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
        return out, grads

    clean = run(jnp.asarray(x, jnp.float32), jnp.asarray(gates, jnp.float32))
    dirty = run(
        jnp.asarray(np.where(mask[:, None], x, np.nan), jnp.float32),
        jnp.asarray(gates, jnp.float32),
    )
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert (
        np.isfinite(clean[0]).all()
        and not np.asarray(clean[0])[~mask].any()
        and np.abs(np.asarray(clean[0])[mask]).min() > 0
    )


@pytest.mark.parametrize(("pairs", "experts"), [(1, 2), (256, 3), (257, 4), (2000, 16)])
def test_counting_puts_pairs_where_sorting_does(pairs, experts):
    """The order is stable, with the pairs of no expert (id `experts`) after all others, also where
    one expert gets every pair.
    """
    for draw in (
        np.random.default_rng(pairs).integers(0, experts + 1, pairs),
        np.full(pairs, experts - 1),
    ):
        expert = jnp.asarray(draw, jnp.int32)
        sorted_, counted = sorted_dispatch(expert, experts), counted_dispatch(expert, experts)
        for a, b in zip(sorted_, counted, strict=True):
            np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(sorted_.order, np.argsort(draw, kind="stable"))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("chunk", [5, *(pytest.param(x, marks=pytest.mark.slow) for x in (4, 16))])
def test_tokens_may_go_through_the_experts_in_chunks(x64, implementation, chunk):
    """compute.moe_chunk changes how many tokens are computed at once, but neither outputs nor
    gradients. There are 15 tokens, so that chunks of 4 leave a remainder.
    """
    rng = np.random.default_rng(0)
    config = MoEConfig(experts=4, top_k=2, ffn=6)
    x = jnp.asarray(rng.standard_normal((3, 5, 8)))
    shapes = {"router": (8, 4), "gate": (4, 8, 6), "up": (4, 8, 6), "down": (4, 6, 8)}
    params = {name: jnp.asarray(rng.standard_normal(shape)) for name, shape in shapes.items()}
    mask = jnp.asarray(rng.random((3, 5)) < 0.8)

    def run(x, params, chunk):
        experts = Experts(grouped_matmul(implementation), chunk)
        out, ids, _ = moe_layer(x, x, params, None, mask, config, experts)
        return jnp.sum(jnp.sin(out)), (out, ids)

    run_with_gradients = jax.jit(
        jax.value_and_grad(run, argnums=(0, 1), has_aux=True), static_argnums=2
    )
    (_, (out, ids)), grads = run_with_gradients(x, params, chunk)
    (_, (unchunked, unchunked_ids)), unchunked_grads = run_with_gradients(x, params, 0)
    np.testing.assert_array_equal(ids, unchunked_ids)
    np.testing.assert_allclose(out, unchunked, atol=1e-12)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(unchunked_grads), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12, rtol=1e-10)
