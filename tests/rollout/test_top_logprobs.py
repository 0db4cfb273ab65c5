"""The most probable tokens at each position: against float64, and computed only on request."""

import jax
import jax.numpy as jnp
import numpy as np

from compass_jax.rollout.logprobs import in_rows, top_logprobs, top_logprobs_if


def expected(logits, tokens, most):
    """Returns (ids, log-probs) computed in float64."""
    wide = logits.astype(np.float64)
    shifted = wide - wide.max(axis=1, keepdims=True)
    logp = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    ids = np.concatenate([tokens[:, None], np.argsort(-logp, axis=1)[:, :most]], axis=1)
    return ids, np.take_along_axis(logp, ids, axis=1)


def drawn(n, v):
    draws = np.random.default_rng(n)
    return draws.normal(0, 4, (n, v)).astype(np.float32), draws.integers(0, v, n, dtype=np.int32)


def test_the_token_itself_comes_first_and_then_the_likeliest():
    logits, tokens = drawn(7, 30)
    ids, logp = expected(logits, tokens, 5)
    actual = top_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 5, None)
    np.testing.assert_array_equal(actual.ids, ids)
    np.testing.assert_allclose(actual.logp, logp, atol=1e-5)


def test_columns_that_are_no_tokens_count_for_nothing():
    logits, tokens = drawn(7, 30)
    ids, logp = expected(logits[:, :20], tokens % 20, 5)
    logits[:, 20:] = 50.0
    actual = top_logprobs(jnp.asarray(logits), jnp.asarray(tokens % 20), 5, 20)
    np.testing.assert_array_equal(actual.ids, ids)
    np.testing.assert_allclose(actual.logp, logp, atol=1e-5)


def test_there_are_no_more_than_the_vocabulary_has():
    logits, tokens = drawn(3, 4)
    actual = top_logprobs(jnp.asarray(logits), jnp.asarray(tokens), 20, None)
    assert actual.ids.shape == (3, 5)
    np.testing.assert_allclose(jnp.exp(actual.logp[:, 1:]).sum(axis=1), 1.0, atol=1e-5)


def test_they_are_computed_only_where_they_are_wanted():
    logits, tokens = map(jnp.asarray, drawn(7, 30))
    run = jax.jit(lambda needed: top_logprobs_if(needed, logits, tokens, 5, None))
    reference = top_logprobs(logits, tokens, 5, None)
    np.testing.assert_array_equal(run(jnp.bool_(True)).ids, reference.ids)
    assert not run(jnp.bool_(False)).ids.any() and not run(jnp.bool_(False)).logp.any()


def test_rows_a_few_at_a_time_are_the_rows_together():
    logits, tokens = map(jnp.asarray, drawn(300, 30))

    def function(hidden, following):
        return top_logprobs(hidden, following, 5, None)

    in_chunks, at_once = in_rows(function, logits, tokens), function(logits, tokens)
    np.testing.assert_array_equal(in_chunks.ids, at_once.ids)
    np.testing.assert_allclose(in_chunks.logp, at_once.logp, atol=1e-6)
