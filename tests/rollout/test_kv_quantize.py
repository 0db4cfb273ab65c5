"""8-bit keys and values: rounded row by row, close to the exact rollout, equal with and without
pages, and refused without an importance correction.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import COMPUTE, EOS, MODEL, ROLLOUT, make_prompt, random_params
from tiny_run import tiny_run

from compass_jax.config import ConfigError, named_correction
from compass_jax.model.attention import LayerCache, attention
from compass_jax.model.params import to_decode
from compass_jax.model.quantize import Quantized, dequantize, kind_of, quantize, quantized_zeros
from compass_jax.model.rope import rope_tables
from compass_jax.model.transformer import Transformer, init_cache
from compass_jax.rollout.collect import Collection
from compass_jax.rollout.engine import Engine
from compass_jax.rollout.sampling import Purpose
from compass_jax.training.step import forward

PARAMS = random_params()
ROLL = dataclasses.replace(ROLLOUT, cache_bucket=32, page_tokens=4)
PROMPTS = [make_prompt(i, n) for i, n in enumerate((3, 8, 5, 12))]


def rollouts(**changes):
    engine = Engine(MODEL, COMPUTE, dataclasses.replace(ROLL, **changes), EOS)
    job = Collection(engine, to_decode(PARAMS), PROMPTS, 3, Purpose.TRAIN, 0)
    return {r.row: r for r in job}, job


@pytest.mark.parametrize("kind", ["int8", "e4m3"])
def test_what_is_written_is_each_rows_own_rounding(kind):
    """Positions that are not written do not change. Each written row has a separate scale, so that
    a large row does not cost its neighbours precision.
    """
    rng = np.random.default_rng(0)
    config = dataclasses.replace(MODEL, layers=1)
    layer = jax.tree.map(lambda x: x[0], PARAMS["run_0"])["layer_0"]["attention"]
    x = jnp.asarray(rng.standard_normal((2, 3, 32)), jnp.float32).at[0, 1].mul(1e3)
    positions = jnp.array([[2, 3, 4], [0, 1, 2]])
    tables = rope_tables(positions, config.head_dim, config.rope_theta, jnp.float32)
    rounded, exact = (
        attention(x, layer, tables, positions, config, LayerCache(*(make() for _ in range(2))))[1]
        for make in (lambda: quantized_zeros((2, 2, 6, 8), kind), lambda: jnp.zeros((2, 2, 6, 8)))
    )
    for a, b in zip(rounded, exact, strict=True):
        assert isinstance(a, Quantized) and kind_of(a) == kind
        np.testing.assert_array_equal(
            dequantize(a, "float32"),
            jnp.where(b == 0, 0, dequantize(quantize(b, kind, axis=-1), "float32")),
        )
        step = np.abs(np.asarray(b)).max(-1, keepdims=True) * (
            1 / 254 if kind == "int8" else 1 / 16
        )
        assert np.all(np.abs(np.asarray(dequantize(a, "float32")) - b) <= step * 1.001)
        assert np.asarray(b)[0, :, 3].std() > 0.1


@pytest.mark.parametrize(
    ("kind", "closest", "farthest"),
    [("int8", 1e-4, 0.05), pytest.param("e4m3", 1e-3, 0.3, marks=pytest.mark.slow)],
)
def test_the_rollout_is_close_to_training_and_reports_its_own_log_probs(kind, closest, farthest):
    """Training scores the same tokens with the same routes. The mean gap is that of 8-bit rounding:
    above zero, but small.
    """
    samples, job = rollouts(kv_quantize=kind)
    longest = max(len(r.tokens) for r in samples.values())
    tokens, lengths = (
        np.zeros((len(samples), longest), np.int32),
        np.array([len(samples[row].tokens) for row in sorted(samples)], np.int32),
    )
    for row, r in samples.items():
        tokens[row, : len(r.tokens)] = r.tokens
    score = jax.jit(forward, static_argnums=(0, 5))
    logp = np.asarray(
        score(Transformer(MODEL, COMPUTE), PARAMS, tokens, lengths, job.routes[:, :longest], 1.0)[0]
    )
    gaps = np.concatenate(
        [
            np.abs(r.logp - logp[row, : len(r.tokens)])[len(r.prompt.tokens) :]
            for row, r in samples.items()
        ]
    )
    assert closest < gaps.mean() < farthest


def test_pages_and_preemption_change_no_token_of_an_8_bit_cache():
    """A preempted sample's keys are recomputed by a prefill, which rounds the same values as
    decoding did.
    """
    dense, _ = rollouts(kv_quantize="int8")
    paged, job = rollouts(kv_quantize="int8", cache_pages=16)
    assert job.stats.preempted > 0
    assert {row: r.tokens.tolist() for row, r in paged.items()} == {
        row: r.tokens.tolist() for row, r in dense.items()
    }


def test_the_cache_takes_a_third_of_the_memory():
    """A head of 32 takes 36 bytes instead of 128 in float32. A head of 8, as here, takes 12 bytes
    instead of 32.
    """
    sizes = [
        sum(x.nbytes for x in jax.tree.leaves(init_cache(MODEL, 4, 16, COMPUTE, kind)))
        for kind in ("off", "int8", "e4m3")
    ]
    assert sizes[1] == sizes[2] == sizes[0] * 12 // 32


def test_without_a_correction_it_is_refused():
    config = tiny_run()
    config = dataclasses.replace(
        config, rollout=dataclasses.replace(config.rollout, kv_quantize="int8")
    )
    with pytest.raises(
        ConfigError,
        match=(
            r"rollout.kv_quantize = 'int8' samples from rounded keys and values: set"
            r" rl\.correction to"
        ),
    ):
        config.validate_for_rl()
    dataclasses.replace(
        config, rl=dataclasses.replace(config.rl, correction=named_correction("tis"))
    ).validate_for_rl()
