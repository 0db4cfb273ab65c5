"""The edges of the engine's contract: a single prompt, what cannot be served, equal engines."""

import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import ENGINE, LOOSE, PROMPTS, keys_of, prefill
from tiny import COMPUTE, EOS, MODEL, ROLLOUT

from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import RowSampling, Sampler


def test_a_single_prompt_is_served_with_the_key_of_its_request():
    tokens = np.zeros(8, np.int32)
    tokens[:3] = PROMPTS[0].tokens
    first, again, other = (
        ENGINE.prefill(params=LOOSE, padded_tokens=tokens, true_length=3, request_id=i)
        for i in (5, 5, 6)
    )
    np.testing.assert_array_equal(first.keys, again.keys)
    assert np.any(np.asarray(first.keys) != np.asarray(other.keys)) and int(
        first.first_token[0, 0]
    ) == int(again.first_token[0, 0])
    state = ENGINE.insert(first, ENGINE.init_decode_state(), 2)
    np.testing.assert_array_equal(
        state.tokens[2, :4], [*PROMPTS[0].tokens, int(first.first_token[0, 0])]
    )
    np.testing.assert_array_equal(state.lengths, [1, 1, 4, 1, 1, 1])
    assert (ENGINE.max_concurrent_decodes, ENGINE.max_prefill_length, ENGINE.samples_per_slot) == (
        6,
        16,
        1,
    )


def test_what_cannot_be_served_is_refused():
    assert [ENGINE.bucket(n) for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
    with pytest.raises(
        ValueError,
        match=(
            r"a prompt of 17 tokens exceeds the longest bucket of rollout.prompt_buckets \(8, 16\)"
        ),
    ):
        ENGINE.bucket(17)
    with pytest.raises(ValueError, match="existing prefix is not supported"):
        ENGINE.prefill(
            params=LOOSE,
            existing_prefix=object(),
            padded_tokens=np.zeros(8, np.int32),
            true_length=3,
        )
    with pytest.raises(ValueError, match="keys for 2 samples, num_samples = 3"):
        prefill(samples=3, keys=keys_of())
    one = dict(
        params=LOOSE,
        padded_tokens=jnp.zeros((1, 8), jnp.int32),
        true_length=jnp.array([3]),
        rng=keys_of(1, 1),
        num_samples=1,
    )
    for options in (
        dict(sampler=Sampler(per_request=True)),
        dict(sampler=Sampler(), sampling=RowSampling.plain(1)),
    ):
        with pytest.raises(
            ValueError, match="a per_request sampler needs the parameters of each prompt"
        ):
            ENGINE.prefill_multisampling(**one, **options)


def test_engines_of_equal_settings_share_what_was_compiled():
    twin, other = Engine(MODEL, COMPUTE, ROLLOUT, EOS), Engine(MODEL, COMPUTE, ROLLOUT, 2)
    assert twin == ENGINE and hash(twin) == hash(ENGINE) and other != ENGINE
    prefill()
    compiled = Engine._prefill._cache_size()
    prefill(engine=twin)
    assert Engine._prefill._cache_size() == compiled
