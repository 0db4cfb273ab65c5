"""Faults that router replay has had in other systems: routes of another shape, routes that lose
their layer or token, ids that differ under ties, and rows without an expert.

The engine's tests check that each input token has a route, test_moe.py that padding and repeated
ids are refused, test_transformer.py that each route reaches its layer.
"""

import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.config import ComputeConfig, MoEConfig
from compass_jax.model.attention import LayerCache, _attend
from compass_jax.model.experts.build import grouped_matmul, moe_ffn
from compass_jax.model.moe import route
from compass_jax.model.params import param_specs
from compass_jax.model.transformer import Transformer, apply

sys.path.insert(0, str(Path(__file__).parent))
from test_transformer import (
    CONFIG,
    MASK,
    POSITIONS,
    SPREAD,
    TOKENS,
    forward,
    random_params,
    random_routing,
)

UNROLLED = ComputeConfig(scan_layers=False)
LITTLE = dataclasses.replace(CONFIG, layers=2)  # dense, MoE


WRONG = {
    "one layer too many": lambda r: r[:, :, [0, 0]],
    "no layer": lambda r: r[:, :, :0],
    "one choice": lambda r: r[..., :1],
    "a token short": lambda r: r[:, :-1],
    "two bytes": lambda r: r.astype(np.uint16),
}


@pytest.mark.parametrize("change", WRONG)
def test_routes_of_another_number_of_layers_choices_or_type_are_refused(change, unchecked):
    """Fault 2: layers are sliced out of the array by number, so that an extra layer would go unread
    and a missing one would repeat another.
    """
    wrong = WRONG[change](random_routing(LITTLE))
    with pytest.raises(
        ValueError,
        match=r"routes are uint\d+\[.*\], tokens \[2, 7\] of this model take uint8\[2, 7, 1, 2\]",
    ):
        jax.eval_shape(lambda: _apply(LITTLE, wrong))


def test_routes_for_a_dense_model_are_refused():
    dense = dataclasses.replace(CONFIG, family="qwen3", moe=None, layers=1)
    with pytest.raises(ValueError, match="has no MoE layers: routes must be None"):
        jax.eval_shape(lambda: _apply(dense, random_routing(LITTLE)))


def _apply(config, routes):
    arrays = jnp.asarray(TOKENS), jnp.asarray(POSITIONS)
    return apply(
        Transformer(config, UNROLLED),
        random_params(config),
        *arrays,
        mask=jnp.asarray(MASK),
        routes=jnp.asarray(routes),
    ).hidden


def test_a_route_keeps_its_layer_and_token_in_whatever_order_the_layers_were_built():
    """Fault 3: whether layers are scanned in runs, unrolled, or separate as in the engine, index l
    is the l-th MoE layer of the model.
    """
    params, routes = random_params(SPREAD), random_routing(SPREAD, seed=2)
    assert all(np.any(routes[:, :, i] != routes[:, :, j]) for i, j in ((0, 1), (1, 2), (0, 2)))
    expected = np.where(MASK[..., None, None], routes, 255)
    layouts = ((ComputeConfig(), "stacked"), (UNROLLED, "unrolled"), (UNROLLED, "decode"))
    scanned, unrolled, loose = (
        forward(params, SPREAD, compute, routes, layout=layout) for compute, layout in layouts
    )
    for out in (scanned, unrolled, loose):
        np.testing.assert_array_equal(out.routes, expected)
        np.testing.assert_allclose(
            np.asarray(out.hidden)[MASK], np.asarray(scanned.hidden)[MASK], atol=1e-5
        )


def test_a_router_has_one_matrix_and_no_bias():
    """Fault 11: the router has no state that could leak into the weights. A parameter added to the
    router fails this test.
    """
    run = param_specs(CONFIG)["run_0"]
    assert set(run["layer_1"]["mlp"]) == {"router", "gate", "up", "down"}


