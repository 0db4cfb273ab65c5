"""The engine's contract: the same checks on this package's engine and on JetStream's mock, and edge
cases of this package's engine.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import conformance
import jax.numpy as jnp
import numpy as np
import pytest
from test_engine import ENGINE, LOOSE, PARAMS, PROMPTS, keys_of, prefill
from tiny import COMPUTE, EOS, MODEL, ROLLOUT

from compass_jax.rollout import engine_api
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import RowSampling, Sampler
from compass_jax.rollout.sizes import prompt_bucket, resume_bucket

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("name", conformance.CHECKS)
def test_our_engine_keeps_the_contract(name):
    assert isinstance(ENGINE, engine_api.Engine)
    conformance.CHECKS[name](ENGINE, ENGINE.load_params(PARAMS))


@pytest.mark.slow  # TensorFlow's import takes most of a minute
@pytest.mark.skipif(
    importlib.util.find_spec("jetstream") is None, reason="google-jetstream is not installed"
)
def test_jetstreams_mock_engine_keeps_the_contract():
    """The checks run in a separate process with one device, which the mock needs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    environment.pop("PJRT_NPROC", None)  # with 64 threads the mock takes 9 GB instead of 1
    result = subprocess.run(
        [sys.executable, conformance.__file__],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    reports = json.loads(result.stdout.splitlines()[-1])
    assert reports.keys() == {*conformance.CHECKS, "check_the_protocol_is_jetstreams"}
    assert not "".join(reports.values()), "\n".join(filter(None, reports.values()))


def test_a_single_prompt_is_served_with_the_key_of_its_request():
    tokens = np.zeros(8, np.int32)
    tokens[:3] = PROMPTS[0].tokens
    first, repeated, other = (
        ENGINE.prefill(params=LOOSE, padded_tokens=tokens, true_length=3, request_id=i)
        for i in (5, 5, 6)
    )
    np.testing.assert_array_equal(first.keys, repeated.keys)
    assert np.any(np.asarray(first.keys) != np.asarray(other.keys))
    assert int(first.first_token[0, 0]) == int(repeated.first_token[0, 0])
    state = ENGINE.insert(first, ENGINE.init_decode_state(), 2)
    assert int(state.token[2]) == int(first.first_token[0, 0])
    np.testing.assert_array_equal(state.lengths, [1, 1, 4, 1, 1, 1])


def test_sizes_beyond_the_longest_bucket():
    assert [prompt_bucket(ROLLOUT, n) for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert [resume_bucket(ROLLOUT, n) for n in (1, 9, 17, 32)] == [8, 16, 32, 32]
    message = (
        r"a prompt of 17 tokens exceeds the longest bucket of rollout.prompt_buckets \(8, 16\)"
    )
    with pytest.raises(ValueError, match=message):
        prompt_bucket(ROLLOUT, 17)


def test_what_cannot_be_served_is_refused():
    long = dict(padded_tokens=np.zeros(16, np.int32), true_length=9)
    begun = ENGINE.prefill(params=LOOSE, **long)
    for odd in (object(), prefill(samples=1, keys=keys_of(len(PROMPTS), 1))):
        with pytest.raises(ValueError, match="must be what `prefill` returned for one prompt"):
            ENGINE.prefill(params=LOOSE, existing_prefix=odd, **long)
    with pytest.raises(ValueError, match="a prompt of 18 tokens exceeds the longest bucket"):
        ENGINE.prefill(params=LOOSE, existing_prefix=begun, **long)
    with pytest.raises(NotImplementedError, match="token ids"):
        ENGINE.build_tokenizer(None)
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
