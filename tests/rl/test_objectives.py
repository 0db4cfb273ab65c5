"""Values and gradients of the objectives, compared with the float64 references."""

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rl_reference as ref
from jitted import numbers, objective_of, prepare_toy

from compass_jax.config import (
    ConfigError,
    RLConfig,
    ZeroVarianceConfig,
    named_correction,
)
from compass_jax.rl.diagnostics import finalize_diagnostics
from compass_jax.rl.objectives.cispo import Cispo
from compass_jax.rl.objectives.espo import Espo
from compass_jax.rl.objectives.grpo import Grpo, dapo_surrogate, dr_grpo
from compass_jax.rl.objectives.gspo import Gspo
from compass_jax.rl.policy import policy_objective

CASES = {
    "grpo": (Grpo(), 0.3),
    "grpo asymmetric with KL": (
        Grpo(clip_low=0.1, clip_high=0.28, kl_coef=0.05),
        0.3,
    ),
    "grpo dual clip": (Grpo(dual_clip=1.3), 0.5),
    "dapo": (dapo_surrogate(kl_coef=0.05), 0.3),
    "dr_grpo": (dr_grpo(), 0.3),
    "cispo": (Cispo(ratio_max=1.2), 0.3),
    "cispo with KL": (Cispo(kl_coef=0.1, ratio_max=1.1), 0.3),
    "gspo own clip": (Gspo(), 1.5e-3),
    "gspo": (Gspo(clip_low=3e-4, clip_high=4e-4), 1.5e-3),
    "gspo with KL": (Gspo(clip_low=0.05, clip_high=0.06, kl_coef=0.1), 0.15),
    "espo one group": (Espo(quantiles=()), 0.04),
    "espo": (Espo(), 0.04),
    "espo three groups with KL": (Espo(quantiles=(0.25, 0.75), kl_coef=0.1), 0.04),
    "espo four groups": (Espo(quantiles=(0.25, 0.5, 0.8), alpha=0.05), 0.1),
    "espo floor": (Espo(floor=0.0155), 0.04),
    "espo every token": (
        Espo(quantiles=(), every_token=True, alpha=0.05),
        0.1,
    ),
    "espo every token fixed clip": (
        Espo(
            quantiles=(),
            every_token=True,
            fixed_clip=True,
            clip_low=0.1,
            clip_high=0.1,
        ),
        0.2,
    ),
    "espo printed": (Espo(token_form="printed"), 0.04),
    "espo printed four groups": (
        Espo(token_form="printed", quantiles=(0.25, 0.5, 0.8)),
        0.04,
    ),
    "espo fixed clip": (Espo(fixed_clip=True, clip_low=0.02, clip_high=0.03), 0.04),
    "espo printed fixed clip": (
        Espo(fixed_clip=True, clip_low=0.02, clip_high=0.03, token_form="printed"),
        0.04,
    ),
}


OFF = named_correction("off")


def paper(config):
    """Returns the reference's name of an objective."""
    averages = {"response": "grpo", "tokens": "dapo", "constant": "dr_grpo"}
    return averages[config.mean] if isinstance(config, Grpo) else config.name


def rl_config(config, correction=OFF):
    return RLConfig(
        objective=config,
        correction=correction,
        zero_variance=ZeroVarianceConfig(rl_zvp=True, rl_zvp_alpha=0.1),
    )


def prepared(toy, config, dtype, correction=OFF):
    """Returns the prepared rows of a toy policy's rollout."""
    log_probs = {"old_logp": toy.old_logp, "rollout_logp": toy.rollout_logp}
    rl = rl_config(config, correction)
    return prepare_toy(toy, rl, dtype, max_new_tokens=ref.MAX_NEW_TOKENS, **log_probs)[0]


def run_objective(toy, config, dtype=jnp.float64, jit=True, correction=OFF):
    """Returns the value, the gradient in theta and the diagnostics of the package's objective over
    the toy policy.
    """
    p = prepared(toy, config, dtype, correction)
    old_logp, ref_logp, entropy = (
        jnp.asarray(x, dtype) for x in (toy.old_logp, toy.ref_logp, toy.old_entropy)
    )
    reference = ref_logp if config.kl_coef else None

    def total(theta):
        logp = jax.nn.log_softmax(theta)[toy.states, toy.actions]
        per_token, diagnostics = objective_of(
            logp, old_logp, entropy, p, config, toy.vocab_size, reference
        )
        return per_token.sum(), diagnostics

    run = jax.value_and_grad(total, has_aux=True)
    (value, diagnostics), grad = (jax.jit(run) if jit else run)(jnp.asarray(toy.theta, dtype))
    return float(value), np.asarray(grad), numbers(diagnostics)


