"""Engines that have JetStream's contract and nothing else, driven by the batcher."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_engine import ENGINE, LOOSE, PROMPTS
from tiny import EOS, ROLLOUT

from compass_jax.base.records import UNKNOWN_LOGP
from compass_jax.config import ConfigError
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine_api import Engine, ResultTokens
from compass_jax.rollout.plain_engine import PlainEngine
from compass_jax.rollout.request import Request
from compass_jax.rollout.sampling import Purpose, Sampler

ROOT = Path(__file__).parent.parent.parent
GREEDY = Sampler(temperature=0.0)


class Contract:
    """This package's engine behind JetStream's methods alone, with greedy tokens."""

    samples_per_slot, colocated_cpus = 1, None
    max_concurrent_decodes = ENGINE.max_concurrent_decodes
    max_prefill_length, mesh = ENGINE.max_prefill_length, ENGINE.mesh
    logprobs = False

    def load_params(self, params):
        return params

    def prefill(self, *, params, existing_prefix=None, padded_tokens, true_length):
        assert existing_prefix is None and padded_tokens.ndim == 1
        options = dict(padded_tokens=padded_tokens, true_length=true_length, sampler=GREEDY)
        return ENGINE.prefill(params=params, **options)

    def insert(self, prefix, decode_state, slot):
        return ENGINE.insert(prefix, decode_state, slot)

    def generate(self, params, decode_state):
        state, out = ENGINE.generate(params, decode_state, GREEDY)
        fields = {} if self.logprobs else dict(logp=None)
        return state, dataclasses.replace(out, entropy=None, live=None, steps=None, **fields)

    def init_decode_state(self):
        return ENGINE.init_decode_state()

    def get_tokenizer(self):
        return None

    def build_tokenizer(self, metadata):
        return None

    def get_prefix_destination_sharding(self):
        return None


class WithLogprobs(Contract):
    logprobs = True


def sampled(engine, rollout=ROLLOUT, samples=3, sampler=None, **options):
    collection = Collection(
        engine, LOOSE, PROMPTS, samples, Purpose.TRAIN, 3, sampler=sampler, **options
    )
    return {x.key: x for x in collection}


@pytest.mark.parametrize("kind", [Contract, WithLogprobs])
def test_an_engine_of_the_contract_alone_rolls_out(kind):
    """Its tokens are those that the batcher draws from the whole engine; more prompts than slots,
    of two buckets, some cut by their limits. Log-probs are the engine's, or unknown.
    """
    engine = PlainEngine(kind(), ROLLOUT, (EOS,))
    limits = [3 + n for n in range(len(PROMPTS))]
    expected = sampled(ENGINE, sampler=GREEDY, max_new_tokens=limits)
    actual = sampled(engine, max_new_tokens=limits)
    assert actual.keys() == expected.keys() and len(actual) > ROLLOUT.slots
    assert {len(x.response) for x in actual.values()} >= {3, 4}
    for key, x in expected.items():
        y, n = actual[key], len(x.prompt.tokens)
        np.testing.assert_array_equal(y.tokens, x.tokens)
        assert y.truncated == x.truncated
        if kind is WithLogprobs:
            np.testing.assert_allclose(y.logp, x.logp, atol=1e-5)
        else:
            assert (y.logp[n:] == UNKNOWN_LOGP).all() and not y.logp[:n].any()
        assert np.isnan(y.entropy[n:]).all()


def test_its_stats_count_its_tokens():
    collection = Collection(
        PlainEngine(Contract(), ROLLOUT, (EOS,)), LOOSE, PROMPTS, 1, Purpose.TRAIN, 3
    )
    rollouts, stats = [*collection], collection.stats
    assert stats.tokens == stats.live_steps == sum(x.response_length for x in rollouts)
    assert stats.prefills > 0 and 0 < stats.metrics()["rollout/slot_occupancy"] <= 1


def test_a_cancelled_sample_leaves_its_slot():
    batcher = PlainEngine(Contract(), ROLLOUT, (EOS,)).batcher(LOOSE, Purpose.TRAIN, 3)
    first, second = (Request.of(PROMPTS[0], i, i, 40, 0) for i in range(2))
    batcher.add([first, second])
    batcher.step()
    batcher.cancel(first)
    done = []
    while batcher.busy:
        done += batcher.step()
    assert {id(x) for x in done} == {id(first), id(second)} and first.cancelled
    assert len(first.tokens) <= len(second.tokens)


def test_what_it_cannot_follow_is_refused():
    def changed(**options):
        return dataclasses.replace(ROLLOUT, **options)

    for rollout, message in (
        (changed(slots=4), "rollout.slots = 4: Contract has 6 slots of 1 sequences"),
        (changed(prompt_buckets=(8, 32)), r"prompt_buckets = \(8, 32\): Contract takes .* 16"),
        (changed(page_tokens=4, cache_pages=64), "rollout.cache_pages = 64: Contract has no pages"),
    ):
        with pytest.raises(ConfigError, match=message):
            PlainEngine(Contract(), rollout, (EOS,))
    with pytest.raises(ConfigError, match="Contract takes no sampler, so it cannot sample with"):
        sampled(PlainEngine(Contract(), ROLLOUT, (EOS,)), sampler=GREEDY)
    with pytest.raises(ConfigError, match=r"SimpleNamespace lacks .*prefill.* of engine_api"):
        PlainEngine(SimpleNamespace(), ROLLOUT, (EOS,))
    with pytest.raises(ConfigError, match=r"compares the sampler's .* Contract returns none"):
        sampled(PlainEngine(Contract(), ROLLOUT, (EOS,), needs_logp=True))
    assert sampled(PlainEngine(WithLogprobs(), ROLLOUT, (EOS,), needs_logp=True))
    engine = PlainEngine(Contract(), ROLLOUT, (EOS,))
    with pytest.raises(ConfigError, match="no log-probs of the likeliest tokens"):
        engine.init_decode_state(4)
    with pytest.raises(ConfigError, match=r"a sample of 17 tokens .* at most 16"):
        engine.prefill_multisampling(
            params=LOOSE,
            padded_tokens=np.zeros((1, 32), np.int32),
            true_length=np.array([17]),
            sampler=None,
            rng=np.zeros((1, 1, 2), np.uint32),
            num_samples=1,
        )


def test_several_tokens_a_call_end_at_the_first_end_token():
    """Tokens that an engine returns after an end token, or beyond a limit, are not taken."""

    class Fixed(Contract):
        def generate(self, params, decode_state):
            n, data = self.max_concurrent_decodes, np.zeros((self.max_concurrent_decodes, 9))
            data[:, :4], data[:, 4:8] = [[7, EOS, 8, EOS]] * n, 1
            data[1, :4] = 7
            data[2, 4:8] = [0, 1, 1, 1]
            return decode_state, ResultTokens(data.astype(np.int32), (0, 4), (4, 8), (8, 9), 1)

    engine = PlainEngine(Fixed(), ROLLOUT, (EOS,))
    state = engine.init_decode_state()
    state.live[:3], state.lengths[:3], state.limits[:3] = True, 5, 8
    state, out = engine.generate(None, state)
    taken = [out.get_result_at_slot(slot) for slot in range(4)]
    tokens = [x.tokens[0][x.valid[0].astype(bool)].tolist() for x in taken]
    assert tokens == [[7, EOS], [7, 7, 7], [EOS], []]
    assert [x.lengths.item() for x in taken] == [7, 8, 6, 0] and not out.live.any()


@pytest.mark.slow  # TensorFlow's import takes most of a minute
@pytest.mark.skipif(
    importlib.util.find_spec("jetstream") is None, reason="google-jetstream is not installed"
)
def test_jetstreams_mock_engine_generates_through_the_batcher():
    """A prefill of [3, 5] at weight 2 is [6, 10]; its tokens are 16, then 16 + 16 / 2, ..."""
    program = Path(__file__).with_name("mock_session.py")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"}
    environment.pop("PJRT_NPROC", None)
    result = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=600, env=environment
    )
    assert result.returncode == 0, result.stderr[-2000:]
    responses = json.loads(result.stdout.splitlines()[-1])
    assert responses == [[16, 24, 36, 54], [16, 24, 36, 54], [28, 42, 63, 94]]


def test_the_protocol_of_the_fallback_is_the_contract():
    assert isinstance(Contract(), Engine)
    extra = ("default_sampler", "slot_groups", "bulk_insert", "free_resource", "config", "end_ids")
    assert not any(hasattr(Contract(), name) for name in extra)
