"""Conversations that share a row: loss, gradient and router statistics are those of separate rows,
for dense and MoE models and every layout of the layers.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny import COMPUTE, MODEL, random_params

from compass_jax.config import MeshConfig
from compass_jax.data.packing import packed, padded
from compass_jax.data.sft import SFTExample
from compass_jax.devices.sharding import Placement, make_mesh
from compass_jax.model.params import in_layout, place, to_decode, training_layout
from compass_jax.model.transformer import Transformer, apply, init_cache
from compass_jax.training import step

DENSE = dataclasses.replace(MODEL, family="qwen3", moe=None)
F64 = dataclasses.replace(COMPUTE, dtype="float64", param_dtype="float64")
LONGEST = 48
SIZES = (31, 9, 24, 1, 13, 40, 2, 17)


def conversations():
    """Returns conversations, some of which begin with a learnt token, which no token predicts."""
    rng = np.random.default_rng(4)
    return [
        SFTExample(rng.integers(2, 40, n).astype(np.int32), rng.random(n) < 0.6, "") for n in SIZES
    ]


def gradient(config, compute, rows, placement=None):
    """Returns (gradient, diagnostics) of all rows in one micro-batch, with the router's loss."""
    layout = training_layout(compute)
    model = Transformer(config, compute, layout, placement)
    params = in_layout(random_params(config, compute.param_dtype), layout)
    if placement is not None:
        params = place(params, config, placement)
    weight = (rows.learnt / rows.learnt.sum()).astype(compute.dtype)
    share = jnp.ones((), compute.dtype)
    inputs = rows.tokens, rows.lengths, weight, share, 0.3, rows.segments
    return step.sft_gradients(model, params, *inputs)


@pytest.mark.parametrize("config", [DENSE, MODEL], ids=["dense", "moe"])
@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_a_packed_batch_has_the_gradient_of_its_conversations_in_rows_of_their_own(
    x64, config, scan
):
    compute = dataclasses.replace(F64, scan_layers=scan)
    rows = packed(conversations(), LONGEST)
    assert len(rows.lengths) == 3 and rows.lengths.sum() == sum(SIZES)
    grads, metrics = gradient(config, compute, rows)
    expected_grads, expected_metrics = gradient(config, compute, padded(conversations(), LONGEST))
    assert float(metrics["loss"][0]) > 0 and metrics.keys() == expected_metrics.keys()
    for name in expected_metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-12, err_msg=name)
    for a, b in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-13)
    if config is MODEL:  # a conversation's last token and padding count for no expert
        assert float(metrics["moe/load_max_over_mean"][1]) == 2 * sum(n - 1 for n in SIZES)


def test_over_a_mesh_and_in_float32_it_is_the_same():
    placement = Placement(make_mesh(MeshConfig(fsdp=2, expert=2, tensor=2)))
    rows = packed(conversations(), LONGEST)
    rows = jax.tree.map(lambda x: np.concatenate([x, np.zeros_like(x[:1])]), rows)  # a padding row
    grads, metrics = gradient(MODEL, COMPUTE, rows, placement)
    expected_grads, expected_metrics = gradient(MODEL, COMPUTE, padded(conversations(), LONGEST))
    for name in expected_metrics:
        np.testing.assert_allclose(metrics[name], expected_metrics[name], rtol=1e-5, err_msg=name)
    for a, b in zip(*map(jax.tree.leaves, (grads, expected_grads)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_no_token_of_another_conversation_changes_a_log_prob():
    """One conversation of a row is replaced, and the others keep their log-probs bit for bit."""
    rows = packed(conversations(), LONGEST)
    model, params = Transformer(MODEL, COMPUTE), random_params()

    @jax.jit
    def forward_logp(tokens, lengths, segments):
        return step.forward(model, params, tokens, lengths, None, 1.0, segments)[0]

    def logp(tokens):
        return forward_logp(tokens, rows.lengths, rows.segments)

    before = np.asarray(logp(rows.tokens))
    for number in (1, 2):
        replaced = rows.segments == number
        after = np.asarray(logp(np.where(replaced, (rows.tokens + 1) % 40, rows.tokens)))
        np.testing.assert_array_equal(after[~replaced], before[~replaced])
        assert np.any(after[replaced] != before[replaced])


def test_positions_begin_at_0_in_each_conversation_and_its_last_token_is_no_input():
    segments = jnp.asarray([[1, 1, 1, 2, 3, 3, 0, 0], [1, 1, 1, 1, 1, 1, 2, 2]])
    at = jnp.broadcast_to(jnp.arange(8)[None], (2, 8))
    mask = at < jnp.asarray([[6], [8]]) - 1
    positions, inputs = step._within(segments, at, mask)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 0, 0, 1, 0, 1], [0, 1, 2, 3, 4, 5, 0, 1]])
    np.testing.assert_array_equal(inputs, [[1, 1, 0, 0, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 1, 0]])


@pytest.mark.parametrize("what", ["a cache", "context"])
def test_a_model_that_cannot_tell_segments_apart_refuses_them(what):
    tokens = jnp.zeros((2, 16), jnp.int32)
    options = {"mask": tokens == 0, "segments": tokens}
    if what == "a cache":
        model = Transformer(MODEL, COMPUTE, "decode")
        options["cache"] = init_cache(MODEL, 2, 16, COMPUTE)
    else:
        model = Transformer(MODEL, COMPUTE, placement=Placement(make_mesh(MeshConfig(context=2))))
    params = to_decode(random_params()) if what == "a cache" else random_params()
    with pytest.raises(ValueError, match=r"segments need whole rows.*no KV cache"):
        apply(model, params, tokens, tokens, **options)
