"""Log-probs, entropies and their gradients, computed in chunks, against float64 numpy on the full
logits.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compass_jax.model.logprobs import head_weights, token_logprobs

B, T, D, V = 3, 5, 4, 11


def plain(hidden, head, tokens, temperature):
    """Computes (logp, entropy) of token t from the hidden state at t-1, in float64."""
    logits = hidden.astype(np.float64) @ head.astype(np.float64) / temperature
    logp = logits - logits.max(-1, keepdims=True)
    logp -= np.log(np.exp(logp).sum(-1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(-1)
    out = np.zeros((2, B, T))
    for b in range(B):
        for t in range(1, T):
            out[:, b, t] = logp[b, t - 1, tokens[b, t]], entropy[b, t - 1]
    return out


def problem(seed=0):
    rng = np.random.default_rng(seed)
    return (
        2 * rng.standard_normal((B, T, D)),
        rng.standard_normal((D, V)),
        rng.integers(0, V, (B, T)).astype(np.int32),
    )


@pytest.mark.parametrize("chunk", [1, 4, 15, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_chunks_and_temperature_against_numpy(chunk, temperature):
    hidden, head, tokens = problem()
    out = token_logprobs(
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(tokens),
        temperature,
        chunk,
    )
    np.testing.assert_allclose(
        np.stack(out), plain(hidden, head, tokens, temperature), rtol=2e-6, atol=2e-6
    )


@pytest.mark.parametrize("chunk", [4, 1000])
def test_gradients_against_differences_and_none_through_the_entropy(x64, chunk):
    hidden, head, tokens = problem()
    rng = np.random.default_rng(1)
    probe, entropy_probe = rng.standard_normal((2, B, T))

    def f(hidden, head):
        logp, entropy = token_logprobs(hidden, head, jnp.asarray(tokens), 0.7, chunk)
        return jnp.sum(logp * probe) + jnp.sum(entropy * entropy_probe)

    grads = jax.grad(f, argnums=(0, 1))(jnp.asarray(hidden), jnp.asarray(head))
    inputs = [hidden, head]
    for i, step in enumerate((1e-6, 1e-6)):
        direction = rng.standard_normal(inputs[i].shape)
        ends = [
            np.sum(
                plain(
                    *[x + s * step * direction if j == i else x for j, x in enumerate(inputs)],
                    tokens,
                    0.7,
                )[0]
                * probe
            )
            for s in (1, -1)
        ]
        np.testing.assert_allclose(
            np.sum(np.asarray(grads[i]) * direction), (ends[0] - ends[1]) / (2 * step), rtol=1e-7
        )


@pytest.mark.parametrize("chunk", [1, 4, 1000])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
def test_tokens_that_are_not_predicted_are_zero_and_leave_the_others_alone(x64, chunk, share):
    hidden, head, tokens = problem()
    rng = np.random.default_rng(2)
    predicted, probe = rng.random((B, T)) < share, rng.standard_normal((B, T))
    predicted[:, 0] = True  # the first token is never predicted

    def f(hidden, head, predicted):
        out = token_logprobs(hidden, head, jnp.asarray(tokens), 0.7, chunk, predicted=predicted)
        return jnp.sum(out[0] * probe), out

    def computed(predicted):
        arrays = (jnp.asarray(hidden), jnp.asarray(head))
        return jax.grad(f, argnums=(0, 1), has_aux=True)(*arrays, predicted)

    grads, out = computed(jnp.asarray(predicted))
    numbers = plain(hidden, head, tokens, 0.7)
    np.testing.assert_allclose(np.stack(out), np.where(predicted, numbers, 0), atol=1e-12)
    probe = np.where(predicted, probe, 0)
    expected, _ = computed(None)
    for got, right in zip(grads, expected, strict=True):
        np.testing.assert_allclose(got, right, atol=1e-12)


def test_chunks_without_a_predicted_token_are_not_computed():
    """Hidden states of skipped chunks may be NaN."""
    hidden, head, tokens = problem()
    predicted = np.zeros((B, T), bool)
    predicted[1, 2:4] = True
    hidden[~np.roll(predicted, -1, axis=1)] = np.nan

    def f(hidden, head):
        out = token_logprobs(hidden, head, jnp.asarray(tokens), 1.0, 1, predicted=mask)
        return jnp.sum(out[0])

    mask = jnp.asarray(predicted)
    arrays = jnp.asarray(hidden, jnp.float32), jnp.asarray(head, jnp.float32)
    total, (d_hidden, d_head) = jax.value_and_grad(f, argnums=(0, 1))(*arrays)
    assert np.isfinite(total) and np.isfinite(d_hidden).all() and np.isfinite(d_head).all()
    assert np.any(d_head)
    np.testing.assert_allclose(total, plain(hidden, head, tokens, 1.0)[0][predicted].sum(), 1e-5)


def test_the_last_hidden_state_and_the_first_token_are_not_used():
    hidden, head, tokens = problem()
    other_hidden, other_tokens = hidden.copy(), tokens.copy()
    other_hidden[:, -1], other_tokens[:, 0] = 77.0, 0
    first = token_logprobs(
        jnp.asarray(hidden, jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(tokens),
        1.0,
        4,
    )
    second = token_logprobs(
        jnp.asarray(other_hidden, jnp.float32),
        jnp.asarray(head, jnp.float32),
        jnp.asarray(other_tokens),
        1.0,
        4,
    )
    np.testing.assert_array_equal(np.stack(first), np.stack(second))
    np.testing.assert_array_equal(first[0][:, 0], np.zeros(B))


def test_bfloat16_hidden_states_give_float32_log_probs():
    """Logits of bfloat16 inputs are accumulated in float32, so that only the rounding of the inputs
    remains as error.
    """
    hidden, head, tokens = problem()
    half, half_head = jnp.asarray(hidden, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    logp, entropy = token_logprobs(half, half_head, jnp.asarray(tokens), 1.0, 4)
    assert logp.dtype == entropy.dtype == jnp.float32
    expected = plain(np.asarray(half, np.float32), np.asarray(half_head, np.float32), tokens, 1.0)
    np.testing.assert_allclose(np.stack([logp, entropy]), expected, rtol=1e-5, atol=1e-5)


def test_the_head_is_the_transposed_embedding_where_tied():
    embed, head = jnp.arange(6.0).reshape(3, 2), jnp.ones((2, 3))
    np.testing.assert_array_equal(head_weights({"embed": embed}), [[0, 2, 4], [1, 3, 5]])
    np.testing.assert_array_equal(head_weights({"embed": embed, "head": head}), head)
