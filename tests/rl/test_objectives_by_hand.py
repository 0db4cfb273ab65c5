"""Objectives by hand, at points where formulas are easily wrong."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.policy import policy_objective


def one_response(config, log_ratio, advantage, entropy=None, groups=None):
    """Returns the per-token objective (weight 1), the gradient in logp and the diagnostics of a
    single response with the given log-ratios.
    """
    log_ratio = jnp.asarray([log_ratio], jnp.float32)
    like = jnp.ones_like(log_ratio)
    entropy = like if entropy is None else jnp.asarray([entropy], jnp.float32)
    advantage = like * jnp.asarray(advantage, jnp.float32)

    def run(logp):
        per_token, diagnostics = policy_objective(
            logp,
            -1 * like,
            entropy,
            advantage,
            like,
            config,
            mask=like > 0,
            entropy_group=None if groups is None else jnp.asarray([groups], jnp.int32),
            vocab_size=1000,
        )
        return per_token.sum(), (per_token[0], diagnostics)

    (_, (value, diagnostics)), grad = jax.jit(jax.value_and_grad(run, has_aux=True))(log_ratio - 1)
    return (
        np.asarray(value),
        np.asarray(grad[0]),
        {k: float(v) for k, v in finalize_diagnostics(diagnostics).items()},
    )


def test_grpo_by_hand():
    ratios = np.array([1.5, 0.5, 1.1, 1.5, 0.5])
    value, grad, d = one_response(Grpo(), np.log(ratios), [[2.0, 2.0, -1.0, -1.0, -1.0]])
    # 1.2 * 2 clipped above; 0.8 * -1 clipped below
    np.testing.assert_allclose(value, [2.4, 1.0, -1.1, -1.5, -0.8], rtol=1e-6)
    np.testing.assert_allclose(grad, [0, 1.0, -1.1, -1.5, 0], rtol=1e-6)
    assert d["policy/clip_frac"] == pytest.approx(2 / 5) and d["policy/ratio_max"] == pytest.approx(
        1.5
    )
    assert d["policy/ratio_dev_max"] == pytest.approx(0.5)
    assert d["policy/kl_k3"] == pytest.approx(np.mean(ratios - 1 - np.log(ratios)), rel=1e-5)


def test_gspo_by_hand():
    value, grad, d = one_response(
        Gspo(clip_low=0.2, clip_high=0.2), [0.2, -0.1, 0.2], [[1.0, -2.0, 3.0]]
    )
    s = math.exp(0.1)
    np.testing.assert_allclose(value, s * np.array([1, -2, 3]), rtol=1e-6)
    np.testing.assert_allclose(grad, value, rtol=1e-6)  # every token has the gradient s A
    assert d["policy/clip_frac"] == 0 and d["policy/ratio_max"] == pytest.approx(s)


def test_espo_by_hand():
    config = Espo(alpha=0.5, floor=0.1)
    log_ratio, entropy = [0.1, 0.3, 0.4], [0.2, 0.4, 4.0]
    value, grad, d = one_response(config, log_ratio, 1.0, entropy, [0, 0, 1])
    # 0.2895; the low group's 0.0217 is raised to the floor
    wide = 0.5 * 4.0 / math.log(1000)
    np.testing.assert_allclose(value, [1.1, 1.1, 1 + wide], rtol=1e-6)
    np.testing.assert_allclose(grad, [0, 0, 0], atol=0)
    value, grad, _ = one_response(config, log_ratio, -1.0, entropy, [0, 0, 1])
    np.testing.assert_allclose(value, [-math.exp(0.2), -math.exp(0.2), -math.exp(0.4)], rtol=1e-6)
    np.testing.assert_allclose(grad, value, rtol=1e-6)
    expected = {
        "espo/group_0/epsilon": 0.1,
        "espo/group_1/epsilon": wide,
        "espo/group_0/floor_frac": 1.0,
        "espo/group_1/floor_frac": 0.0,
        "espo/group_0/token_frac": 2 / 3,
        "espo/group_1/token_frac": 1 / 3,
        "espo/group_0/clip_frac": 1.0,
        "espo/group_1/clip_frac": 1.0,
    }
    assert {k: d[k] for k in expected} == pytest.approx(expected)


def test_espo_printed_form_by_hand():
    config = Espo(alpha=5.0, token_form="printed", quantiles=())
    value, grad, _ = one_response(config, [0.1, 0.3], 1.0, [1.0, 1.0], [0, 0])
    # s = exp(0.2), times each token's ratio
    np.testing.assert_allclose(value, [math.exp(0.3), math.exp(0.5)], rtol=1e-6)
    np.testing.assert_allclose(grad, value, rtol=1e-6)


def test_log_ratios_are_clamped_before_exp():
    value, grad, _ = one_response(Grpo(), [200.0, -200.0, 0.0], -1.0)
    np.testing.assert_allclose(value, [-math.exp(20), -0.8, -1.0], rtol=1e-5)
    np.testing.assert_array_equal(grad, [0, 0, -1])
    value, grad, _ = one_response(Gspo(), [200.0, 18.0], -1.0)
    np.testing.assert_allclose(value, [-math.exp(10)] * 2, rtol=1e-5)
    assert np.all(np.isfinite(grad))
    value, _, _ = one_response(Espo(), [200.0, 18.0, -1.0], -1.0, [2.0, 2.0, 1.0], [1, 1, 0])
    np.testing.assert_allclose(
        value, [-math.exp(10)] * 2 + [-(1 - 0.02 / math.log(1000))], rtol=1e-5
    )


def test_kl_to_the_reference_by_hand():
    one = jnp.ones((1, 3), jnp.float32)
    ref_logp = jnp.asarray([[-1.0, -0.5, -40.0]], jnp.float32)
    total = lambda logp: policy_objective(  # noqa: E731
        logp,
        logp,
        one,
        0 * one,
        0.25 * one,
        Grpo(kl_coef=2.0),
        mask=one > 0,
        ref_logp=ref_logp,
        vocab_size=9,
    )
    per_token, diagnostics = total(-one)
    k3 = np.array([0, math.exp(0.5) - 1.5, math.exp(-20) + 19])  # d is clamped to -20
    np.testing.assert_allclose(per_token[0], -2.0 * 0.25 * k3, rtol=1e-5, atol=1e-7)
    assert finalize_diagnostics(diagnostics)["policy/ref_kl_k3"] == pytest.approx(
        k3.mean(), rel=1e-6
    )
    grad = jax.grad(lambda logp: total(logp)[0].sum())(-one)
    # d k3 / d logp = 1 - exp(d)
    np.testing.assert_allclose(grad[0], [0, 0.5 * (math.exp(0.5) - 1), 0], rtol=1e-5, atol=1e-7)
