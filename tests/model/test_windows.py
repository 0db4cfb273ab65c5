"""Experts on windows of sorted rows: the sum over a token's choices, and rows without a pair."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.model.experts.build import grouped_matmul, moe_ffn
from compass_jax.model.experts.ragged import window_rows

N, K, D, F, E, PARTS = 256, 8, 16, 8, 4, 8  # four of the experts, one of eight parts


def problem(share, seed=0):
    """Returns pairs of which `share` belong to an expert on this device. The last token is
    padding.
    """
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random((N, K)) < share, rng.integers(0, E, (N, K)), E).astype(np.int32)
    shapes = {"gate": (E, D, F), "up": (E, D, F), "down": (E, F, D)}
    weights = {name: rng.standard_normal(x) for name, x in shapes.items()}
    mask = np.arange(N) < N - 1
    return rng.standard_normal((N, D)), ids, rng.random((N, K)), mask, weights


def on_windows(x, ids, gates, mask, weights, dtype):
    compute = partial(moe_ffn, grouped=grouped_matmul("ragged", PARTS))
    return compute(
        jnp.asarray(x, dtype),
        jnp.asarray(ids),
        jnp.asarray(gates, dtype),
        jnp.asarray(mask),
        {name: jnp.asarray(w, dtype) for name, w in weights.items()},
    )


@pytest.mark.parametrize("share", [0.125, 0.9], ids=["one window", "four"])
def test_a_choice_is_not_rounded_before_the_sum(share):
    """A token's choices are bfloat16 products that are accumulated and summed in float32, so that
    only the sum is rounded. Small integers, a saturated SiLU and gates of 1 and 2 keep all values
    before `down` exact.
    """
    rng = np.random.default_rng(0)
    _, ids, _, mask, weights = problem(share)
    x, gates = rng.integers(-2, 3, (N, D)), 1 + rng.integers(0, 2, (N, K))
    x[:, 0] = 1
    weights["gate"] = np.where(np.arange(D)[:, None] == 0, 128.0, np.zeros((E, D, F)))
    weights["up"] = rng.integers(-2, 3, (E, D, F))
    local = np.minimum(ids, E - 1)
    hidden = 128 * np.einsum("nd,nkdf->nkf", x, weights["up"][local]) * gates[..., None]

    def half(a):
        return np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)

    choices = np.einsum("nkf,nkfd->nkd", hidden, half(weights["down"])[local])
    choices[(ids == E) | ~mask[:, None]] = 0
    got = np.asarray(on_windows(x, ids, gates, mask, weights, jnp.bfloat16), np.float64)
    assert np.mean(got == half(choices.sum(axis=1))) > 0.99
    assert np.mean(got == half(half(choices).sum(axis=1))) < 0.95


@pytest.mark.parametrize("share", [0.0, 0.125, 0.9], ids=["none", "a part's share", "nearly all"])
def test_garbage_in_a_padding_token_reaches_nobody(share):
    """A row without a pair reads the last token, here a padding token of NaN. Values and gradients
    change in no bit, also where a device has no pair.
    """
    x, ids, gates, mask, weights = problem(share)
    assert window_rows(N * K, E, PARTS) == N * K // 4

    @jax.jit
    def run(x):
        def loss(x, weights):
            out = on_windows(x, ids, gates, mask, weights, jnp.float32)
            return jnp.sum(jnp.where(mask[:, None], out, 0) ** 2), out

        wide = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
        (_, out), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, wide)
        return out, grads

    clean = run(jnp.asarray(x, jnp.float32))
    dirty = run(jnp.asarray(np.where(mask[:, None], x, np.nan), jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, dirty, clean)
    assert np.isfinite(clean[0]).all() and bool(np.any(clean[0])) == (share > 0)