def reference(toy, config, correction=OFF):
    advantages = ref.advantage(toy, config.divides_by_std)[:, None] + ref.rl_zvp(toy, 1.0, 0.0, 0.1)
    factor = ref.correction(toy, correction)

    def function(theta):
        return ref.objective(paper(config), toy, theta, toy.theta, advantages, config, factor)

    return np.real(function(toy.theta)), ref.gradient(function, toy.theta)


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_agree_with_the_reference(name, x64):
    config, drift = CASES[name]
    toy = ref.make_toy(seed=1, drift=drift)
    value, grad = reference(toy, config)
    got, got_grad, diagnostics = run_objective(toy, config)
    assert 0.05 < diagnostics["policy/clip_frac"] < 0.6, "the case must exercise both branches"
    if name == "espo floor":
        assert 0 < diagnostics["espo/group_0/floor_frac"] < 1
    np.testing.assert_allclose(got, value, rtol=1e-9)
    np.testing.assert_allclose(got_grad, grad, rtol=1e-9, atol=1e-9 * np.abs(grad).max())
    assert np.abs(grad).max() > 1e-3


@pytest.mark.parametrize(
    "correction",
    [
        named_correction("tis", cap=1.2),
        named_correction("icepop", ratio_range=(0.7, 1.5)),
        named_correction("sequence", ratio_range=(0.98, 1.05)),
    ],
    ids=lambda c: c.name,
)
@pytest.mark.parametrize("name", ["grpo", "espo", "grpo asymmetric with KL"])
def test_corrected_objectives_agree_with_the_reference(name, correction, x64):
    """The factor is outside the clip and has no gradient; tokens that it drops stay in the
    denominator; and it does not multiply the penalty to the reference.
    """
    config, drift = CASES[name]
    toy = ref.make_toy(seed=7, drift=drift)
    factor = ref.correction(toy, correction)[toy.mask & toy.known[:, None]]
    assert (
        np.ptp(factor) > 0.2
        and (correction.name == "tis") == (factor.min() > 0)
        and factor.max() > 1.04
    )
    value, grad = reference(toy, config, correction)
    got, got_grad, _ = run_objective(toy, config, correction=correction)
    np.testing.assert_allclose(got, value, rtol=1e-9)
    np.testing.assert_allclose(got_grad, grad, rtol=1e-9, atol=1e-9 * np.abs(grad).max())
    assert abs(got - run_objective(toy, config)[0]) > 1e-4


@pytest.mark.parametrize(
    "name, jit",
    [
        ("grpo", True),
        ("gspo with KL", True),
        ("espo", True),
        ("espo", False),
        ("espo printed", True),
    ],
)
def test_float32_with_and_without_jit(name, jit):
    config, drift = CASES[name]
    toy = ref.make_toy(seed=2, drift=drift)
    value, grad = reference(toy, config)
    got, got_grad, _ = run_objective(toy, config, jnp.float32, jit)
    np.testing.assert_allclose(got, value, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(got_grad, grad, rtol=1e-4, atol=2e-5 * np.abs(grad).max())
    assert got_grad.dtype == np.float32


@pytest.mark.parametrize("drift", [0.0, 0.04, 0.3])
def test_espo_with_one_group_and_fixed_clip_is_gspo(drift, x64):
    toy = ref.make_toy(seed=3, drift=drift)
    gspo = Gspo(clip_low=0.01, clip_high=0.02)
    espo = Espo(clip_low=0.01, clip_high=0.02, quantiles=(), fixed_clip=True)
    a, b = run_objective(toy, gspo), run_objective(toy, espo)
    assert a[0] == b[0] and a[2].items() <= b[2].items()
    np.testing.assert_array_equal(a[1], b[1])
    assert np.abs(a[1]).max() > 0


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "dr_grpo", "gspo", "espo four groups", "espo printed"]
)
def test_on_policy_ratio_is_exactly_one_and_nothing_is_clipped(name):
    config, _ = CASES[name]
    toy = ref.make_toy(seed=4, drift=0.0)
    logp = jnp.asarray(toy.old_logp, jnp.float32)
    p = prepared(toy, config, jnp.float32)
    entropy = jnp.asarray(toy.old_entropy, jnp.float32)
    per_token, diagnostics = objective_of(logp, logp, entropy, p, config, toy.vocab_size, logp)
    d = finalize_diagnostics(diagnostics)
    assert (
        d["policy/ratio_dev_max"] == 0
        and d["policy/clip_frac"] == 0
        and d["policy/kl_k3"] == 0
        and d["policy/ref_kl_k3"] == 0
    )
    assert d["policy/ratio_max"] == 1
    np.testing.assert_array_equal(per_token, p.advantage * p.weight)


