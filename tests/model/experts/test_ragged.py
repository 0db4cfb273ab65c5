"""Experts on a device's local rows: windows give the values and gradients of all rows at once, at
any load, and compute no more windows than the rows need.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import MeshConfig, MoEConfig
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model.experts.build import Experts, grouped_matmul
from compass_jax.model.experts.dispatch import counted_dispatch
from compass_jax.model.experts.ragged import ragged_swiglu, window_rows, windowed_swiglu
from compass_jax.model.moe import moe_layer
from compass_jax.model.params import ParamSpec
from compass_jax.model.quantize import dequantize, quantize

E, N, D, F, K = 3, 20, 6, 7, 2
# expert of each pair; E marks an expert on another device
LOADS = {
    "a third": lambda rng: rng.integers(0, 3 * E, (N, K)).clip(max=E),
    "all": lambda rng: rng.integers(0, E, (N, K)),
    "all to one expert": lambda rng: np.full((N, K), 1),
    "none": lambda rng: np.full((N, K), E),
}


def problem(load, biased=False, seed=0):
    """Returns tokens (NaN where no pair is dispatched), gates, weights, and the expert of each
    pair.
    """
    rng = np.random.default_rng(seed)
    shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    if biased:
        shapes |= {"gate_bias": (E, F), "up_bias": (E, F), "down_bias": (E, D)}
    weights = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    ids = LOADS[load](rng)
    x = np.where((ids < E).any(1, keepdims=True), rng.standard_normal((N, D)), np.nan)
    return x, rng.random((N, K)), weights, ids


def dense(x, gates, weights, ids, limit):
    """Computes the output pair by pair in float64."""
    out = np.zeros_like(x)
    for n, k in np.argwhere(ids < E):
        e = ids[n, k]

        def product(row, name, e=e):
            return row @ weights[name][e] + weights.get(f"{name}_bias", np.zeros(E))[e]

        a, u = product(x[n], "gate"), product(x[n], "up")
        if limit:
            a, u = np.minimum(a, limit), np.clip(u, -limit, limit)
            hidden = a / (1 + np.exp(-1.702 * a)) * (u + 1)
        else:
            hidden = a / (1 + np.exp(-a)) * u
        out[n] += gates[n, k] * product(hidden, "down")
    return out


@jax.custom_vjp
def undefined_after(x, w, sizes):
    """Computes `ragged_dot` with NaN in the rows that it leaves undefined, also in the gradient."""
    return _nan_after(jax.lax.ragged_dot(x, w, sizes), sizes)


def _nan_after(x, sizes):
    return jnp.where((jnp.arange(x.shape[0]) < jnp.sum(sizes))[:, None], x, jnp.nan)


def _undefined_after_backward(saved, g):
    x, w, sizes = saved
    d_x, d_w = jax.vjp(lambda x, w: jax.lax.ragged_dot(x, w, sizes), x, w)[1](g)
    return _nan_after(d_x, sizes), d_w, None


undefined_after.defvjp(
    lambda x, w, sizes: (undefined_after(x, w, sizes), (x, w, sizes)), _undefined_after_backward
)


def undefined_dot(x, w, sizes, preferred_element_type=None):
    assert preferred_element_type in (None, x.dtype)
    return undefined_after(x, w, sizes)


@pytest.mark.parametrize("window", [7, 16, 39])
@pytest.mark.parametrize("limit", [0.0, 1.5])
def test_windows_have_the_values_and_gradients_of_all_rows(x64, window, limit):
    """A limit of 1.5 selects gpt-oss's activation, with biases. The expected gradients are those of
    `ragged_swiglu`, which tests/model/test_moe.py compares with finite differences.
    """
    probe = np.random.default_rng(1).standard_normal((N, D))

    def windowed(x, gates, weights, dispatch):
        return windowed_swiglu(x, gates, weights, dispatch, window, limit, undefined_dot)

    def all_rows(x, gates, weights, dispatch):
        return ragged_swiglu(jnp.nan_to_num(x), gates, weights, dispatch, limit=limit)

    def with_gradients(swiglu):
        def loss(x, gates, weights, dispatch):
            out = swiglu(x, gates, weights, dispatch)
            return jnp.sum(out * probe), out

        return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))

    gradient_functions, decoded = (
        [with_gradients(f) for f in (windowed, all_rows)],
        jax.jit(windowed),
    )
    close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-12)
    for load in LOADS:
        x, gates, weights, ids = problem(load, biased=bool(limit))
        expected = dense(x, gates, weights, ids, limit)
        dispatch = counted_dispatch(jnp.asarray(ids.reshape(-1), jnp.int32), E)
        inputs = jax.tree.map(jnp.asarray, (x, gates, weights))
        (grads, out), (expected_grads, _) = (f(*inputs, dispatch) for f in gradient_functions)
        close(out, expected, err_msg=load)
        jax.tree.map(partial(close, err_msg=load), grads, expected_grads)
        out = decoded(*inputs[:2], with_gate_up(inputs[2]), dispatch)
        close(out, expected, err_msg=load)


def with_gate_up(weights):
    """Returns weights with gate and up in one matrix, as decoding stores them."""
    wide = {"down": weights["down"]}
    for end in ("", "_bias") if "down_bias" in weights else ("",):
        wide[f"gate_up{end}"] = jnp.concatenate([weights[f"gate{end}"], weights[f"up{end}"]], -1)
        wide[f"down{end}"] = weights[f"down{end}"]
    return wide


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_windows_take_8_bit_weights(kind):
    x, gates, weights, ids = problem("all")
    dispatch = counted_dispatch(jnp.asarray(ids.reshape(-1), jnp.int32), E)
    low = {name: quantize(jnp.asarray(w), kind) for name, w in weights.items()}
    exact = {name: np.asarray(dequantize(w, "float32"), np.float64) for name, w in low.items()}
    x, gates32 = jnp.asarray(x, jnp.float32), jnp.asarray(gates, jnp.float32)
    out = windowed_swiglu(x, gates32, low, dispatch, 16, 0.0, jax.lax.ragged_dot)
    np.testing.assert_allclose(
        out, dense(np.asarray(x, np.float64), gates, exact, ids, 0.0), rtol=2e-5, atol=2e-5
    )


def test_bfloat16_sums_over_windows_in_float32():
    """There are 2,048 equal rows of one expert in 32 windows, and the gradient of `down` is 2,048
    times a row's. A bfloat16 accumulator would stop growing before that.
    """
    n = 2048
    ones = partial(jnp.ones, dtype=jnp.bfloat16)
    weights = {"gate": ones((1, 1, 1)), "up": ones((1, 1, 1)), "down": ones((1, 1, 1))}
    dispatch = counted_dispatch(jnp.zeros(n, jnp.int32), 1)

    def total(weights, x):
        dot = jax.lax.ragged_dot
        return jnp.sum(windowed_swiglu(x, ones((n, 1)), weights, dispatch, 64, 0.0, dot))

    d_weights, d_x = jax.grad(total, (0, 1))(weights, ones((n, 1)))
    assert float(d_weights["down"][0, 0, 0]) == pytest.approx(n * 0.7311, rel=0.01)
    assert d_x.dtype == jnp.bfloat16 and d_weights["gate"].dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("pairs", "experts", "parts", "rows"),
    [
        (131_072, 16, 8, 32_768),  # twice the mean
        (131_072, 64, 2, 98_304),  # three quarters
        (30_000, 16, 8, 7680),  # a multiple of 256
        (4096, 16, 8, 1024),  # decoding
        (1024, 16, 8, 1024),  # few rows of each expert
        (131_072, 128, 1, 131_072),
    ],
)
def test_a_window_is_twice_the_mean_load(pairs, experts, parts, rows):
    assert window_rows(pairs, experts, parts) == rows


@pytest.mark.parametrize(("load", "windows"), [(0, 1), (7, 1), (8, 1), (9, 2), (40, 5)])
def test_as_many_windows_are_computed_as_there_are_rows(load, windows):
    x, gates, weights, _ = problem("all")
    ids = np.where(np.arange(N * K) < load, 0, E)
    dispatch = counted_dispatch(jnp.asarray(ids, jnp.int32), E)
    calls = []

    def counting(x, w, sizes, **options):
        assert x.shape[0] == 8
        jax.debug.callback(lambda s: calls.append(int(s.sum())), sizes)
        return jax.lax.ragged_dot(x, w, sizes, **options)

    x, gates, weights = jax.tree.map(lambda y: jnp.asarray(y, jnp.float32), (x, gates, weights))
    windowed_swiglu(x, gates, weights, dispatch, 8, 0.0, counting).block_until_ready()
    jax.effects_barrier()
    assert len(calls) == 3 * windows and sum(calls) == 3 * load


EXPERTS, HIDDEN = 16, 4
SPECS = {
    "router": ParamSpec("router", (HIDDEN, EXPERTS), (None, None)),
    "gate": ParamSpec("gate", (EXPERTS, HIDDEN, 3), ("expert", None, None)),
    "up": ParamSpec("up", (EXPERTS, HIDDEN, 3), ("expert", None, None)),
    "down": ParamSpec("down", (EXPERTS, 3, HIDDEN), ("expert", None, None)),
}


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize("exchange", ["gather", "all_to_all"])
@pytest.mark.parametrize("mesh", [MeshConfig(expert=8), MeshConfig(fsdp=2, expert=4)], ids=str)
def test_experts_of_several_devices_equal_those_of_one(x64, monkeypatch, mesh, exchange, skewed):
    """A window holds twice the mean number of rows. In the skewed case both choices of every token
    belong to the first device, so that it computes p / 2 windows and the other devices have no
    rows.
    """
    rng, config = np.random.default_rng(0), MoEConfig(experts=EXPERTS, top_k=2, ffn=3)
    params = {name: jnp.asarray(rng.standard_normal(s.shape)) for name, s in SPECS.items()}
    x = jnp.asarray(rng.standard_normal((16, 128, HIDDEN)))
    ids = np.argsort(rng.standard_normal((*x.shape[:2], 2 if skewed else EXPERTS)), axis=-1)
    routes = jnp.asarray(ids[..., :2], jnp.uint8)
    pairs = 2 * x.shape[0] * x.shape[1] // mesh.fsdp
    rows, ragged_dot = set(), jax.lax.ragged_dot

    def recording(x, w, sizes, **options):
        rows.add(x.shape[0])
        return ragged_dot(x, w, sizes, **options)

    def run(experts):
        def loss(x, params):
            out, used, _ = moe_layer(
                x, x, params, routes, jnp.ones(x.shape[:2], bool), config, experts
            )
            return jnp.sum(jnp.sin(out)), (out, used)

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))(x, params)

    grads, (expected, _) = run(Experts(grouped_matmul("ragged")))
    placement = Placement(make_mesh(mesh))
    monkeypatch.setattr(jax.lax, "ragged_dot", recording)
    many, (out, used) = run(
        Experts(grouped_matmul("ragged", mesh.expert), 0, SPECS, placement, exchange)
    )
    assert rows == {2 * pairs // mesh.expert}
    np.testing.assert_array_equal(used, routes)
    np.testing.assert_allclose(out, expected, rtol=1e-12, atol=1e-12)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-11, atol=1e-11), many, grads)
