"""The pullback that the forward program passes to the backward program: it contains no copy of a
parameter, and gives the same gradient together with the parameters.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import COMPUTE, MODEL, random_params

from compass_jax.model.params import in_layout, training_layout
from compass_jax.model.transformer import Transformer
from compass_jax.training import step


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({}, id="unrolled", marks=pytest.mark.slow),
        pytest.param({"scan_layers": True, "remat": True}, id="scanned, remat"),
    ],
)
def test_a_pullback_carries_no_parameter_and_pulls_back_the_same(how):
    compute = dataclasses.replace(COMPUTE, **how)
    params = in_layout(random_params(), training_layout(compute))
    model = Transformer(MODEL, compute, training_layout(compute))
    rng = np.random.default_rng(0)
    tokens, lengths = (
        jnp.asarray(rng.integers(0, 40, (3, 11)), jnp.int32),
        jnp.array([11, 7, 9], jnp.int32),
    )
    (logp, *_, aux), pullback = step.forward_and_pullback(model, params, tokens, lengths, None, 1.0)
    # matrices alone: the pullback has a reshaped copy of a norm's parameters
    known = {np.asarray(x).tobytes() for x in jax.tree.leaves(params) if x.size >= 512}
    assert not [x.shape for x in pullback.residuals if np.asarray(x).tobytes() in known]
    assert sum(is_parameter for is_parameter, _ in pullback.places) > 10

    weights = jnp.asarray(rng.standard_normal(logp.shape), jnp.float32)
    grads = step.pull(model, params, pullback, (weights, jnp.zeros_like(aux.probs)))
    expected = jax.jit(
        jax.grad(
            lambda params: jnp.sum(
                step.forward(model, params, tokens, lengths, None, 1.0)[0] * weights
            )
        )
    )(params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected)
    other = step.pull(
        model, jax.tree.map(lambda x: 2 * x, params), pullback, (weights, jnp.zeros_like(aux.probs))
    )
    # the backward program reads the parameters that it is given
    assert (
        max(
            float(jnp.abs(a - b).max())
            for a, b in zip(*map(jax.tree.leaves, (grads, other)), strict=True)
        )
        > 1e-3
    )