@pytest.mark.parametrize("name", ["grpo with KL", "gspo", "espo", "espo printed"])
def test_garbage_outside_the_mask_reaches_neither_value_nor_gradient(name):
    config = Grpo(kl_coef=0.1) if name == "grpo with KL" else CASES[name][0]
    toy = ref.make_toy(seed=5)
    p = prepared(toy, config, jnp.float32)

    def value_and_grad(fill):
        dirty = lambda x: jnp.where(p.mask, jnp.asarray(x, jnp.float32), fill)  # noqa: E731

        def total(logp):
            arrays = (dirty(x) for x in (toy.old_logp, toy.old_entropy))
            changes = {"advantage": dirty(p.advantage), "weight": dirty(p.weight)}
            per_token, diagnostics = objective_of(
                logp, *arrays, p, config, toy.vocab_size, dirty(toy.ref_logp), **changes
            )
            return per_token.sum(), (per_token, finalize_diagnostics(diagnostics))

        (_, aux), grad = jax.value_and_grad(total, has_aux=True)(dirty(toy.logp(toy.theta)))
        return jax.tree.map(np.asarray, (aux, grad))

    clean = value_and_grad(0.0)
    for fill in (jnp.nan, jnp.inf, -jnp.inf, 1e30):
        jax.tree.map(np.testing.assert_array_equal, value_and_grad(fill), clean)
    assert np.all(clean[1][~np.asarray(p.mask)] == 0) and np.any(clean[1] != 0)


def test_only_logp_carries_a_gradient():
    toy = ref.make_toy(seed=6, drift=0.04)
    config = Espo(kl_coef=0.1)
    p = prepared(toy, config, jnp.float32)
    arrays = [toy.logp(toy.theta), toy.old_logp, toy.old_entropy, toy.ref_logp]
    arrays = [jnp.asarray(x, jnp.float32) for x in (*arrays, p.advantage, p.weight)]

    def total(logp, old_logp, entropy, ref_logp, advantage, weight):
        changes = {"advantage": advantage, "weight": weight}
        return objective_of(
            logp, old_logp, entropy, p, config, toy.vocab_size, ref_logp, **changes
        )[0].sum()

    grads = jax.grad(total, argnums=tuple(range(6)))(*arrays)
    assert np.any(grads[0] != 0)
    for grad in grads[1:]:
        np.testing.assert_array_equal(grad, np.zeros_like(grad))


def test_nothing_to_train_on_gives_zero():
    for name in ("grpo asymmetric with KL", "gspo", "espo"):
        config, _ = CASES[name]
        toy = ref.make_toy(seed=7)
        toy.mask[:] = False
        value, grad, diagnostics = run_objective(toy, config, jnp.float32)
        assert value == 0 and not np.any(grad) and not any(diagnostics.values())


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(old_logp=(2, 4)), r"old_logp has shape \[2, 4\], expected \[2 3\]"),
        (dict(weight=(2,)), r"weight has shape \[2\], expected \[2 3\]"),
        (dict(logp=(2, 3, 1)), r"logp has shape \[2, 3, 1\], expected \[\* \*\]"),
        (dict(ref_logp=None), "kl_coef = 0.1 needs ref_logp"),
        (dict(entropy_group=None), "espo needs entropy_group"),
    ],
)
def test_wrong_input_is_named(change, message, unchecked):
    shapes = dict.fromkeys(
        ("logp", "old_logp", "old_entropy", "advantage", "weight", "ref_logp"), (2, 3)
    )
    arrays = {k: jnp.ones(s, jnp.float32) for k, s in shapes.items()} | dict(
        entropy_group=jnp.zeros((2, 3), jnp.int32)
    )
    arrays |= {k: None if s is None else jnp.ones(s, jnp.float32) for k, s in change.items()}
    with pytest.raises(ValueError, match=message):
        # without the runtime check of annotations, which is active in tests alone
        check = inspect.unwrap(policy_objective)
        check(**arrays, config=Espo(kl_coef=0.1), mask=jnp.ones((2, 3), bool), vocab_size=9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantiles": (0.8,)}, "every_token: has no use for quantiles"),
        ({"token_form": "printed"}, "has no effect with every_token"),
    ],
)
def test_settings_that_do_nothing_beside_every_token_alone_are_refused(changes, message):
    alone = Espo(quantiles=(), every_token=True)
    alone.validate()
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(alone, **changes).validate()
