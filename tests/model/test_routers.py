"""Routers against numpy in float64, and the faults that router replay has had in other systems."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import MODEL, random_params

from compass_jax.config import ConfigError, MoEConfig, seam_class
from compass_jax.config.router import Router
from compass_jax.model.moe import route
from compass_jax.model.params import param_specs, to_decode
from compass_jax.model.quantize import eight_bit
from compass_jax.model.routers.sigmoid import Sigmoid
from compass_jax.model.routers.softmax import Softmax

N, E, K = 40, 12, 3
RNG = np.random.default_rng(0)
LOGITS, BIAS = RNG.normal(0, 2, (N, E)), RNG.normal(0, 0.5, E)
MASK = jnp.ones(N, bool)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def config(router, normalised=True):
    return MoEConfig(experts=E, top_k=K, ffn=8, norm_top_k=normalised, router=router)


def routed(router, routes=None, normalised=True, logits=LOGITS, bias=BIAS):
    bias = jnp.asarray(bias, jnp.float32) if router.selection_bias else None
    return route(jnp.asarray(logits, jnp.float32), routes, MASK, config(router, normalised), bias)


def expected_choice(row, groups, top_groups):
    """Returns the ids that DeepSeek-V3's router chooses, computed by loops."""
    scores = sigmoid(row) + BIAS
    members = np.arange(E).reshape(groups, -1)
    strength = [np.sort(scores[group])[-2:].sum() for group in members]
    allowed = np.concatenate([members[g] for g in np.argsort(strength)[-top_groups:]])
    return set(sorted(allowed, key=lambda e: scores[e])[-K:])


@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2), (3, 1), (6, 6)])
@pytest.mark.parametrize("normalised", [True, False])
def test_the_sigmoid_router_is_the_equation(groups, top_groups, normalised):
    router = Sigmoid(groups=groups, top_groups=top_groups, scale=2.5)
    ids, gates, stats = routed(router, normalised=normalised)
    for row, chosen, weights in zip(LOGITS, np.asarray(ids), np.asarray(gates), strict=True):
        assert set(chosen.tolist()) == expected_choice(row, groups, top_groups)
        s = sigmoid(row[chosen])  # without the bias
        expected = 2.5 * (s / (s.sum() + 1e-20) if normalised else s)
        np.testing.assert_allclose(weights, expected, rtol=2e-6)
    scores = sigmoid(LOGITS)
    shares = scores / scores.sum(1, keepdims=True)
    np.testing.assert_allclose(stats.probs, shares.sum(0), rtol=1e-5)


def test_the_bias_chooses_and_is_not_in_the_gates_nor_has_it_a_gradient():
    strong = np.zeros(E)
    strong[7] = 50.0
    ids, gates, _ = routed(Sigmoid(), bias=strong)
    assert np.all(np.any(np.asarray(ids) == 7, axis=1))
    assert np.all(np.asarray(gates) < 1)

    def total(bias):
        logits = jnp.asarray(LOGITS, jnp.float32)
        return jnp.sum(route(logits, None, MASK, config(Sigmoid()), bias)[1] ** 2)

    assert np.all(np.asarray(jax.grad(total)(jnp.asarray(BIAS, jnp.float32))) == 0)


@pytest.mark.parametrize("router", [Softmax(), Sigmoid(groups=4, top_groups=1)])
@pytest.mark.parametrize("normalised", [True, False])
def test_a_replayed_choice_outside_the_live_one_has_live_gates_and_their_gradient(
    router, normalised
):
    """The replayed ids have the lowest scores: outside the top-k and, with groups, outside the
    group.
    """
    worst = np.argsort(LOGITS, axis=1)[:, :K].astype(np.uint8)
    with jax.enable_x64(True):
        logits = jnp.asarray(LOGITS)

        def total(logits):
            bias = jnp.asarray(BIAS) if router.selection_bias else None
            ids, gates, stats = route(
                logits, jnp.asarray(worst), MASK, config(router, normalised), bias
            )
            return jnp.sum(gates * jnp.asarray(RATE)), (ids, gates, stats)

        gradient, (ids, gates, stats) = jax.grad(total, has_aux=True)(logits)
        np.testing.assert_array_equal(ids, worst)
        assert np.all(np.isfinite(gates)) and float(stats.flips) == N
        step = 1e-6
        for n, e in ((0, worst[0, 0]), (3, worst[3, 2]), (5, int(np.argmax(LOGITS[5])))):
            moved = [total(logits.at[n, e].add(sign * step))[0] for sign in (1, -1)]
            finite = float(moved[0] - moved[1]) / (2 * step)
            assert gradient[n, e] == pytest.approx(finite, rel=1e-4, abs=1e-9)
        assert np.abs(gradient[0, worst[0, 0]]) > 1e-9


RATE = np.random.default_rng(3).normal(0, 1, (N, K))


def test_the_recorded_ids_are_those_that_were_used_where_scores_tie():
    equal = np.zeros((N, E))
    for router in (Softmax(), Sigmoid(groups=3, top_groups=2)):
        ids, gates, _ = routed(router, logits=equal, bias=np.zeros(E))
        replayed_ids, replayed_gates, stats = routed(
            router, jnp.asarray(ids, jnp.uint8), logits=equal, bias=np.zeros(E)
        )
        np.testing.assert_array_equal(ids, replayed_ids)
        np.testing.assert_array_equal(gates, replayed_gates)
        assert float(stats.flips) == 0
        assert all(len(set(row)) == K for row in np.asarray(ids).tolist())


def test_extreme_logits_give_finite_gates():
    extreme = np.where(RNG.random((N, E)) < 0.5, -1e4, -2e4)
    for router in (Softmax(), Sigmoid(groups=4, top_groups=2)):
        _, gates, stats = routed(router, logits=extreme)
        assert np.all(np.isfinite(gates)) and np.all(np.isfinite(stats.probs))


def test_routers_are_found_by_name_and_settings_that_do_not_fit_are_refused():
    router = MoEConfig(experts=E, top_k=K, ffn=8).router
    assert router == Softmax() and router.name == "softmax"
    assert seam_class(Router, "sigmoid") is Sigmoid
    for router, message in (
        (Sigmoid(groups=5), "groups = 5 does not divide model.moe.experts = 12"),
        (Sigmoid(groups=4, top_groups=5), "top_groups = 5: must be in 1..groups = 4"),
        (Sigmoid(groups=6, top_groups=1), "top_k = 3 exceeds the 2 experts"),
    ):
        with pytest.raises(ConfigError, match=message):
            router.check(config(router))
    with pytest.raises(ConfigError, match="no such router; take one of softmax, sigmoid"):
        seam_class(Router, "hash")


def test_the_selection_bias_keeps_its_precision_in_a_bfloat16_rollout():
    model = replace(MODEL, moe=replace(MODEL.moe, router=Sigmoid()))
    bias = np.float32(8.0) + 1e-3 * np.arange(MODEL.moe.experts, dtype=np.float32)
    params = jax.tree_util.tree_map_with_path(
        lambda path, x: jnp.broadcast_to(bias, x.shape) if "selection" in str(path) else x,
        random_params(model),
    )
    specs = param_specs(model, "decode")
    decode = eight_bit(to_decode(params), specs, "off", "bfloat16")
    router = decode["run_0"][0]["layer_0"]["mlp"]
    np.testing.assert_array_equal(router["router_selection"], bias)
    assert router["router"].dtype == jnp.bfloat16