@pytest.mark.usefixtures("optimised_alike")
def test_the_ids_recorded_under_ties_are_the_ids_used():
    """Fault 12: a router of zeros ties all experts. The record counts the dispatched ids, and
    replaying it changes no bit.
    """
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: x * 0 if "router" in jax.tree_util.keystr(path) else x,
        random_params(LITTLE),
    )
    live = forward(params, LITTLE, UNROLLED)
    ids = np.asarray(live.routes)[MASK].reshape(-1)
    np.testing.assert_array_equal(np.bincount(ids, minlength=5), live.aux.load[0])
    replayed = forward(params, LITTLE, UNROLLED, live.routes)
    np.testing.assert_array_equal(replayed.hidden, live.hidden)
    assert not np.any(replayed.aux.flips)


def test_a_row_that_sees_nothing_is_no_nan():
    """Fault 13: a padding row may see no key at all. Its output is discarded, but a NaN in it would
    reach every gradient.
    """
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal(s), jnp.float32)
        for s in ((1, 1, 2, 3, 4), (1, 1, 3, 4), (1, 1, 3, 4))
    )
    visible = jnp.asarray([[[True, False, False], [False] * 3, [True] * 3]])

    def total(q):
        out = _attend(q, LayerCache(k, v), visible)
        return jnp.sum(
            jnp.where(jnp.array([True, False, True])[None, None, None, :, None], out, 0.0)
        ), out

    grad, out = jax.grad(total, has_aux=True)(q)
    assert (
        np.isfinite(out).all()
        and np.isfinite(grad).all()
        and np.abs(np.asarray(grad)[:, :, :, 2]).max() > 0
    )
    np.testing.assert_allclose(out[0, 0, :, 0], np.broadcast_to(v[0, 0, 0], (2, 4)), rtol=1e-6)


@pytest.mark.parametrize("norm", [True, False])
def test_gates_of_extreme_logits_are_finite(norm):
    """Fault 13: replayed experts whose live probability underflows to 0 are normalised over the
    chosen experts only, never 0/0.
    """
    logits = jnp.array([[300.0, -300.0, -300.5, 0.0, 0.0]])
    _, gates, _ = route(
        logits,
        jnp.array([[1, 2]], jnp.uint8),
        jnp.ones(1, bool),
        MoEConfig(5, 2, 7, norm_top_k=norm),
    )
    expected = np.array([1.0, np.exp(-0.5)]) / (1 + np.exp(-0.5)) if norm else [0.0, 0.0]
    np.testing.assert_allclose(gates[0], expected, rtol=1e-6)


def test_undefined_rows_behind_the_last_group_reach_nobody(monkeypatch):
    """Fault 14: after the last group of a ragged product, a TPU leaves rows with undefined memory.
    They are NaN here.
    """
    real, seen = jax.lax.ragged_dot, []

    def undefined_behind(x, w, sizes, **options):
        is_undefined = jnp.arange(x.shape[0])[:, None] >= jnp.sum(sizes)
        seen.append(x.shape[0] - int(sizes.sum()))
        return jnp.where(is_undefined, jnp.nan, real(x, w, sizes, **options))

    rng = np.random.default_rng(0)
    x, ids = (
        jnp.asarray(rng.standard_normal((6, 4)), jnp.float32),
        jnp.asarray([[0, 1]] * 6, jnp.int32),
    )
    weights = {
        n: jnp.asarray(rng.standard_normal(s), jnp.float32)
        for n, s in {"gate": (3, 4, 5), "up": (3, 4, 5), "down": (3, 5, 4)}.items()
    }
    mask = jnp.arange(6) < 4

    def run():
        """Returns values, and gradients in tokens, gates and weights. The gates' gradients would
        show 0 x NaN.
        """

        def total(x, gates, weights):
            return jnp.sum(moe_ffn(x, ids, gates, mask, weights, grouped_matmul("ragged")) ** 2)

        return jax.value_and_grad(total, (0, 1, 2))(x, jnp.ones((6, 2)), weights)

    expected = run()
    monkeypatch.setattr(jax.lax, "ragged_dot", undefined_behind)
    jax.tree.map(np.testing.assert_array_equal, run(), expected)
    assert seen == [4, 4, 4] and min(float(jnp.abs(g).max()) for g in jax.tree.leaves(expected)) > 0
